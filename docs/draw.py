"""Draw the figures of the site that are not of a report: python docs/draw.py.

The paper's numbers and results/methods.json, as curves; the plans of the methods, as what happens when.
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from driveprune import methods
from driveprune.plan import Plan, Prune, Train
from driveprune.report.palette import colour, mark
from driveprune.report.paper import rows

HERE = Path(__file__).parent
STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "driveprune", "axes.spines.top": False}
STYLE |= {"axes.spines.right": False, "font.family": "sans-serif"}
SPARSITIES = (0.9, 0.95, 0.98, 0.993)


def plans() -> Figure:
    """When each method trains, cuts and rewinds, in a training of 160 epochs."""
    shown = ("snip", "grasp", "synflow", "force", "drive", "magnitude", "gmp", "imp")
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(reversed(shown)):
        knobs = {"cycles": 5} if name == "imp" else {"cuts": 8} if name == "gmp" else {}
        _draw_plan(axes, place, methods.make_plan(name, 0.98, 160, 1, knobs))
    axes.set_yticks(range(len(shown)), reversed(shown))
    axes.set_xlim(-4, 265)
    axes.set_xlabel("epochs of training, one after the other")
    handles = [axes.plot([], [], color=c, linewidth=8)[0] for c in (DENSE, SPARSE)] + [_cut(axes, [], [])]
    figure.legend(
        handles, ["dense", "partly or fully pruned", "cuts"], loc="outside upper center", ncols=3, frameon=False
    )
    return figure


DENSE, SPARSE, CUT = "#56B4E9", "#0072B2", "#D55E00"


def _cut(axes: Axes, x: list[float], y: list[float]) -> object:
    return axes.plot(x, y, color=CUT, marker="D", markersize=6, linewidth=0, clip_on=False, zorder=3)[0]


def _draw_plan(axes: Axes, place: int, plan: Plan) -> None:
    now = at = 0  # epochs in all, epochs of this cycle
    pruned = False
    for phase in plan:
        if isinstance(phase, Train):
            axes.barh(place, phase.until - at, left=now, height=0.5, color=SPARSE if pruned else DENSE)
            now, at = now + phase.until - at, phase.until
        elif isinstance(phase, Prune):
            _cut(axes, [now], [place])
            if len(phase.path) > 1:
                axes.annotate(f"{len(phase.path)} cuts", (now, place), (7, 7), textcoords="offset points", fontsize=7)
            pruned = True
        else:
            at = phase.to
            axes.annotate("↶", (now, place), (-4, 8), textcoords="offset points", fontsize=9)


def paper() -> Figure:
    """The paper's tables as curves."""
    numbers = {
        (row["data"], row["model"], row["method"], float(row["sparsity"])): float(row["accuracy"])
        for row in rows("accuracy")
    }
    pairs = list(dict.fromkeys((data, model) for data, model, _, _ in numbers))
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    rooms = figure.subplots(3, 3).flat
    for (data, model), axes in zip(pairs, rooms, strict=False):
        _curves(axes, {key[2:]: value for key, value in numbers.items() if key[:2] == (data, model)})
        axes.set_title(f"{model}, {data}", fontsize=8)
        dense = numbers[data, model, "dense", 0.0]
        axes.set_ylim(max(axes.get_ylim()[0], dense - 26), dense + 4)  # a collapsed network is far below
    return _with_legend(figure, ["dense", "imp", "snip", "synflow", "drive"], len(pairs))


def digits() -> Figure:
    """What benchmarks/methods.py has measured."""
    measured = json.loads((HERE.parent / "results" / "methods.json").read_text())["rows"]
    found = {(row["method"], row["sparsity"]): 100 * row["accuracy"] for row in measured}
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(row["method"] for row in measured))
    before = [
        name for name in names if name in {"dense", "grasp", "force", "erk", "random"} or name.endswith("epoch 0")
    ]
    for axes, shown, title in (
        (left, before, "cut before training"),
        (right, ["dense", *(name for name in names if name not in before)], "cut after some training"),
    ):
        _curves(axes, {key: value for key, value in found.items() if key[0] in shown})
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7, frameon=False, loc="lower left")
    left.set_ylim(60, 101)
    left.set_ylabel("test accuracy in %, mean of 3 seeds")
    return figure


def _curves(axes: Axes, values: dict[tuple[str, float], float]) -> None:
    """Accuracy by (method, sparsity)."""
    names = list(dict.fromkeys(method for method, _ in values))
    for name in names:
        if name == "dense":
            axes.axhline(values[name, 0.0], color="black", linestyle=":", linewidth=1, label=name)
            continue
        base = name.partition(",")[0]
        y = [values[name, sparsity] for sparsity in SPARSITIES]
        style = "--" if "epoch 1" in name else "-"
        axes.plot(range(4), y, style, color=colour(base, names), marker=mark(base, [base]), markersize=4, label=name)
    axes.set_xticks(range(4), [f"{100 * sparsity:g}%" for sparsity in SPARSITIES])


def _with_legend(figure: Figure, names: list[str], used: int) -> Figure:
    rooms = figure.axes
    for axes in rooms[used:]:
        axes.remove()
    handles, labels = rooms[0].get_legend_handles_labels()
    order = [labels.index(name) for name in names]
    figure.legend([handles[i] for i in order], names, loc="lower right", bbox_to_anchor=(0.9, 0.08), frameon=False)
    figure.supylabel("test accuracy in %", fontsize=9)
    return figure


if __name__ == "__main__":
    with rc_context(STYLE):
        for draw in (plans, paper, digits):
            draw().savefig(HERE / "figures" / f"{draw.__name__}.svg", metadata={"Date": None})
