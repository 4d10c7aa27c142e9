"""The paper's figures from a group of runs, by matplotlib, for print and slides; the page draws its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from driveprune.files import write_atomically
from driveprune.report import palette, tables
from driveprune.report.claims import Claim
from driveprune.report.groups import WORKS, Cell, Group, Quantity, base, tested_rows
from driveprune.runs.spec import DENSE
from driveprune.runs.store import Run
from driveprune.screen import printable

LEAST = 1e-3
"""Seconds: less stands here on the log axis."""
EMPTY = 1e-5
"""Where an empty layer stands on the log axis."""
NO_PATH = 0.9999
"""Where an effective sparsity of 1 stands on the log axis."""
_WIDE, _HIGH = 6.4, 4.0


def accuracy(group: Group) -> Figure | None:
    """Accuracy against sparsity, on the paper's log axis, with bands of a deviation over seeds."""
    figure, axes = _figure()
    drawn = [_line(axes, group, method, "last", factor=100.0) for method in _pruned(group)]
    if not any(drawn):
        return None
    _ring(axes, group)
    dense = group.cell(DENSE, 0.0)
    if dense is not None and (mean := dense.mean("last")) is not None:
        axes.axhline(100 * mean, color="black", linestyle=":", label="dense")
    _sparsity_axis(axes, group.sparsities)
    axes.set_ylabel("test accuracy in %, last epoch")
    return _finished(figure, [axes], group)


def _ring(axes: Axes, group: Group) -> None:
    """A ring around every mean in which there is an unstable run."""
    for method in _pruned(group):
        cells = [cell for cell in _cells(group, method) if cell.seeds("unstable")]
        axes.plot(
            _places([cell.sparsity for cell in cells]), [100 * _number(cell, "last") for cell in cells],
            linestyle="none", marker="o", markersize=12, fillstyle="none", color=_colour(group, method),
            label="unstable" if cells else "_child",
        )  # fmt: skip


def accuracy_and_time(group: Group) -> Figure | None:
    """Accuracy against the time to obtain the sparse network, by sparsity; the line is the Pareto front."""
    points = {sparsity: _costs(group, sparsity) for sparsity in group.sparsities}
    points = {sparsity: found for sparsity, found in points.items() if found}
    if not points:
        return None
    figure, rooms = _small_multiples(len(points))
    for (sparsity, found), axes in zip(points.items(), rooms, strict=True):
        front = pareto(list(found.values()))
        axes.plot(*zip(*front, strict=True), color="grey", linewidth=1, zorder=0, label="Pareto front")
        for method, (seconds, value) in found.items():
            axes.plot(seconds, value, label=method, **{**_style(group, method), "linewidth": 0})
        axes.set_xscale("log")
        axes.set_title(f"{100 * sparsity:g}%", fontsize=9)
    _plain_numbers(rooms[0].xaxis, subs=(1,))
    figure.supxlabel("seconds to obtain the sparse network", fontsize=9)
    figure.supylabel("test accuracy in %, last epoch", fontsize=9)
    return _finished(figure, rooms, group)


