"""Many ranks as threads of one process, with torch's own process group for tests: quick enough for many examples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


def on_ranks(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns for each rank; the first error of a rank is raised."""
    _set_thread_isolation_mode(True)
    _install_threaded_pg()
    store, found, errors = dist.HashStore(), [None] * count, []

    def run(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=count, store=store)
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return found
