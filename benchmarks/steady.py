"""Do the tests with several processes ever fail? They run again and again, beside a core that is kept busy.

python benchmarks/steady.py [ROUNDS]    # about 5 minutes a round on 2 cores; 50 if it is not said

After each round its counts are in results/steady.json, beside those of campaigns of other lengths.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measure

ROOT = Path(__file__).parent.parent
TESTS = {
    "ranks of torchrun, DDP and fully_shard": ["tests/test_distributed.py"],
    "scripts with gloo end clean": ["tests/test_gloo.py", "-m", ""],
    "Hugging Face's Trainer in two processes": ["tests/integrations/test_huggingface.py", "-k", "two_processes"],
    "Lightning's Trainer in two processes": ["tests/integrations/test_lightning.py", "-k", "two_processes"],
    "Ray: killed workers and nodes, Ctrl-C": ["tests/integrations/test_ray.py", "-k", "killed_workers or ctrl_c"],
}
PASSED = 0


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that does nothing, all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(words: list[str]) -> tuple[float, str]:
    """The seconds that tests took, and what they said if one failed."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    return seconds, "" if done.returncode == PASSED else "\n".join(done.stdout.splitlines()[-40:])


def row_of(name: str, ends: list[tuple[float, str]]) -> dict[str, object]:
    """What became of a test in all rounds."""
    seconds, failures = [each for each, _ in ends], [said for _, said in ends if said]
    return {
        "tests": name,
        "rounds": len(ends),
        "failed": len(failures),
        "median_s": round(statistics.median(seconds), 1),
        "longest_s": round(max(seconds), 1),
        "failures": failures,
        "holds": not failures,
    }


def keep(rounds: int, found: dict[str, list[tuple[float, str]]]) -> list[dict[str, object]]:
    """Write down what is known so far; the rows."""
    path, rows = measure.RESULTS / "steady.json", [row_of(name, ends) for name, ends in found.items()]
    known = json.loads(path.read_text())["campaigns"] if path.exists() else {}
    load = round(os.getloadavg()[2], 1)
    known[f"{rounds} rounds"] = {"machine": measure.machine(), "load_at_the_end": load, "rows": rows}
    path.write_text(
        json.dumps({"command": "python benchmarks/steady.py ROUNDS", "campaigns": known}, indent=2) + "\n"
    )
    return rows


def main(rounds: int) -> None:
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in TESTS}
    with busy_core():
        for number in range(rounds):
            for name, words in TESTS.items():
                seconds, failure = run(words)
                found[name].append((seconds, failure))
                print(f"{number + 1}/{rounds} {name}: {seconds:.0f} s{' FAILED' if failure else ''}", flush=True)
            rows = keep(rounds, found)
    if failed := [row["tests"] for row in rows if row["failed"]]:
        raise SystemExit(f"failed: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
