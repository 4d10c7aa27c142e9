"""When a run is called unstable, when weak, and when nothing is said."""

import csv
import dataclasses
import io

import pytest

from driveprune.report import tables
from driveprune.report.claims import claims
from driveprune.report.groups import finding_of, groups
from driveprune.report.stability import judged
from tests.report.stores import result, run, write

DIGITS_DRIVE = (0.956, 0.989, 0.869, 0.975, 0.903, 0.544, 0.992, 0.558, 0.986, 0.986)
"""The accuracies of the demo with DRIVE at 98%, seeds 0 to 9: three of them fall."""
DIGITS_RANDOM = (0.422, 0.347, 0.528, 0.403, 0.628, 0.633, 0.583, 0.611, 0.597, 0.686)
"""The same with random masks: all of them are bad."""


def words(accuracies, dense=None, losses=(2.3, 1.0, 0.1)):
    runs = [learning(accuracy, losses, seed=seed) for seed, accuracy in enumerate(accuracies)]
    return [judged(one, [other for other in runs if other is not one], dense).word for one in runs]


def learning(accuracy, losses, *, before=None, seed=0):
    """A run with these training losses; with a test before the cut, if there is one."""
    one = run("drive", 0.9, accuracy, seed=seed)
    rows = [
        {"cycle": 0, "epoch": epoch, "rate": 0.1, "loss": loss, "sparsity": 0.9, "test": accuracy}
        for epoch, loss in enumerate(losses, 1)
    ]
    if before is not None:
        rows[0] |= {"sparsity": 0.0, "test": before}
    return dataclasses.replace(one, result={**one.result, "rows": rows})


def test_seeds_that_fall_while_others_do_not_are_unstable():
    found = words(DIGITS_DRIVE, dense=0.993)
    assert [seed for seed, word in enumerate(found) if word == "unstable"] == [2, 5, 7]
    assert set(found) == {"sound", "unstable"}
    found = words(DIGITS_DRIVE)  # without a dense run what is near the others may pass
    assert [seed for seed, word in enumerate(found) if word == "unstable"] == [5, 7]


def test_where_all_seeds_are_low_they_are_weak_and_not_unstable():
    assert set(words(DIGITS_RANDOM, dense=0.993)) == {"weak"}
    assert set(words(DIGITS_RANDOM, losses=(2.3, 1.6, 1.2))) == {"sound"}  # nothing tells how good it could be
    assert words([0.41, 0.38, 0.44], dense=0.95) == ["weak"] * 3
    assert words([0.41, 0.38, 0.44]) == ["sound"] * 3


def test_an_outlier_among_weak_runs_is_unstable_too():
    assert words([0.60, 0.61, 0.62, 0.10], dense=0.95) == ["weak", "weak", "weak", "unstable"]


def test_the_common_spread_of_seeds_is_no_instability():
    assert set(words([0.95, 0.93, 0.97, 0.94, 0.96], dense=0.97)) == {"sound"}
    assert set(words([0.40, 0.43, 0.38, 0.45, 0.37], dense=0.45)) == {"sound"}


def test_two_seeds_are_enough():
    assert words([0.55, 0.97], dense=0.99) == ["unstable", "sound"]
    assert words([0.55, 0.97]) == ["unstable", "sound"]
    assert words([0.95, 0.97]) == ["sound", "sound"]


def test_a_single_run_is_judged_by_the_dense_one():
    found = judged(learning(0.558, (1.06, 2.0, 0.5)), dense=0.99)
    assert found.word == "unstable"
    assert found.why.startswith("43.2 points below the dense network (99.0%)")
    assert judged(learning(0.85, (2.3, 1.0, 0.5)), dense=0.95).word == "sound"
    assert judged(learning(0.60, (4.0, 2.0, 1.5)), dense=0.70).word == "sound"


def test_a_single_run_without_a_dense_one_is_judged_by_itself():
    assert judged(learning(0.558, (1.06, 2.25, 1.5, 1.03))).word == "unstable"  # seed 7 of the demo
    assert judged(learning(0.869, (1.07, 1.84, 0.7, 0.23))).word == "sound"
    assert judged(learning(0.10, (2.3, 2.3, 2.3))).word == "unstable"  # it learnt nothing
    assert judged(learning(0.50, (2.3, 1.0, 0.5), before=0.90)).word == "unstable"
    assert judged(learning(0.88, (2.3, 1.0, 0.5), before=0.90)).word == "sound"


def test_a_cut_network_is_collapsed_and_what_was_not_tested_is_not_judged():
    assert judged(run("snip", 0.9, 0.1, collapsed=True), [run("snip", 0.9, 0.9)]).word == "collapsed"
    one = run("snip", 0.9, 0.1)
    assert judged(dataclasses.replace(one, result={**one.result, "last": None})).word == "sound"


RUNS = [
    run("dense", 0.0, 0.99),
    *(run("drive", 0.9, accuracy, seed=seed) for seed, accuracy in enumerate((0.97, 0.55, 0.98))),
    *(run("random", 0.9, accuracy, seed=seed) for seed, accuracy in enumerate((0.42, 0.45, 0.40))),
]


def test_tables_mark_them_and_explain_the_mark():
    (group,) = groups(RUNS)
    table = tables.accuracy(group)
    assert {row[0].text: row[1].unstable for row in table.rows} == {"dense": False, "random": False, "drive": True}
    notes = tables.notes(group)
    (line,) = [line for line in notes if line.startswith("†")]
    assert line.startswith("† unstable, far below the other seeds")
    assert line.endswith(": drive at 90% seed 1")
    assert "weak, far below the dense network with every seed: random at 90%" in notes
    assert "†" in tables.table_csv(table)
    assert r"$^\dagger$" in tables.to_latex(table, "x")
    assert "unstable" in tables.to_latex(table, "x")
    rows = list(csv.reader(io.StringIO(tables.runs_csv([group]))))
    place = rows[0].index("stability")
    assert [row[place] for row in rows[1:]] == ["sound", "sound", "unstable", "sound", "weak", "weak", "weak"]
    found = tables.plain_all(RUNS)
    assert [each["stability"]["word"] for each in found] == [row[place] for row in rows[1:]]


def test_a_claim_that_networks_do_not_collapse_is_about_more_than_paths():
    claim = next(each for each in claims(groups(RUNS)) if "do not collapse" in each.text)
    assert claim.verdict == "did not hold"
    assert claim.checks[0].numbers == "unstable: 1 of 3 runs end far below their like"
    sound = [one for one in RUNS if one.result["last"] != 0.55]
    claim = next(each for each in claims(groups(sound)) if "do not collapse" in each.text)
    assert claim.verdict == "held"


def test_a_run_is_seen_beside_its_like_in_its_store(tmp_path):
    write(tmp_path, [*RUNS, run("snip", 0.9, 0.1)])
    assert finding_of(tmp_path / RUNS[2].path.name).word == "unstable"
    assert finding_of(tmp_path / RUNS[1].path.name).word == "sound"
    assert finding_of(tmp_path / RUNS[4].path.name).word == "weak"
    (tmp_path / RUNS[1].path.name / "result.json").unlink()
    assert finding_of(tmp_path / RUNS[1].path.name) is None


@pytest.mark.parametrize("rows", [[], [{"cycle": 0, "epoch": 1, "sparsity": 0.9}], None])
def test_odd_results_are_judged_without_an_error(rows):
    one = run("snip", 0.9, 0.1)
    assert judged(dataclasses.replace(one, result={**result(0.1), "rows": rows})).word == "sound"
