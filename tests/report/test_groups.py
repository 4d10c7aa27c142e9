from pathlib import Path

from driveprune.report.groups import groups, labels, prunes_early
from driveprune.runs.store import Run
from tests.report.stores import run, spec_of, unfinished

RUNS = [
    run("dense", 0.0, 0.95, pruning=0.0),
    run("snip", 0.9, 0.92, seed=0),
    run("snip", 0.9, 0.90, seed=1, best=0.93),
    run("drive", 0.9, 0.915, pruning=10.0),
    run("drive", 0.98, 0.70, check="shuffle", pruning=10.0),
]


def test_cells_are_methods_at_a_sparsity_over_seeds():
    (group,) = groups(RUNS)
    assert group.methods == ["dense", "snip", "drive", "drive +shuffle"]
    assert group.sparsities == [0.9, 0.98]
    cell = group.cells["snip", 0.9]
    assert sorted(cell.values("last")) == [0.90, 0.92]
    assert abs(cell.mean("best") - 0.925) < 1e-12
    assert abs(cell.deviation("last") - 0.02 / 2**0.5) < 1e-12
    assert group.cells["drive", 0.9].deviation("last") is None
    assert group.cell("dense", 0.98) is group.cells["dense", 0.0]


def test_seconds_in_all_do_not_count_pruning_twice():
    (group,) = groups(RUNS)
    assert group.cells["drive", 0.9].values("pruning") == (10.0,)
    assert group.cells["drive", 0.9].values("total") == (12.0,)
    assert group.cells["drive", 0.9].values("speedup") == ()


def test_the_best_early_methods_share_a_tie_and_checks_do_not_compete():
    tie = [
        run("snip", 0.9, 0.9),
        run("drive", 0.9, 0.9),
        run("imp", 0.9, 0.99),
        run("drive", 0.9, 0.95, check="reinit"),
    ]
    (group,) = groups(tie)
    assert group.best_early(0.9) == ["snip", "drive"]
    assert groups(tie[1:2])[0].best_early(0.9) == []
    assert prunes_early("my.method")
    assert prunes_early("drive cuts=10")
    assert not prunes_early("imp")


def test_runs_that_may_not_be_compared_are_apart():
    other = run("drive", 0.9, 0.5)
    other.spec["recipe"]["epochs"] = 99
    titles = [group.title for group in groups([*RUNS, other])]
    assert len(titles) == 2
    assert any("99 epochs" in title for title in titles)


def test_groups_with_the_same_title_say_in_what_they_differ():
    other = run("drive", 0.9, 0.5)
    other.spec["recipe"]["weight_decay"] = 0.1
    titles = [group.title for group in groups([*RUNS, other])]
    assert [title.partition("; ")[2] for title in titles] == ["weight_decay 0.0005", "weight_decay 0.1"]


def test_strange_data_are_labelled():
    strange = run("drive", 0.9, 0.5)
    strange.spec["official"] = False
    assert "(not the official data)" in groups([strange])[0].title


def test_methods_are_named_with_the_knobs_in_which_their_runs_differ():
    specs = [spec_of("drive"), spec_of("drive", knobs={"combine": "squares"}, check="reinit"), spec_of("snip")]
    assert labels([one.to_json() for one in specs]) == ["drive combine=mean", "drive combine=squares +reinit", "snip"]
    own = [{**spec_of("snip").to_json(), "method": "my.method", "method_code": code} for code in ("a" * 64, "b" * 64)]
    assert labels(own) == ["my.method code=aaaaaaaa", "my.method code=bbbbbbbb"]


def test_a_run_named_twice_counts_once():
    (group,) = groups([*RUNS, *RUNS])
    assert len(group.runs) == len(RUNS)


def test_what_gave_no_result_is_kept():
    damaged = Run(Path("x"), "damaged", {}, error="damaged")
    found = groups([*RUNS, unfinished("drive", 0.98, "missing"), damaged])
    assert [[one.standing for one in group.unfinished] for group in found] == [["damaged"], ["missing"]]
    assert [one.standing for one in found[1].left("drive", 0.98)] == ["missing"]
    assert found[0].methods == []
    assert (found[0].data, found[0].model) == ("?", "?")


def test_the_name_of_a_group_is_one_of_a_file():
    odd = run("drive", 0.9, 0.5)
    odd.spec["recipe"]["model"] = "../../etc/<script>"
    (group,) = groups([odd])
    assert "/" not in group.name
    assert ".." not in group.name[:2]
    assert "<" not in group.name
