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
    specs = [spec_of("drive"), spec_of("drive", knobs={"cuts": 3}, check="reinit"), spec_of("snip")]
    assert labels([one.to_json() for one in specs]) == ["drive cuts=100", "drive cuts=3 +reinit", "snip"]
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


def test_groups_have_folders_of_their_own():
    runs = []
    for model in ("m.Net", "m.net", "数据", "資料", "x" * 200, "x" * 201):
        one = run("drive", 0.9, 0.5)
        one.spec["recipe"]["model"] = model
        runs.append(one)
    for threads in (1, 2):
        one = run("drive", 0.9, 0.5)
        one.spec["threads"] = threads
        one.spec["recipe"]["data"] = "d" * 120
        runs.append(one)
    found = groups([Run(Path(str(place)), one.standing, one.spec, one.result) for place, one in enumerate(runs)])
    assert len({group.name for group in found}) == len(runs)


def test_the_same_run_in_two_stores_is_one_seed():
    one = run("drive", 0.9, 0.5)
    (group,) = groups([one, Run(Path("elsewhere") / one.path, one.standing, one.spec, one.result)])
    assert len(group.runs) == 2
    assert group.repeats == 1
    assert len(group.cells["drive", 0.9].runs) == 1


def test_the_variant_that_stands_for_a_method():
    own = {"cuts": 1}
    (group,) = groups(
        [run("drive", 0.9, 0.5, knobs=own), run("drive", 0.9, 0.5), run("drive", 0.9, 0.6, check="reinit")]
    )
    assert group.reference("drive") == "drive cuts=100"
    (group,) = groups([run("drive", 0.9, 0.5, knobs=own)])
    assert group.reference("drive") == "drive"
    assert group.reference("imp") is None


def test_a_knob_that_only_some_runs_have_tells_them_apart():
    old, new = run("drive", 0.9, 0.5), run("drive", 0.9, 0.7, seed=1)
    new.spec["knobs"] = {**new.spec["knobs"], "fresher": 7}
    assert labels([old.spec, new.spec]) == ["drive", "drive fresher=7"]


def test_a_collapsed_network_is_not_the_best():
    (group,) = groups([run("snip", 0.9, 0.9, collapsed=True), run("drive", 0.9, 0.5)])
    assert group.best_early(0.9) == ["drive"]
