import io

import pytest
from rich.console import Console

from driveprune.report import live
from driveprune.runs.store import write_wanted
from tests.report.stores import run, spec_of, unfinished, write

STATUS = {"step": 30, "steps": 100, "work": "training", "values": [0.1, 0.5, 0.8], "time": 1000.0, "began": 990.0,
          "began_step": 10}  # fmt: skip


def printed(thing) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(thing)
    return console.file.getvalue()


def test_the_screen_shows_the_table_the_curves_and_the_time_left():
    runs = [
        run("snip", 0.9, 0.9),
        unfinished("drive", 0.9, "running", status=STATUS),
        unfinished("imp", 0.9, "missing"),
        unfinished("synflow", 0.9, "failed", error="Traceback\nValueError: no luck"),
    ]
    steps = {run.path.name: 100 for run in runs}
    text = printed(live.screen(runs, steps, now=1000.0))
    assert "90.00" in text
    assert "running" in text
    assert "▁▅█" in text
    assert "80.0%" in text
    assert "digits digits_net drive 90% seed 0" in text
    assert "35 s" in text  # 70 steps at 2 a second
    assert "ValueError: no luck" in text
    assert "4 runs: 1 done, 1 running, 1 failed, 1 missing; about 1 min 25 s left" in text  # 170 steps


def test_a_run_that_gives_no_sign_is_said_to():
    text = printed(live.screen([unfinished("drive", 0.9, "running", status=STATUS)], {}, now=1100.0))
    assert "no sign for 1 min 40 s" in text


def test_odd_values_of_a_curve_are_left_out():
    odd = unfinished("drive", 0.9, "running", status={**STATUS, "values": [float("nan"), 0.5, float("inf")]})
    assert live.Status.of(odd).values == (0.5,)


@pytest.mark.parametrize(
    "status",
    [{**STATUS, "step": float("inf")}, None, {}, {"step": "x"}, {**STATUS, "values": [None]}, {"steps": [1]}],
)
def test_a_status_that_makes_no_sense_does_no_harm(status):
    one = unfinished("drive", 0.9, "running", status=status)
    assert live.Status.of(one).left is None
    assert "starting" in printed(live.screen([one], {}, now=0.0))


def test_nothing_is_left_when_nobody_works():
    assert live.time_left([unfinished("drive", 0.9, "unfinished", status=STATUS)], {}) is None
    assert live.time_left([run("snip", 0.9, 0.9)], {}) is None


def test_watching_ends_when_all_is_done_and_reads_what_is_done_once(tmp_path, monkeypatch):
    done, later = run("snip", 0.9, 0.9), run("drive", 0.9, 0.8)
    write(tmp_path, [done])
    write_wanted(tmp_path, [spec_of("snip"), spec_of("drive")], {done.path.name: 10, later.path.name: 10})
    looks = []
    console = Console(file=io.StringIO(), width=120, force_terminal=True)

    def wait(_seconds):
        looks.append(len(looks))
        if len(looks) == 2:
            write(tmp_path, [later])

    read = []
    original = live.read_runs
    monkeypatch.setattr(live, "read_runs", lambda paths, known: read.append(len(known)) or original(paths, known))
    live.watch([tmp_path], console, wait=wait)
    assert len(looks) == 2
    assert read == [0, 1, 1]
    assert "missing" in console.file.getvalue()
    assert "2 runs: 2 done" in console.file.getvalue()


def test_in_a_pipe_it_is_shown_once(tmp_path):
    write_wanted(tmp_path, [spec_of("snip")], {spec_of("snip").id: 10})
    console = Console(file=io.StringIO(), width=120)
    live.watch([tmp_path], console)
    assert "1 run: 1 missing" in console.file.getvalue()
