"""Runs a target over many mutated inputs, under a limit of memory and of time, and counts what became of them."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fuzz.mutations import mutated_bytes

TARGETS = (
    "network", "checkpoint", "json_file", "store", "archive", "idx", "cifar", "npz", "images_cache", "pictures",
    "places", "head", "lists",
)  # fmt: skip
SECONDS = 60
"""For an input; the machine may be loaded."""
SLACK = 48 << 20
"""Bytes by which the peak may be above twice that of the honest inputs: what the allocator keeps."""


def inputs(target: ModuleType, folder: Path, count: int, seed: int, first: int = 0) -> Any:
    """Mutated inputs, each by its own number alone."""
    honest = target.honest(folder)
    for number in range(first, first + count):
        chance = random.Random(f"{target.__name__} {seed} {number}")
        data = chance.choice(honest)
        try:
            odd = target.mutated(data, chance)
        except RecursionError:  # a nest in a nest in a nest, which cannot be written
            odd = mutated_bytes(data, chance)
        yield number, odd


def run(name: str, count: int, seed: int, first: int = 0) -> dict[str, Any]:
    """Counts of one campaign; an AssertionError that names the input if there is a find."""
    target = importlib.import_module(f"tests.fuzz.{name}")
    counts = {"inputs": 0, "taken": 0, "refused": 0}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        honest, folder = Path(root) / "honest" / name, Path(root) / name
        honest.mkdir(parents=True)
        folder.mkdir()
        before = _peak()
        for data in target.honest(honest):
            target.target(data, folder)
        needed = _peak() - before
        with _limited(2 * needed + (1 << 29)):
            for number, data in inputs(target, honest, count, seed, first):
                counts["inputs"] += 1
                counts[_outcome(target, data, folder, f"{name} {seed} {number}")] += 1
        used = _peak() - before
        shutil.rmtree(folder)
    assert used <= 2 * needed + SLACK, f"{name}: {used:,} bytes, where honest inputs take {needed:,}"
    return {**counts, "seconds": round(time.monotonic() - start, 1)}


def _outcome(target: ModuleType, data: bytes, folder: Path, said: str) -> str:
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        target.target(data, folder)
        return "taken"
    except TimeoutError:
        raise AssertionError(f"{said}: it hangs, {data[:300]!r}") from None
    except (ValueError, OSError):
        return "refused"
    except BaseException:
        raise AssertionError(f"{said}: {traceback.format_exc()}\n{data[:2000]!r}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _limited:  # noqa: N801
    """So many bytes of addresses more than now, where the system can tell."""

    def __init__(self, more: int) -> None:
        self._more = more

    def __enter__(self) -> None:
        import resource

        self._before = resource.getrlimit(resource.RLIMIT_AS)
        status = Path("/proc/self/status")
        if status.exists():
            size = next(line for line in status.read_text().splitlines() if line.startswith("VmSize"))
            resource.setrlimit(resource.RLIMIT_AS, (int(size.split()[1]) * 1024 + self._more, self._before[1]))

    def __exit__(self, *_: object) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, self._before)


def main(words: list[str]) -> None:
    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    names = TARGETS if words[0] == "all" else words[0].split(",")
    count, seed, first = [*map(int, words[1:]), 0, 0][:3]
    for name in names:
        print(json.dumps({name: run(name, count, seed, first)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
