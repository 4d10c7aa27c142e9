"""Do the tests with several processes ever fail? They run again and again, beside a core that is kept busy.

python benchmarks/steady.py [ROUNDS]    # 50 if it is not said

All groups of tests run at the same time, which loads the machine even more. Whenever one has ended, its counts are in
results/steady.json. Called again it does the rounds that are missing: those of the same code count. A group begins
anew if its tests have changed since, or what in the library starts, joins and ends processes, or the packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import measure

from driveprune.files import write_atomically

ROOT = Path(__file__).parent.parent
FILE = measure.RESULTS / "steady.json"
PASSED, INTERRUPTED = 0, (2, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of pytest; an interrupted round is none."""
STOP = threading.Event()
"""Begin no more rounds."""
PROCESSES = ("gloo", "collectives", "train", "pruner", "integrations/*", "runs/*")
SHARED = (
    *(f"tests/{name}.py" for name in ("conftest", "ending", "nets", "patience", "ranks", "runs/kills")),
    *(f"src/driveprune/{name}.py" for name in PROCESSES),
)  # fmt: skip
"""What all groups depend on, beside their own files."""


@dataclass(frozen=True)
class Group:
    """Tests that run one after the other in a process."""

    name: str
    words: tuple[str, ...]
    files: tuple[str, ...]
    """Those that decide whether an earlier round was one of the same code."""
    packages: tuple[str, ...] = ("torch",)


def _group(name: str, file: str, *words: str, more: tuple[str, ...] = (), packages: tuple[str, ...] = ()) -> Group:
    return Group(name, (file, *words), (file, *more), ("torch", *packages))


FOLDER = "tests/integrations"
GROUPS = (
    _group(
        "Ray: killed workers and nodes, Ctrl-C", f"{FOLDER}/test_ray.py", "-k", "killed_workers or ctrl_c",
        packages=("ray",),
    ),
    _group("DDP and fully_shard, and runs under torchrun that are killed", "tests/test_distributed.py"),
    _group("scripts with gloo end clean", "tests/test_gloo.py"),
    _group("runs under torchrun that are stopped", "tests/runs/test_stopping.py", "-k", "ranks_stop"),
    _group(
        "Lightning's Trainer in two processes", f"{FOLDER}/test_lightning.py", "-k", "two_processes",
        more=(f"{FOLDER}/ddp.py",), packages=("lightning",),
    ),
    _group(
        "Hugging Face's Trainer in two processes", f"{FOLDER}/test_huggingface.py", "-k", "two_processes",
        more=(f"{FOLDER}/trainer_ranks.py",), packages=("transformers", "accelerate"),
    ),
)  # fmt: skip


def code(group: Group) -> str:
    """Which code a group tests: a hash of its tests, of what has to do with processes, and of the packages."""
    digest = hashlib.sha256(repr((group.words, [version(each) for each in group.packages], sys.version)).encode())
    shared = (path for pattern in SHARED for path in ROOT.glob(pattern))
    for path in sorted({*shared, *(ROOT / name for name in group.files)}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that does nothing, all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(group: Group) -> tuple[float, str | None]:
    """The seconds that a group's tests took, and what they said if one failed."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *group.words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode in INTERRUPTED:
        raise KeyboardInterrupt
    seconds = round(time.perf_counter() - start, 1)
    return seconds, None if done.returncode == PASSED else "\n".join(done.stdout.splitlines()[-200:])


class Counts:
    """What became of each group in all rounds, in the file."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._lock = threading.Lock()
        known = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
        self._rows = {row["tests"]: row for row in known if row["tests"] in {group.name for group in groups}}
        for group in groups:
            if self._rows.get(group.name, {}).get("code") != code(group):
                self._rows[group.name] = {"tests": group.name, "code": code(group), "seconds": [], "failures": []}

    def missing(self, group: Group, rounds: int) -> int:
        """How many rounds of a group are not done yet."""
        return max(0, rounds - len(self._rows[group.name]["seconds"]))

    def add(self, group: Group, seconds: float, failure: str | None) -> str:
        """Write down a round, if it was one of the code that the file is about; in a few words, how it was."""
        with self._lock:
            row = self._rows[group.name]
            if row["code"] != code(group):
                raise RuntimeError(f"the code of {group.name!r} has changed meanwhile: call it again")
            row["seconds"].append(seconds)
            row["failures"] += [failure] if failure is not None else []
            self._write()
            said = f"{len(row['seconds'])} {group.name}: {seconds:.0f} s"
            return said if failure is None else f"{said} FAILED\n{failure}"

    def failed(self) -> list[str]:
        """The groups that have failed at least once."""
        return [name for name, row in self._rows.items() if row["failures"]]

    def _write(self) -> None:
        content = {
            "command": "make steady",
            "what": "rounds of the tests with several processes, groups of them at the same time and beside a busy "
            "core, all of the same tests and of the same code that starts, joins and ends processes",
            "machine": measure.machine(),
            "load": round(os.getloadavg()[2], 1),
            "rounds": min(len(row["seconds"]) for row in self._rows.values()),
            "failed": sum(len(row["failures"]) for row in self._rows.values()),
            "rows": [_counted(self._rows[group.name]) for group in GROUPS],
        }
        write_atomically(FILE, (json.dumps(content, indent=2) + "\n").encode())


def _counted(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its counts, its lists last."""
    seconds, failures = row["seconds"], row["failures"]
    counts = {"tests": row["tests"], "code": row["code"], "rounds": len(seconds), "failed": len(failures)}
    if seconds:
        counts |= {"median_s": round(statistics.median(seconds), 1), "longest_s": max(seconds)}
    return {**counts, "holds": not failures, "failures": failures, "seconds": seconds}


def repeat(group: Group, counts: Counts, rounds: int) -> None:
    """Do the rounds of a group that are missing."""
    for _ in range(counts.missing(group, rounds)):
        if STOP.is_set():
            return
        print(counts.add(group, *run(group)), flush=True)


def main(rounds: int) -> None:
    counts = Counts(GROUPS)
    with busy_core(), ThreadPoolExecutor(len(GROUPS)) as pool:
        try:
            for _ in pool.map(lambda group: repeat(group, counts, rounds), GROUPS):
                pass
        finally:
            STOP.set()
    if failed := counts.failed():
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
