"""What gloo's threads hold when a process ends, for which PyTorch would abort it.

A thread of gloo has the tensors of a sum for a moment longer than the sum takes, and needs the interpreter to let go
of them. If that has ended, the process does, too: "terminate called without an active exception" (pytorch#179291,
pytorch#190489). `destroy_process_group` waits for the threads only if nothing else holds the group. But a network in
DDP does, so does the mesh of `fully_shard`, and so do functions of torch whose default argument it is.

Importing this is all that is needed: those functions do not hold the group, and the process waits for the threads
when it ends.
"""

from __future__ import annotations

import atexit
import importlib
import time
from contextlib import suppress
from pathlib import Path
from types import FunctionType

import torch.distributed as dist

NAME = "pt_gloo_runloop"
"""What PyTorch calls the threads."""

PAUSE, QUIET = 0.02, 5
"""Seconds between two looks at the threads, and after how many looks without a change they hold nothing any more. One
that waits for the interpreter wakes up every 5 ms, and one that waits for a processor does not sleep."""

_TASKS = Path("/proc/self/task")


def settle(seconds: float = 10.0) -> None:
    """Wait until the threads of gloo are done with all that was asked of them, at most for so long.

    Without any, and without a group, it returns at once: a thread that was just made for a group has no name yet.
    Only Linux tells what threads do; elsewhere it does nothing.
    """
    if not _TASKS.exists():
        return
    end, before, quiet = time.monotonic() + seconds, dict[str, str](), 0
    while quiet < QUIET and time.monotonic() < end:
        now = _switches()
        if not now and not (dist.is_available() and dist.is_initialized()):
            return
        quiet = quiet + 1 if now == before and all(now.values()) else 0
        before = now
        time.sleep(PAUSE)  # and lets them have the interpreter


def _switches() -> dict[str, str]:
    """How often each thread of gloo was put to sleep and woken up; nothing for one that is awake."""
    found = {}
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == NAME:
                lines = (task / "status").read_text().splitlines()
                sleeps = any(line.startswith("State:\tS") for line in lines)
                found[task.name] = "".join(line for line in lines if "ctxt_switches" in line) if sleeps else ""
    return found


def _release_defaults() -> None:
    """Import the functions of torch that take the group as a default argument, and let none of them keep it.

    If they are first imported when there is no group, the default is None, which means the group that there is when
    they are called. The first step of an optimiser imports them.
    """
    if not dist.is_available():
        return
    for each in vars(importlib.import_module("torch.distributed.nn.functional")).values():
        if isinstance(each, FunctionType) and each.__defaults__:
            each.__defaults__ = tuple(None if isinstance(v, dist.ProcessGroup) else v for v in each.__defaults__)


_release_defaults()
atexit.register(settle)