def _costs(group: Group, sparsity: float) -> dict[str, tuple[float, float]]:
    """Method -> seconds to the sparse network, and its accuracy in %."""
    cells = [cell for method in _pruned(group) if (cell := group.cell(method, sparsity)) is not None]
    return {
        cell.method: (max(LEAST, _number(cell, "pruning")), 100 * _number(cell, "last"))
        for cell in cells
        if cell.mean("pruning") is not None and cell.mean("last") is not None
    }


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, value) that no other one beats in both, by rising cost.

    >>> pareto([(1, 5), (2, 4), (3, 9), (3, 8)])
    [(1, 5), (3, 9)]
    """
    front: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((cost, value))
    return front


def relative_to_imp(group: Group) -> Figure | None:
    """How much more accurate than IMP a method is at the same sparsity, in points."""
    figure, axes = _figure()
    drawn = False
    for method in _pruned(group):
        if method != group.reference("imp") and (points := changes(group, method)):
            x, y = zip(*points, strict=True)
            axes.plot(_places(x), y, label=method, **_style(group, method))
            drawn = True
    if not drawn:
        return None
    axes.axhline(0, color="black", linewidth=1, label=group.reference("imp"))
    _sparsity_axis(axes, group.sparsities)
    axes.set_ylabel("change in accuracy against IMP, points")
    return _finished(figure, [axes], group)


def changes(group: Group, method: str) -> list[tuple[float, float]]:
    """(sparsity, points of accuracy more than IMP) where both have a run."""
    found = []
    for sparsity in group.sparsities:
        ours, imp = group.cell(method, sparsity), group.cell(group.reference("imp") or "", sparsity)
        if ours and imp and ours.values("last") and imp.values("last"):
            found.append((sparsity, 100 * (_number(ours, "last") - _number(imp, "last"))))
    return found


def total_time(group: Group) -> Figure | None:
    """Where the time goes, mean over seeds and sparsities, as stacked bars."""
    methods = [method for method in group.methods if group.mean_over_cells(method, "total") is not None]
    if not methods:
        return None
    figure, axes = _figure(high=0.8 + 0.38 * len(methods))
    left, places = np.zeros(len(methods)), range(len(methods))  # two names may begin with the same letters
    for work in WORKS:
        seconds = np.array([mean_seconds(group, method, work) for method in methods])
        if seconds.any():
            axes.barh(places, seconds, left=left, color=palette.WORKS[work], label=work)
        left += seconds
    axes.set_yticks(places, [_plain(method) for method in methods])
    axes.invert_yaxis()
    axes.set_xlabel("seconds, mean over seeds and sparsities")
    return _finished(figure, [axes], group)


def mean_seconds(group: Group, method: str, work: str) -> float:
    """The mean time that the runs of a method spent with a work."""
    runs = [run for cell in group.cells.values() if cell.method == method for run in cell.runs]
    return float(np.mean([(run.result or {})["seconds"].get(work, 0.0) for run in runs]))


def layers(group: Group) -> Figure | None:
    """Density of each layer, small multiples by method."""
    methods = [method for method in _pruned(group) if _cells(group, method)]
    if not methods:
        return None
    figure, rooms = _small_multiples(len(methods))
    for method, axes in zip(methods, rooms, strict=False):
        for cell in _cells(group, method):
            densities = np.maximum(densities_of(cell), EMPTY)
            shade = palette.shade(group.sparsities.index(cell.sparsity), len(group.sparsities))
            label = f"{100 * cell.sparsity:g}%"
            axes.plot(range(1, len(densities) + 1), densities, marker=".", color=shade, label=label)
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis, subs=(1,))
        axes.set_title(_plain(method), fontsize=9)
    figure.supxlabel("layer, from input to output", fontsize=9)
    figure.supylabel(f"density ({EMPTY:.5f}: empty)", fontsize=9)
    return _finished(figure, rooms, group)


def densities_of(cell: Cell) -> list[float]:
    """The density of each layer, mean over seeds."""
    layers = ((run.result or {})["layers"] for run in cell.runs)
    found = [[layer["kept"] / max(1, layer["weights"]) for layer in each] for each in layers]
    return [float(np.mean(column)) for column in zip(*found, strict=False)]


def learning_curves(group: Group) -> Figure | None:
    """Test accuracy by epoch, small multiples by sparsity."""
    sparsities = [s for s in group.sparsities if any(group.cell(m, s) for m in _pruned(group))]
    if not sparsities:
        return None
    figure, rooms = _small_multiples(len(sparsities))
    for sparsity, axes in zip(sparsities, rooms, strict=False):
        for method in group.methods:
            cell = group.cell(method, sparsity)
            for run in cell.runs if cell else ():
                epochs, values = curve(run)
                axes.plot(epochs, values, color=_colour(group, method), linewidth=1, label=method)
        axes.set_title(f"{100 * sparsity:g}%", fontsize=9)
    figure.supxlabel("epoch", fontsize=9)
    figure.supylabel("test accuracy in %", fontsize=9)
    return _finished(figure, rooms, group)


def curve(run: Run) -> tuple[list[float], list[float]]:
    """Epochs and test accuracy in % of the cycle that ends with the network."""
    rows = tested_rows(run)
    return [row["epoch"] for row in rows], [100 * row["test"] for row in rows]


def effective_sparsity(group: Group) -> Figure | None:
    """Effective against nominal sparsity: weights on no path from input to output count as removed."""
    figure, axes = _figure()
    highest = 0.0
    for method in _pruned(group):
        cells = [cell for cell in _cells(group, method) if cell.values("effective")]
        points = [(cell.sparsity, min(_number(cell, "effective"), NO_PATH)) for cell in cells]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(_places(x), _places(y), label=method, **_style(group, method))
            highest = max(highest, *y)
    if not highest:
        return None
    places = _places(group.sparsities)
    axes.plot(places, places, color="grey", linewidth=1, zorder=0, label="as chosen")
    _sparsity_axis(axes, group.sparsities)
    cut = [NO_PATH] if highest == NO_PATH else []
    ticks = [*group.sparsities, *(s for s in (0.995, 0.999) if group.sparsities[-1] < s <= highest), *cut]
    axes.set_yticks(_places(ticks), ["no path" if s == NO_PATH else f"{100 * s:g}" for s in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("effective sparsity in %")
    return _finished(figure, [axes], group)


def file_size(group: Group) -> Figure | None:
    """Bytes of the network's file against those of the dense network's."""
    dense = group.cell(DENSE, 0.0)
    whole = None if dense is None else dense.mean("bytes")
    return _measured(group, "bytes", "file size in % of the dense network's", 100 / whole) if whole else None


def speedup(group: Group) -> Figure | None:
    """How much faster than dense the sparse network was measured to run."""
    return _measured(group, "speedup", "measured speed-up over dense", 1.0)


def _measured(group: Group, of: Quantity, label: str, factor: float) -> Figure | None:
    figure, axes = _figure()
    drawn = [_line(axes, group, method, of, factor=factor) for method in _pruned(group)]
    if not any(drawn):
        return None
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis)
    _sparsity_axis(axes, group.sparsities)
    axes.set_ylabel(label)
    return _finished(figure, [axes], group)


ALL: dict[str, Callable[[Group], Figure | None]] = {
    "accuracy": accuracy,
    "accuracy-and-time": accuracy_and_time,
    "relative-to-imp": relative_to_imp,
    "total-time": total_time,
    "layers": layers,
    "learning-curves": learning_curves,
    "effective-sparsity": effective_sparsity,
    "file-size": file_size,
    "speedup": speedup,
}


def write_all(folder: Path, found: Sequence[Group], claims: Sequence[Claim]) -> list[Path]:
    """Every figure as SVG and PNG, every table as CSV and LaTeX, in a folder for each group."""
    written = [_text(folder / "runs.csv", tables.runs_csv(found)), *_claims(folder, claims)]
    for group in found:
        if group.cells:
            room = folder / group.name
            room.mkdir(parents=True, exist_ok=True)
            written += [*_figures(room, group), *_tables(room, group)]
    return written


def _figures(room: Path, group: Group) -> list[Path]:
    written = []
    for name, draw in ALL.items():
        figure = draw(group)
        if figure is not None:
            for kind in ("svg", "png"):
                path = room / f"{name}.{kind}"
                with rc_context({"svg.hashsalt": name}):  # the same figure is the same file
                    save(path, figure, kind)
                written.append(path)
    return written


def save(path: Path, figure: Figure, kind: str) -> None:
    """Write a figure as "svg", "png" or "pdf": all of it, or an error that names the file."""
    content = BytesIO()
    figure.savefig(content, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    write_atomically(path, content.getvalue())


def _tables(room: Path, group: Group) -> list[Path]:
    made = (tables.accuracy(group, "last"), tables.accuracy(group, "best"), tables.times(group))
    return [
        _text(room / "cells.csv", tables.cells_csv(group)),
        *(_text(room / f"{table.name}.csv", tables.table_csv(table)) for table in made),
        *(_text(room / f"{table.name}.tex", tables.to_latex(table, group.title)) for table in made),
    ]


def _claims(folder: Path, claims: Sequence[Claim]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    table = tables.claims(claims)
    rows = [
        (claim.text, check.group, check.where, check.verdict, check.numbers, " · ".join(check.variants))
        for claim in claims
        for check in claim.checks
    ]
    return [
        _text(folder / "claims.csv", tables.table_csv(table)),
        _text(folder / "claims.tex", tables.to_latex(table, "the paper's claims")),
        _text(
            folder / "claims-checks.csv",
            tables.to_csv(("claim", "runs", "where", "verdict", "numbers", "with"), rows),
        ),
    ]


def _text(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.encode("utf-8", "replace"))
    return path


# What the figures have in common.


def _figure(high: float = _HIGH) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDE, high), layout="constrained")
    return figure, figure.add_subplot()


def _small_multiples(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 4)
    lines = -(-count // columns)
    figure = Figure(figsize=(max(_WIDE, 2.2 * columns), 0.8 + 2.0 * lines), layout="constrained")
    rooms = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for empty in rooms[count:]:
        empty.set_visible(False)
    for axes in rooms[:count]:
        quiet(axes)
    return figure, rooms[:count]


def _finished(figure: Figure, rooms: Sequence[Axes], group: Group) -> Figure:
    once: dict[str, Any] = {}
    for axes in rooms:
        quiet(axes)
        drawn: list[Any] = [*axes.get_lines(), *axes.containers]
        for line in drawn:
            once.setdefault(str(line.get_label()), line)
    named = {name: line for name, line in once.items() if not name.startswith("_child")}
    words = [_plain(name) for name in named]
    figure.legend(named.values(), words, loc="outside right upper", frameon=False, fontsize=8)
    machines = f"\ncomputed on {_plain('; '.join(group.processors), 160)}" if group.processors else ""
    figure.suptitle(_plain(group.title, 160) + machines, fontsize=9)
    return figure


def _plain(text: str, most: int = 60) -> str:
    """Text that matplotlib shows as it is: no formulas, nothing hidden for a line at its beginning, not endless."""
    shown = printable(text)
    shown = (shown if len(shown) <= most else f"{shown[: most - 1]}…").replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown


def _plain_numbers(axis: Axis, subs: Sequence[float] = (1, 2, 3, 5, 7)) -> None:
    """0.1, 1, 10 instead of powers, and some numbers between them."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def quiet(axes: Axes) -> None:
    """A light grid, and no frame."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.tick_params(labelsize=8)


def _sparsity_axis(axes: Axes, sparsities: Sequence[float]) -> None:
    axes.set_xticks(_places(sparsities), [f"{100 * sparsity:g}" for sparsity in sparsities])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sparsity in % (log of what is left)")


def _places(sparsities: Sequence[float]) -> list[float]:
    """Where sparsities stand on the log axis: -log10 of the density."""
    return [float(-np.log10(1 - sparsity)) for sparsity in sparsities]


def _pruned(group: Group) -> list[str]:
    return [method for method in group.methods if base(method) != DENSE]


def _cells(group: Group, method: str) -> list[Cell]:
    return [cell for sparsity in group.sparsities if (cell := group.cell(method, sparsity)) is not None]


def _number(cell: Cell, of: Quantity) -> float:
    value = cell.mean(of)
    assert value is not None
    return value


def _line(axes: Axes, group: Group, method: str, of: Quantity, *, factor: float) -> bool:
    """Draw the means of a method with bands of a deviation; whether there are any."""
    cells = [cell for cell in _cells(group, method) if cell.mean(of) is not None]
    if not cells:
        return False
    places = _places([cell.sparsity for cell in cells])
    means = np.array([factor * _number(cell, of) for cell in cells])
    deviations = np.array([factor * (cell.deviation(of) or 0.0) for cell in cells])
    axes.plot(places, means, label=method, **_style(group, method))
    if deviations.any():
        axes.fill_between(places, means - deviations, means + deviations, color=_colour(group, method), alpha=0.15)
    return True


def _style(group: Group, method: str) -> dict[str, Any]:
    return {"color": _colour(group, method), "marker": _marker(group, method), "markersize": 5, "linewidth": 1.5}


def _colour(group: Group, method: str) -> str:
    return palette.colour(method, group.methods)


def _marker(group: Group, method: str) -> str:
    return palette.mark(method, group.methods)
