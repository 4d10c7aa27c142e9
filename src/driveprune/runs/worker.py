"""A process that does runs for a sweep, one after the other, as it is told by lines of JSON.

It reads {"spec": ..., "data_dir": ..., "share": ..., "every": ..., "engine": ..., "trust": ...} from stdin and
answers {"id": ..., "error": ...} on stdout. What a run prints goes to log.txt in its folder. It ends when the sweep
does.
If it has to end before, by SIGTERM or without its sweep, a run that is under way writes a checkpoint first.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from driveprune import datasets
from driveprune.batches import Data
from driveprune.files import open_log
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec
from driveprune.runs.stopping import asked
from driveprune.runs.store import open_run, tell_unwritten
from driveprune.runs.trust import check_trusted, code_here, names_code
from driveprune.train import Stopped

GRACE = 60.0
"""Seconds that a run has to write a checkpoint and end when its sweep is gone."""


def main(root: Path, parent: int) -> None:
    """Do what the sweep with this process id asks for, until there is nothing more."""
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout, sys.stderr = _lenient(1), _lenient(2)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    gc.freeze()  # what is imported stays, and need not be looked at after each run
    for line in sys.stdin:
        answers.write(json.dumps(do(root, json.loads(line))) + "\n")
        answers.flush()


def do(root: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Do a run as it was ordered: its id, and why it failed or None."""
    spec, trust, error = Spec.from_json(order["spec"]), order.get("trust", False), None
    try:
        with code_here(names_code(spec)):
            check_trusted(spec, trust, has_data=True)  # the sweep has the data, and has checked their name
        with _printing_to(open_run(root, spec) / "log.txt"), asked() as stop:
            try:
                data = _data(spec.recipe.data, order["data_dir"], spec.size)
                carry_out(
                    root, spec, data, share=order["share"], wait=True, every=order["every"], engine=order["engine"],
                    trust=trust, stop=stop,
                )  # fmt: skip
            except Exception:
                traceback.print_exc()
                raise
            except Stopped:
                raise SystemExit(stop.code) from None
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"
    _give_memory_back()
    return {"id": spec.id, "error": error}


def _give_memory_back() -> None:
    """Let the next run begin with no more memory than this one: glibc would keep what was freed in small pieces."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """What this process prints, its libraries included, goes to a file meanwhile, if it can be written."""
    before = os.dup(1), os.dup(2)
    try:
        with open_log(path) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    except OSError as error:
        tell_unwritten(path.parent, f"{error}: what the run prints is not kept")
    try:
        yield
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        for number, old in enumerate(before, 1):
            os.dup2(old, number)
            os.close(old)


class _Lenient(io.RawIOBase):
    """What a run prints is only for looking at: where it cannot be written, on a full disk say, it is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return os.write(self._descriptor, data)
        return len(data)


def _lenient(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Lenient(descriptor))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


@functools.lru_cache(maxsize=1)
def _data(name: str, data_dir: str | None, size: int | None) -> Data:
    return datasets.load(name, data_dir, size=size)


def _end_with_parent(parent: int) -> None:
    """If the sweep is killed, its runs stop, too; they go on when it is called again."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
