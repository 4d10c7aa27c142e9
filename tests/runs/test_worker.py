"""A worker does many runs: what one of them needed is free for the next."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from driveprune import datasets, recipes
from driveprune.runs.spec import make_spec
from tests.runs.kills import KNOBS

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to look at the memory")
MEBIBYTE = 1 << 20
DIGITS = datasets.load("digits")
WIDE = recipes.scaled(
    recipes.get("demo-digits"), epochs=1, batch=256, width=2.0, images=512, test_images=50
)  # its values take so much memory that they lie in what the kernels use again


@contextmanager
def worker(root):
    """A process that does runs; a function that has one done and tells the memory that it has afterwards, in MiB."""
    command = [sys.executable, "-m", "driveprune.runs.worker", str(root), str(os.getpid())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:

        def do(spec, engine="sparse"):
            order = {"spec": spec.to_json(), "data_dir": None, "share": False, "every": 1e9, "engine": engine}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == {"id": spec.id, "error": None}
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE

        yield do
        process.stdin.close()


def spec_of(method, seed, sparsity=0.9):
    knobs = {**KNOBS.get(method, {}), **({"early_epochs": 0.5} if method == "drive" else {})}
    return make_spec(WIDE, DIGITS, method=method, sparsity=sparsity, seed=seed, knobs=knobs)


def test_a_worker_does_not_grow(tmp_path):
    """Each run has a mask of its own, and so values and tables of sizes of their own."""
    with worker(tmp_path) as do:
        memory = [do(spec_of("snip", seed)) for seed in range(8)]
    assert memory[-1] - memory[2] < 30, memory  # it was 95


METHODS = ("snip", "gmp", "drive", "magnitude", "synflow", "erk", "random", "force")
RUNS = 100


@pytest.mark.slow
def test_100_runs_end_within_100_megabytes_of_the_second(tmp_path):
    """The numbers go to results/worker.json."""
    start = time.time()
    with worker(tmp_path) as do:
        memory = [do(spec_of(METHODS[n % len(METHODS)], n, [0.8, 0.9, 0.95][n % 3])) for n in range(RUNS)]
    assert memory[-1] - memory[1] < 100, memory
    content = {
        "command": "make test-all",
        "what": "resident memory of a worker of a sweep with --engine sparse after each of its runs, in MiB",
        "runs": RUNS,
        "methods": METHODS,
        "after_run": {number: round(memory[number - 1], 1) for number in (1, 2, 10, 25, 50, 75, 100)},
        "most_after_a_run": round(max(memory), 1),
        "last_above_second": round(memory[-1] - memory[1], 1),
        "seconds": round(time.time() - start),
    }
    results = Path(__file__).parents[2] / "results"
    (results / "worker.json").write_text(json.dumps(content, indent=2) + "\n")
