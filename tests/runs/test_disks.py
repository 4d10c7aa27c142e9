"""Full disks, read-only ones, a clock that is set back, no memory, two sweeps at once: each for real."""

import io
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from driveprune import datasets, recipes
from driveprune.cli import app
from driveprune.files import read_state
from driveprune.progress import shown
from driveprune.runs import job
from driveprune.runs.job import carry_out
from driveprune.runs.spec import make_spec
from driveprune.runs.store import UnwrittenWarning, open_run, read_run, write_error, write_status
from driveprune.runs.sweep import sweep
from driveprune.train import Moment
from tests.disks import fill, read_only, small_disk
from tests.runs.kills import Server, assert_same, newest, small_spec

if sys.platform != "linux":
    pytest.skip("disks, memory and clocks are limited as Linux does it", allow_module_level=True)

FULL = "No space left on device"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_at_a_checkpoint(server, whole, tmp_path, kind):
    """One error that names the file, in the folder, too; the old checkpoints are whole, and it goes on from there."""
    spec = small_spec("gmp")
    reference = whole(spec)
    with small_disk(tmp_path / "disk", 4096, kind) as disk:
        failed = server.run(disk, spec, place="saving", at=5, act="fill")
        folder = disk / spec.id
        name = "checkpoint-5.safetensors"
        assert failed["error"].startswith("OSError: ")
        assert failed["error"].endswith(f"{FULL}: '{folder / name}'")
        run = read_run(folder)
        assert run.standing == "failed"
        assert run.error.endswith(f"{FULL}: '{folder / name}'")
        assert newest(folder).name == "checkpoint-4.safetensors"
        assert read_state(newest(folder))["steps_done"] == 4
        again = server.run(disk, spec)  # still full: the same error, and nothing is lost
        assert again["error"].endswith(f"{FULL}: '{folder / name}'")
        (disk / "filler").unlink()
        assert server.run(disk, spec)["code"] == 0
        assert_same(folder, reference)
        assert {path.name for path in folder.iterdir()} <= {
            "spec.json", "result.json", "net.safetensors", "status.json", ".lock"
        }  # fmt: skip


def test_a_full_disk_does_not_stop_a_training_that_has_nothing_to_keep(server, tmp_path):
    """Status and log are only for looking at; what fails is the network, after all steps."""
    spec = small_spec("snip")
    with small_disk(tmp_path / "disk", 4096) as disk:
        failed = server.run(disk, spec, place="training", at=2, act="fill", every=1e9, pause=0.15)
        assert failed["error"].endswith(f"{FULL}: '{disk / spec.id / 'net.safetensors'}'")
        assert read_run(disk / spec.id).standing == "failed"
        (disk / "filler").unlink()
        assert server.run(disk, spec)["code"] == 0


def test_a_full_disk_from_the_start(server, tmp_path):
    spec = small_spec("snip")
    with small_disk(tmp_path / "disk", 1024) as disk:
        fill(disk)
        failed = server.run(disk, spec)
        assert f"{FULL}: '{disk / spec.id}" in failed["error"]
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["filler"]


def test_what_is_only_for_looking_at_is_told_of_once_and_is_no_error(tmp_path):
    folder = tmp_path / "nothing"
    with pytest.warns(UnwrittenWarning, match=r"status.json.*: how far the run is cannot be seen"):
        write_status(folder, {"step": 1})
    with warnings.catch_warnings(record=True) as told:
        write_status(folder, {"step": 2})
    assert told == []
    with pytest.warns(UnwrittenWarning, match="why the run failed is not in its folder"):
        write_error(folder, "Traceback\n")


def test_a_read_only_store_shows_what_is_done(server, tmp_path):
    store, done, begun = tmp_path / "runs", small_spec("snip"), small_spec("drive")
    assert server.run(store, done)["code"] == 0
    server.run(store, begun, place="training", at=3)
    spec = str(store / done.id / "spec.json")
    data = datasets.load("digits")

    def files():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in store.rglob("*")}

    before = files()
    with read_only(store):
        assert carry_out(store, done, data)["id"] == done.id
        quiet = {"every": 1e9, "console": Console(file=io.StringIO())}
        assert sweep(store, [done], data, **quiet).skipped == [done.id]
        for words in (
            ["run", "--spec", spec, "--runs", str(store), "--json"], ["show", str(store / done.id)],
            ["compare", str(store / done.id), str(store / done.id)], ["report", str(store)],
            ["report", str(store), "-o", str(tmp_path / "report.html")],
        ):  # fmt: skip
            said = CliRunner().invoke(app, words)
            assert said.exit_code == 0, (words, said.output)
        with pytest.raises(OSError, match=f"Read-only file system|Permission denied.*{begun.id}"):
            carry_out(store, begun, data)
    assert files() == before
    assert server.run(store, begun)["code"] == 0


