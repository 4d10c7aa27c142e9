import io
from pathlib import Path

import pytest
from rich.console import Console

from driveprune import datasets
from driveprune.report import tables
from driveprune.runs.spec import Spec, make_spec
from driveprune.runs.store import Run
from tests.runs.kills import SMALL

DIGITS = datasets.load("digits")


def spec_of(method: str, sparsity: float = 0.9, **options) -> Spec:
    return make_spec(SMALL, DIGITS, method=method, sparsity=sparsity, **options)


def run(method, sparsity, last, *, seed=0, best=None, pruning=1.0, training=2.0, collapsed=False, **options):
    spec = spec_of(method, sparsity, seed=seed, **options)
    result = {
        "last": last, "best": best or last, "collapsed": collapsed,
        "seconds": {"early training": pruning, "training": training, "pruning": pruning},
    }  # fmt: skip
    return Run(Path(spec.id), "done", spec.to_json(), result)


RUNS = [
    run("dense", 0.0, 0.95, pruning=0.0),
    run("imp", 0.9, 0.94, pruning=100.0),
    run("imp", 0.98, 0.90, pruning=100.0),
    run("snip", 0.9, 0.92, seed=0),
    run("snip", 0.9, 0.90, seed=1, best=0.93),
    run("snip", 0.98, 0.10, collapsed=True),
    run("drive", 0.9, 0.915, pruning=10.0),
    run("drive", 0.98, 0.80, pruning=10.0),
    run("drive", 0.98, 0.70, check="shuffle", pruning=10.0),
]


def printed(*things) -> str:
    console = Console(file=io.StringIO(), width=200)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


def rows(table) -> dict[str, list[str]]:
    columns = [list(column.cells) for column in table.columns]
    return {cells[0]: list(cells[1:]) for cells in zip(*columns, strict=True)}


def test_one_group_with_means_and_deviations_over_seeds():
    (group,) = tables.groups(RUNS)
    assert group.methods == ["dense", "imp", "snip", "drive", "drive +shuffle"]
    assert group.sparsities == [0.9, 0.98]
    found = rows(tables.accuracy_table(group))
    assert found["dense"] == ["95.00", "95.00"]
    assert found["snip"] == ["91.00 ± 1.41", "[underline]10.00[/]*"]
    assert found["drive"] == ["[bold]91.50[/]", "[bold]80.00[/]"]
    assert found["drive +shuffle"] == ["-", "70.00"]
    assert rows(tables.accuracy_table(group, "best"))["snip"][0] == "[bold]92.50 ± 0.71[/]"


def test_times_and_the_speed_up_over_imp():
    (group,) = tables.groups(RUNS)
    found = rows(tables.time_table(group))
    assert found["imp"] == ["100.00", "102.0", ""]
    assert found["drive"] == ["10.00", "12.0", "10.0× faster"]
    assert found["dense"] == ["", "2.0", ""]
    assert "drive obtains its sparse networks 10.0× faster than imp" in tables.notes(group)


def test_runs_that_may_not_be_compared_are_apart():
    other = run("drive", 0.9, 0.5)
    other.spec["recipe"]["epochs"] = 99
    titles = [group.title for group in tables.groups([*RUNS, other])]
    assert len(titles) == 2
    assert any("99 epochs" in title for title in titles)


def test_strange_data_are_labelled():
    strange = run("drive", 0.9, 0.5)
    strange.spec["official"] = False
    assert "(not the official data)" in tables.groups([strange])[0].title


def test_what_is_not_done_is_shown():
    spec = spec_of("force")
    failed = Run(Path(spec.id), "failed", spec.to_json(), error="Traceback\nValueError: no luck")
    damaged = Run(Path("x"), "damaged", {}, error="damaged")
    groups = tables.groups([*RUNS, failed, damaged])
    lines = [line for group in groups for line in tables.notes(group)]
    assert f"failed: {spec.id}: ValueError: no luck" in lines
    assert "damaged: x: damaged" in lines
    assert rows(tables.accuracy_table(next(g for g in groups if g.cells)))["force"] == ["-", "-"]


def test_methods_are_named_with_the_knobs_in_which_their_runs_differ():
    specs = [spec_of("drive"), spec_of("drive", knobs={"combine": "squares"}, check="reinit"), spec_of("snip")]
    assert tables.labels([one.to_json() for one in specs]) == [
        "drive combine=mean", "drive combine=squares +reinit", "snip",
    ]  # fmt: skip
    own = [{**spec_of("snip").to_json(), "method": "my.method", "method_code": code} for code in ("a" * 64, "b" * 64)]
    assert tables.labels(own) == ["my.method code=aaaaaaaa", "my.method code=bbbbbbbb"]


def test_different_knobs_are_no_seeds_of_each_other():
    (group,) = tables.groups([run("drive", 0.9, 0.5), run("drive", 0.9, 0.7, knobs={"cuts": 3})])
    assert rows(tables.accuracy_table(group)) == {"drive cuts=100": ["50.00"], "drive cuts=3": ["70.00"]}


def test_a_run_named_twice_counts_once():
    (group,) = tables.groups([*RUNS, *RUNS])
    assert rows(tables.accuracy_table(group))["drive"] == ["[bold]91.50[/]", "[bold]80.00[/]"]
    assert tables.notes(group)[0] == "1 to 2 seeds a cell"


def test_dense_alone_has_a_column():
    (group,) = tables.groups([run("dense", 0.0, 0.95)])
    assert rows(tables.accuracy_table(group)) == {"dense": ["95.00"]}


def test_odd_names_do_no_harm():
    odd = run("snip", 0.9, 0.5)
    odd.spec["method"] = "[/b]"
    (group,) = tables.groups([odd])
    assert "[/b]" in printed(tables.accuracy_table(group), tables.time_table(group))


def test_groups_with_the_same_title_say_in_what_they_differ():
    other = run("drive", 0.9, 0.5)
    other.spec["recipe"]["weight_decay"] = 0.1
    titles = [group.title for group in tables.groups([*RUNS, other])]
    assert [title.partition("; ")[2] for title in titles] == ["weight_decay 0.0005", "weight_decay 0.1"]


def test_notes_say_how_many_seeds():
    (group,) = tables.groups(RUNS)
    assert tables.notes(group)[0] == "1 to 2 seeds a cell"
    assert any("underlined" in line for line in tables.notes(group))
    assert "91.50" in printed(tables.accuracy_table(group))


@pytest.mark.parametrize(("values", "text"), [([0.5], "50.00"), ([0.9, 0.92], "91.00 ± 1.41")])
def test_spread(values, text):
    assert tables.spread(values) == text
