"""Sweeps: grids, several processes, failures, interruption."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from driveprune import datasets
from driveprune.runs.store import read_run, read_runs, read_wanted
from driveprune.runs.sweep import Outcome, grid, sweep
from tests.patience import PATIENCE
from tests.runs.kills import KNOBS, SMALL, assert_same, small_spec

DIGITS = datasets.load("digits")
QUIET = {"every": 1e9, "console": Console(file=io.StringIO())}


def specs(*methods, **options):
    knobs = {name: {k: [v] for k, v in KNOBS[name].items()} for name in methods if name in KNOBS}
    given = {"sparsities": [0.9], "seeds": [0], "knobs": knobs, **options}
    return grid(SMALL, DIGITS, methods=methods, **given)


def test_a_grid_has_each_combination_once():
    found = specs("dense", "snip", "drive", sparsities=[0.9, 0.95], seeds=[0, 1])
    keys = [(one.method, one.sparsity, one.seed) for one in found]
    assert len(keys) == len(set(keys)) == 2 * (1 + 2 + 2)
    assert {key for key in keys if key[0] == "dense"} == {("dense", 0.0, 0), ("dense", 0.0, 1)}


def test_checks_are_more_runs():
    found = specs("dense", "drive", checks=["shuffle", "reinit", "random", "erk"])
    assert sorted((one.method, one.check) for one in found) == [
        ("dense", ""), ("drive", ""), ("drive", "random"), ("drive", "reinit"), ("drive", "shuffle"), ("erk", ""),
        ("erk", "reinit"),
    ]  # fmt: skip


def test_knobs_make_a_grid_too():
    found = grid(
        SMALL, DIGITS, methods=["drive"], sparsities=[0.9], seeds=[0],
        knobs={"drive": {"cuts": [2, 3], "fresh": [True, False]}},
    )  # fmt: skip
    assert sorted((one.knobs["cuts"], one.knobs["fresh"]) for one in found) == [
        (2, False), (2, True), (3, False), (3, True),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="knobs for imp, which is not among the methods drive"):
        grid(SMALL, DIGITS, methods=["drive"], sparsities=[0.9], seeds=[0], knobs={"imp": {"cycles": [3]}})


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep in two processes."""
    root = tmp_path_factory.mktemp("swept")
    wanted = specs("dense", "imp", "snip", "drive", sparsities=[0.9, 0.95])
    return root, wanted, sweep(root, wanted, DIGITS, jobs=2, **QUIET)


def test_all_runs_are_done_and_a_second_sweep_does_nothing(swept):
    root, wanted, outcome = swept
    assert set(outcome.done) == {one.id for one in wanted}
    assert outcome.failed == {}
    times = {run.path: (run.path / "result.json").stat().st_mtime_ns for run in read_runs([root])}
    again = sweep(root, wanted, DIGITS, jobs=1, **QUIET)
    assert again == Outcome(skipped=[one.id for one in wanted])
    assert times == {run.path: (run.path / "result.json").stat().st_mtime_ns for run in read_runs([root])}


def test_what_a_sweep_wants_is_written_down_before_it_is_done(tmp_path):
    wanted = specs("snip", seeds=[0, 1])
    with pytest.raises(ValueError, match="jobs must be"):
        sweep(tmp_path, wanted, DIGITS, jobs=0, **QUIET)
    assert not list(tmp_path.iterdir())
    sweep(tmp_path, wanted, DIGITS, **QUIET)
    assert read_wanted(tmp_path).keys() == {one.id for one in wanted}
    assert {one.standing for one in read_runs([tmp_path])} == {"done"}


def test_neither_jobs_nor_sharing_changes_what_comes_out(swept, tmp_path):
    root, wanted, _ = swept
    sweep(tmp_path, wanted[::3], DIGITS, jobs=1, share=False, **QUIET)
    for one in wanted[::3]:
        assert_same(root / one.id, tmp_path / one.id)
    assert not (tmp_path / "beginnings").exists()


def test_a_common_beginning_is_made_once_and_charged_to_each(swept):
    root, wanted, _ = swept
    drive = [read_run(root / one.id).result["seconds"] for one in wanted if one.method == "drive"]
    assert drive[0]["early training"] == drive[1]["early training"]
    assert all(seconds["pruning"] > seconds["early training"] for seconds in drive)
    kept = {path.stem for path in (root / "beginnings" / wanted[0].beginning).glob("*.safetensors")}
    assert kept == {"steps-7", "steps-10"}  # IMP's first cycle; DRIVE's early training


def test_failing_runs_are_told_of_and_the_others_are_done(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def score(model, mask, batches, *, loss, generator):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wanted = specs("broken", "snip")
    root = tmp_path / "runs"
    output = io.StringIO()
    outcome = sweep(root, wanted, DIGITS, jobs=1, console=Console(file=output, width=300))
    assert outcome.failed == {wanted[0].id: "ZeroDivisionError: division by zero"}
    assert outcome.done == [wanted[1].id]
    assert "failed " + wanted[0].id in output.getvalue()
    run = read_run(root / wanted[0].id)
    assert run.standing == "failed"
    assert run.error.endswith("ZeroDivisionError: division by zero")


def test_a_process_that_dies_is_a_failed_run_and_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text(
        "import os\ndef score(model, mask, batches, *, loss, generator):\n    os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wanted = specs("deadly", "snip")
    outcome = sweep(tmp_path / "runs", wanted, DIGITS, jobs=1, **QUIET)
    assert outcome.failed == {wanted[0].id: "its process ended with exit code -9"}
    assert outcome.done == [wanted[1].id]


COMMAND = (
    "sweep --methods imp --sparsities 0.9,0.95 --threads 1 --jobs 2 --every 0 --width 0.25 --images 400 --epochs 4 "
    "--json --knob imp.cycles=6"
)


def test_ctrl_c_stops_all_processes_and_the_same_command_goes_on(tmp_path):
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored in the background
    start = f"{listening}; from driveprune.cli import main; main()"
    words = [sys.executable, "-c", start, *COMMAND.split(), "--runs", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint-*")), process)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert "the same command goes on" in errors
    assert json.loads(output)["interrupted"] is True
    assert not any(run.standing == "running" for run in read_runs([tmp_path]))  # nobody is left behind
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert {run["standing"] for run in json.loads(done.stdout)["runs"]} == {"done"}


def test_processes_end_when_the_sweep_is_killed(tmp_path):
    words = [sys.executable, "-m", "driveprune", *COMMAND.split(), "--runs", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint-*")), process)
    process.kill()
    process.wait()
    wait_for(lambda: not any(run.standing == "running" for run in read_runs([tmp_path])))


@pytest.mark.slow
def test_processes_end_when_the_sweep_is_killed_before_they_have_begun(tmp_path):
    words = [sys.executable, "-m", "driveprune", *COMMAND.split(), "--runs", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "workers.log").exists, process)
    time.sleep(0.5)  # the workers are importing
    process.kill()
    process.wait()
    time.sleep(15)
    assert not any(run.standing == "running" for run in read_runs([tmp_path]))


def wait_for(happened, process=None, seconds=PATIENCE):
    end = time.time() + seconds
    while not happened():
        assert time.time() < end
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_jobs_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        sweep(tmp_path, [small_spec()], DIGITS, jobs=0)
    assert list(Path(tmp_path).iterdir()) == []