def test_two_sweeps_on_one_folder(whole, tmp_path):
    """Each run is done once, by the one or by the other; both say so."""
    specs = [small_spec("snip"), small_spec("drive")]
    outcomes = []

    def do():
        quiet = Console(file=io.StringIO())
        outcomes.append(sweep(tmp_path, specs, datasets.load("digits"), console=quiet, every=1e9))

    threads = [threading.Thread(target=do) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        assert outcome.failed == {}
        assert sorted([*outcome.done, *outcome.skipped]) == sorted(spec.id for spec in specs)
    for spec in specs:
        assert_same(tmp_path / spec.id, whole(spec))
        assert (tmp_path / spec.id / "log.txt").read_text() == ""  # no warning, no traceback
    assert len(list((tmp_path / "sweeps").iterdir())) == 1


@pytest.mark.parametrize(("place", "at"), [("starting", 1), ("saving", 2)])
def test_no_memory(server, whole, tmp_path, place, at):
    """One clear error, not an abort; a step needs memory, and so does a checkpoint."""
    wide = recipes.scaled(recipes.get("demo-digits"), epochs=1, width=2.0, images=200, test_images=100)
    spec = make_spec(wide, datasets.load("digits"), method="snip", sparsity=0.9)
    failed = server.run(tmp_path, spec, place=place, at=at, act="memory")
    assert failed["code"] == 1
    folder = tmp_path / spec.id
    # Who finds out first, Python, torch or oneDNN, and where, depends on what freed memory can still be used.
    assert re.search("can't allocate memory|there is no memory|there may be no memory", failed["error"])
    assert place == "starting" or newest(folder) is not None
    run = read_run(folder)
    assert run.standing == "failed"
    assert "memory" in run.error
    assert server.run(tmp_path, spec)["code"] == 0
    assert_same(folder, whole(spec))


def clock_library(folder: Path) -> str:
    """The library that sets the clock of a process: libfaketime, or the part of it that is needed here."""
    found = [str(path) for path in Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")]
    if found:
        return found[0]
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is neither faketime nor a C compiler")
    source, library = Path(__file__).with_name("clock.c"), folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


def test_a_clock_that_is_set_back(whole, tmp_path):
    """By two hours, at the third step after the cut: the status goes on, and so do the checkpoints."""
    clock, before = tmp_path / "clock", time.time()
    clock.write_text("+0")
    server = Server(
        LD_PRELOAD=clock_library(tmp_path), FAKETIME_TIMESTAMP_FILE=str(clock), FAKETIME_NO_CACHE="1",
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    )  # fmt: skip
    spec, folder = small_spec("snip"), tmp_path / "runs" / small_spec("snip").id
    try:
        killed = server.run(tmp_path / "runs", spec, place="training", at=3, act="clock", every=0.3, pause=0.2)
        assert clock.read_text() == "-2h"
        assert killed["code"] == 0
        status = read_run(folder).status
        assert status["step"] > 10
        assert 0 < status["time"] - status["began"] < time.time() - before
        assert status["time"] < before - 3600  # the clock was set back
    finally:
        server.close()
    assert_same(folder, whole(spec))


def test_a_patched_clock(tmp_path, monkeypatch):
    """Set back by an hour, then forward by two."""
    now = {"clock": 1e9, "monotonic": 50.0}
    monkeypatch.setattr(job.time, "time", lambda: now["clock"])
    monkeypatch.setattr(job.time, "monotonic", lambda: now["monotonic"])
    folder = open_run(tmp_path, small_spec())
    status = job._Status(folder, lambda _: None, lambda: False)
    for step, jump in enumerate((0, 0, -3600, 7200)):
        now["monotonic"] += 2
        now["clock"] += 2 + jump
        status(Moment(step, 10, "training", []))
        found = json.loads((folder / "status.json").read_text())
        assert found["step"] == step
        assert found["time"] == now["clock"]
        assert found["time"] - found["began"] == 2 * step


def test_a_log_on_a_full_disk_does_not_stop_what_prints(tmp_path):
    """As a process of a sweep, whose stdout and stderr are a log."""
    script = "from driveprune.runs.worker import _lenient; import sys, os, warnings\n" \
        "sys.stdout, sys.stderr = _lenient(1), _lenient(2)\n" \
        "for _ in range(3):\n    print('x' * 20000); warnings.warn('y')\n" \
        "sys.stdout.flush(); os._exit(7)"  # fmt: skip
    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk)
        with (disk / "log").open("wb") as log:
            done = subprocess.run([sys.executable, "-c", script], stdout=log, stderr=log, check=False)
    assert done.returncode == 7


class Gone(io.StringIO):
    """A stream whose reader has ended."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_a_terminal_that_is_gone_does_not_stop_a_run(tmp_path, monkeypatch):
    with (tmp_path / "stdout").open("w") as stdout, shown("x", console=Console(file=Gone())) as watch:
        monkeypatch.setattr("sys.stdout", stdout)  # rich closes what it stands for, and would end the process
        watch(Moment(1, 2, "pruning", []))
        monkeypatch.undo()
