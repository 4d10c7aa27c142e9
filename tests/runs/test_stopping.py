"""Ctrl-C and SIGTERM: a checkpoint first, the signal's exit code, the same bits after; a second one ends at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driveprune import datasets
from driveprune.files import read_state
from driveprune.runs import stopping
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec
from driveprune.runs.store import lock_of, open_run, read_run, read_runs
from driveprune.train import Stopped
from tests.patience import PATIENCE
from tests.runs.kills import assert_same, newest, small_spec

if sys.platform == "win32":
    pytest.skip("signals as Unix has them", allow_module_level=True)

LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored in the background
START = f"{LISTENING}; from driveprune.cli import main; main()"
LONG = "--data digits --epochs 200 --width 0.25 --images 400 --threads 1 --every 1e9"


def begin(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", START, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(happened, process, seconds=240):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def is_training(root: Path) -> bool:
    """Whether a run of a store has begun with its steps."""
    runs = read_runs([root]) if root.is_dir() else []
    return any("training" in str((run.status or {}).get("work")) for run in runs)


@pytest.mark.parametrize(
    ("method", "place", "at", "steps"),
    [
        ("drive", "early training", 5, 5),
        ("drive", "pruning, cut 3 of 6", 1, 10),
        ("drive", "training", 4, 14),
        ("drive", "inside evaluation", 2, 14),
        ("imp", "pruning", 2, None),
        ("snip", "starting", 1, 0),
    ],
)
def test_a_run_that_is_asked_to_stop_keeps_all_that_it_has_done(server, whole, tmp_path, method, place, at, steps):
    spec = small_spec(method)
    stopped = server.run(tmp_path, spec, place=place, at=at, every=1e9, number=signal.SIGTERM)
    assert stopped["code"] == 128 + signal.SIGTERM
    folder = tmp_path / spec.id
    assert read_run(folder).standing == "unfinished"
    if steps == 0:
        assert not list(folder.glob("checkpoint-*"))
    else:
        state = read_state(newest(folder))
        assert steps is None or state["steps_done"] == steps
        assert len(list(folder.glob("checkpoint-*"))) == 1
    assert server.run(tmp_path, spec)["code"] == 0
    assert_same(folder, whole(spec))


def test_the_command_writes_a_checkpoint_and_ends_with_the_code_of_the_signal(tmp_path):
    process = begin("run", *LONG.split(), "--method", "magnitude", "--runs", str(tmp_path / "stopped"))
    wait_for(lambda: is_training(tmp_path / "stopped"), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "stopping after a checkpoint" in errors
    assert "the same command goes on from the last checkpoint" in errors
    (run,) = read_runs([tmp_path / "stopped"])
    assert run.standing == "unfinished"
    assert read_state(newest(run.path))["steps_done"] > 0
    spec = Spec.from_json(run.spec)
    for root in ("stopped", "whole"):
        carry_out(tmp_path / root, spec, datasets.load("digits"), every=1e9)
    assert_same(run.path, tmp_path / "whole" / spec.id)


def test_a_sweep_has_its_processes_write_checkpoints_first(tmp_path):
    words = ["sweep", "--methods", "dense,gmp", "--jobs", "2", "--json", "--no-share", *LONG.split()]
    process = begin(*words, "--sparsities", "0.9", "--runs", str(tmp_path))
    wait_for(lambda: is_training(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert json.loads(output)["interrupted"] is True
    trained = [run for run in read_runs([tmp_path]) if run.status and run.status.get("began_step") is not None]
    assert trained
    for run in trained:
        assert run.standing == "unfinished"
        assert read_state(newest(run.path))["steps_done"] > 0


def test_ranks_stop_together(tmp_path):
    """torchrun passes the signal on; all ranks end at the same step, and the first one keeps it."""
    words = (
        "run --model tests.nets.without_norm --data digits --epochs 200 --images 385 --method magnitude --every 1e9"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "driveprune",
         *words.split(), "--runs", str(tmp_path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for(lambda: is_training(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    (run,) = read_runs([tmp_path])
    assert run.standing == "unfinished", run.error
    assert read_state(newest(run.path))["steps_done"] > 0, errors


WAITING = """
import runpy, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
asked = runpy.run_path(sys.argv[1])["asked"]
with asked("heard\\n") as stop:
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
"""


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT"), ("SIGHUP", "SIGTERM")])
def test_a_second_signal_ends_at_once(first, second):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, stopping.__file__], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, first))
    assert process.stderr.readline() == "heard\n"
    process.send_signal(getattr(signal, first))  # the same one, passed on by somebody else
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=stopping.AGAIN + 0.2)
    process.send_signal(getattr(signal, second))
    assert process.wait(timeout=60) == 128 + getattr(signal, second)
    assert process.communicate() == ("", "")


def test_what_ignores_a_signal_goes_on_to(monkeypatch):
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does it
    try:
        with stopping.asked() as stop:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert not stop()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
            assert stop.code == 143
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_that_waits_for_another_process_can_be_stopped(tmp_path):
    spec = small_spec("drive")
    with lock_of(open_run(tmp_path, spec)), pytest.raises(Stopped):
        carry_out(tmp_path, spec, datasets.load("digits"), wait=True, stop=lambda: True)
