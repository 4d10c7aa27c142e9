import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from driveprune.report import tables
from driveprune.report.claims import claims
from driveprune.report.groups import groups
from driveprune.runs.store import Run
from tests.report.stores import PAPER, run, unfinished

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


def texts(table) -> dict[str, list[str]]:
    return {row[0].text: [entry.text for entry in row[1:]] for row in table.rows}


def lines(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_means_and_deviations_over_seeds_by_method_and_sparsity():
    (group,) = groups(RUNS)
    table = tables.accuracy(group)
    assert table.header == ("method", "90%", "98%")
    found = texts(table)
    assert found["dense"] == ["95.00", "95.00"]
    assert found["snip"] == ["91.00 ± 1.41", "10.00"]
    assert found["drive +shuffle"] == ["-", "70.00"]
    assert texts(tables.accuracy(group, "best"))["snip"][0] == "92.50 ± 0.71"


def test_the_best_early_method_is_strong_and_a_collapsed_one_marked():
    (group,) = groups(RUNS)
    rows = {row[0].text: row[1:] for row in tables.accuracy(group).rows}
    assert [entry.strong for entry in rows["drive"]] == [True, True]
    assert [entry.strong for entry in rows["imp"]] == [False, False]
    assert [entry.collapsed for entry in rows["snip"]] == [False, True]
    assert "10.00*" in printed(tables.to_rich(tables.accuracy(group)))
    latex = tables.to_latex(tables.accuracy(group), group.title)
    assert r"\textbf{91.50}" in latex
    assert r"\underline{10.00}" in latex
    assert r"91.00 $\pm$ 1.41" in latex
    assert any("underlined" in line for line in tables.notes(group))


def test_times_and_the_speed_up_over_imp():
    (group,) = groups(RUNS)
    found = texts(tables.times(group))
    assert found["imp"] == ["100.00", "102.0", "", ""]
    assert found["drive"] == ["10.00", "12.0", "10.0× faster", "8.5× faster"]
    assert found["dense"] == ["", "2.0", "", ""]
    assert "drive obtains its sparse networks 10.0× faster than imp" in tables.notes(group)


def test_the_papers_number_stands_beside_ours_with_the_difference():
    (group,) = groups([run("drive", 0.98, 0.92, recipe=PAPER), run("imp", 0.98, 0.5, recipe=PAPER)])
    entry = {row[0].text: row[1] for row in tables.accuracy(group).rows}["drive"]
    assert entry.paper == 91.36
    assert entry.difference == pytest.approx(0.64)
    assert "92.00 (paper 91.36, +0.64)" in printed(tables.to_rich(tables.accuracy(group)))
    seconds = {row[0].text: row[1:] for row in tables.times(group).rows}["drive"]
    assert seconds[0].paper == 260
    assert seconds[0].difference == -259
    assert seconds[2].paper == pytest.approx(12000 / 260)
    (alone,) = groups([run("drive", 0.98, 0.92, recipe=PAPER)])
    assert [entry.paper for entry in tables.times(alone).rows[0]] == [None, 260, None, None, None]
    assert lines(tables.cells_csv(group))[2][-1] == "91.36"


def test_what_is_not_done_stands_in_its_cell_and_is_listed():
    failed = unfinished("force", 0.9, "failed", error="Traceback\nValueError: no luck")
    missing = unfinished("drive", 0.9, "missing", seed=5)
    found = groups([*RUNS, failed, missing, Run(Path("x"), "damaged", {}, error="damaged")])
    said = [line for group in found for line in tables.unfinished(group)]
    assert f"failed: {failed.path.name}: ValueError: no luck" in said
    assert f"missing: {missing.path.name}" in said
    assert "damaged: x: damaged" in said
    table = texts(tables.accuracy(next(group for group in found if group.cells)))
    assert table["force"] == ["failed", "-"]
    assert table["drive"][0] == "91.50 (1 of 2)"


def test_different_knobs_are_no_seeds_of_each_other():
    (group,) = groups([run("drive", 0.9, 0.5), run("drive", 0.9, 0.7, knobs={"cuts": 3})])
    assert texts(tables.accuracy(group)) == {"drive cuts=100": ["50.00"], "drive cuts=3": ["70.00"]}


def test_dense_alone_has_a_column():
    (group,) = groups([run("dense", 0.0, 0.95)])
    assert texts(tables.accuracy(group)) == {"dense": ["95.00"]}


def test_odd_names_do_no_harm():
    odd = run("snip", 0.9, 0.5)
    odd.spec["method"] = "[/b]"
    (group,) = groups([odd])
    assert "[/b]" in printed(tables.to_rich(tables.accuracy(group)), tables.to_rich(tables.times(group)))
    assert tables.latex_escape(r"\input{x}_%") == r"\textbackslash{}input\{x\}\_\%"


def test_notes_say_how_many_seeds_and_how_long_imp_trained():
    (group,) = groups(RUNS)
    assert tables.notes(group)[0] == "1 to 2 seeds a cell"
    assert any(line.startswith("imp trains ") and "1000 in the paper" in line for line in tables.notes(group))


def test_csv_has_all_runs_and_all_cells():
    failed = unfinished("force", 0.9, "failed", error="a, b\nc")
    found = groups([*RUNS, failed])
    rows = lines(tables.runs_csv(found))
    assert len(rows) == 1 + len(RUNS) + 1
    assert {len(row) for row in rows} == {len(rows[0])}
    assert [row[2] for row in rows].count("failed") == 1
    cells = lines(tables.cells_csv(found[0]))
    snip = next(dict(zip(cells[0], row, strict=True)) for row in cells if row[:2] == ["snip", "0.9"])
    assert float(snip["last_mean"]) == pytest.approx(0.91)
    assert snip["seeds"] == "2"
    assert lines(tables.table_csv(tables.accuracy(found[0])))[0] == ["method", "90%", "98%"]


def test_claims_are_a_table_too():
    table = tables.claims(claims(groups(RUNS)))
    assert {row[1].text for row in table.rows} == {"held", "did not hold", "not tested"}


@pytest.mark.parametrize(("mean", "deviation", "text"), [(0.5, None, "50.00"), (0.91, 0.0141, "91.00 ± 1.41")])
def test_spread(mean, deviation, text):
    assert tables.spread(mean, deviation) == text


def test_variants_are_compared_with_the_imp_that_stands_for_it_and_only_one_has_the_papers_number():
    paper_like = [run("drive", 0.98, 0.9, recipe=PAPER), run("drive", 0.98, 0.8, recipe=PAPER, knobs={"cuts": 1})]
    imps = [
        run("imp", 0.98, 0.9, recipe=PAPER, pruning=50.0),
        run("imp", 0.98, 0.9, recipe=PAPER, knobs={"cycles": 3}),
    ]
    (group,) = groups([*paper_like, *imps])
    entries = {row[0].text: row[1] for row in tables.accuracy(group).rows}
    assert entries["drive cuts=100"].paper == 91.36
    assert entries["drive cuts=1"].paper is None
    assert texts(tables.times(group))["drive cuts=1"][2] == "50.0× faster"
    slow = groups([run("imp", 0.9, 0.9, pruning=1.0), run("drive", 0.9, 0.9, pruning=4.0)])[0]
    assert texts(tables.times(slow))["drive"][2] == "4.0× slower"


def test_nothing_that_a_terminal_obeys_is_printed():
    failed = unfinished("force", 0.9, "failed", error="\x1b]0;title\x07\x1b[2J no")
    (group,) = groups([failed])
    assert not any("\x1b" in line for line in tables.unfinished(group))


def test_the_processor_that_a_foreign_result_names_is_shown_as_text():
    odd = run("snip", 0.9, 0.5)
    odd.result["environment"]["machine"] |= {"model": "\x1b[2J<b>", "instructions": 5}
    (group,) = groups([odd, run("snip", 0.9, 0.6, seed=1)])
    (line,) = [line for line in tables.notes(group) if line.startswith("computed on ")]
    assert "\x1b" not in line
    assert "<b>, 5 (1 run)" in line
    assert any("other last bits" in line for line in tables.notes(group))
    assert "<b>, 5" in tables.runs_csv([group])
