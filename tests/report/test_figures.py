import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from driveprune.report import figures
from driveprune.report.claims import claims
from driveprune.report.groups import groups
from tests.report.stores import run

METHODS = ("imp", "snip", "synflow", "drive")
RUNS = [
    run("dense", 0.0, 0.95),
    *(
        run(method, sparsity, 0.9 - 0.1 * place, seed=seed, pruning=1.0 + place, training=2.0 + seed)
        for place, method in enumerate(METHODS)
        for sparsity in (0.9, 0.98)
        for seed in (0, 1)
    ),
]


@pytest.fixture
def group():
    return groups(RUNS)[0]


def lines(figure) -> dict[str, tuple[list[float], list[float]]]:
    axes = figure.axes[0]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_accuracy_is_drawn_for_every_method_on_the_log_axis(group):
    found = lines(figures.accuracy(group))
    assert set(METHODS) < found.keys()
    assert found["drive"][0] == pytest.approx([1.0, 1.69897], abs=1e-4)  # -log10 of 0.1 and 0.02
    assert found["drive"][1] == pytest.approx([60.0, 60.0])
    assert found["dense"][1] == pytest.approx([95.0, 95.0])


def test_a_band_of_a_deviation_is_drawn_where_there_are_seeds():
    spread = groups([run("drive", 0.9, 0.5, seed=0), run("drive", 0.9, 0.7, seed=1), run("drive", 0.98, 0.5)])[0]
    (band,) = figures.accuracy(spread).axes[0].collections
    low, high = band.get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((60 - 14.142, 60 + 14.142), abs=1e-2)


def test_change_against_imp(group):
    assert figures.changes(group, "drive") == [(0.9, pytest.approx(-30.0)), (0.98, pytest.approx(-30.0))]
    assert figures.relative_to_imp(groups([run("drive", 0.9, 0.5)])[0]) is None


def test_the_pareto_front_of_each_sparsity(group):
    found = lines(figures.accuracy_and_time(group))
    assert found["Pareto front"] == ([1.0], [pytest.approx(90.0)])  # imp is the fastest and best here
    assert found["drive"][0] == [4.0]
    assert figures.pareto([(2, 1), (1, 1), (3, 2), (4, 0)]) == [(1, 1), (3, 2)]


def test_bars_are_as_long_as_the_time_in_all(group):
    axes = figures.total_time(group).axes[0]
    ends = {bar.get_y(): bar.get_x() + bar.get_width() for bar in axes.patches}
    wanted = [group.mean_over_cells(method, "total") for method in group.methods]
    assert [ends[place] for place in sorted(ends)] == pytest.approx(wanted)


def test_layers_curves_and_effective_sparsity(group):
    assert figures.densities_of(group.cells["drive", 0.9]) == [0.4, 0.1, 0.0]
    assert len(figures.layers(group).axes) == len(METHODS)
    assert figures.curve(RUNS[0]) == ([1, 2, 3, 4], pytest.approx([23.75, 47.5, 71.25, 95.0]))
    assert len(figures.learning_curves(group).axes) == 2
    cut = groups([run("snip", 0.9, 0.1, collapsed=True), run("snip", 0.98, 0.1)])[0]
    labels = [label.get_text() for label in figures.effective_sparsity(cut).axes[0].get_yticklabels()]
    assert labels[-1] == "no path"


def test_size_and_speed_only_when_the_runs_have_them(group):
    assert figures.speedup(group) is None
    fast = groups([run("drive", 0.9, 0.5, speedup=3.0), run("drive", 0.98, 0.5, speedup=5.0)])[0]
    assert lines(figures.speedup(fast))["drive"][1] == pytest.approx([3.0, 5.0])
    assert figures.file_size(fast) is None  # no dense network to compare with
    assert lines(figures.file_size(group))["drive"][1] == pytest.approx(
        [100 * 200 / 1100, 100 * 120 / 1100], rel=0.01
    )


def test_all_files_are_written_and_whole(group, tmp_path):
    written = figures.write_all(tmp_path, [group], claims([group]))
    assert {path.suffix for path in written} == {".svg", ".png", ".csv", ".tex"}
    assert all(path.is_relative_to(tmp_path) and path.stat().st_size for path in written)
    for path in written:
        if path.suffix == ".svg":
            ET.parse(path)
        if path.suffix == ".png":
            Image.open(path).verify()
    assert (tmp_path / "claims.csv").exists()


def test_a_group_without_results_has_no_figures():
    empty = groups([run("drive", 0.9, 0.5)])[0]
    hollow = type(empty)(empty.title, (), ())
    assert [draw(hollow) for draw in figures.ALL.values()] == [None] * len(figures.ALL)


def test_the_legend_has_what_any_panel_has():
    found = groups([run("drive", 0.9, 0.9), run("snip", 0.98, 0.8), run("drive", 0.98, 0.85)])[0]
    for draw, wanted in ((figures.accuracy_and_time, {"drive", "snip"}), (figures.learning_curves, {"drive", "snip"}),
                         (figures.layers, {"90%", "98%"})):  # fmt: skip
        names = {text.get_text() for text in draw(found).legends[0].get_texts()}
        assert wanted <= names


def test_formulas_in_names_and_names_that_are_no_letters(tmp_path):
    odd = run("drive", 0.9, 0.9)
    odd.spec["recipe"]["data"] = "/data/$run_{/a$b\udcff"
    odd.spec["method"] = "_mine"
    found = groups([odd, run("snip", 0.9, 0.5)])
    assert figures.write_all(tmp_path, found, claims(found))
    assert any("_mine" in text.get_text() for text in figures.accuracy(found[0]).legends[0].get_texts())
