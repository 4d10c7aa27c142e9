"""The picture of a bench: how much faster the sparse network is, batch by batch."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from driveprune.bench import NOISE, Bench, Timing, milliseconds
from driveprune.report import palette
from driveprune.report.figures import quiet, save
from driveprune.runs.spec import DENSE
from driveprune.screen import printable

KINDS = ("svg", "png", "pdf")
_FASTER, _SAME, _SLOWER = palette.WORKS["training"], palette.WORKS["loading"], palette.WORKS["scoring"]


def picture(found: Bench, title: str = "") -> Figure:
    """Bars of the speed-up over dense for each work and batch; the line is the dense network."""
    works = list(dict.fromkeys(each.work for each in found.timings))
    if not works:
        raise ValueError("nothing was measured: there is nothing to draw")
    figure = Figure(figsize=(max(4.2, 3.4 * len(works)), 3.4), layout="constrained")
    rooms = figure.subplots(1, len(works), sharey=True, squeeze=False).flatten().tolist()
    for work, axes in zip(works, rooms, strict=True):
        _draw(axes, [each for each in found.timings if each.work == work])
        axes.set_title(work, fontsize=9)
    rooms[0].set_ylabel("times faster than dense", fontsize=9)
    rooms[0].set_ylim(0, 1.3 * max(1.0, *(each.speedup for each in found.timings)))
    shown = printable(title).replace("$", r"\$")
    figure.suptitle(f"{shown}\n{found.title}" if shown else found.title, fontsize=9)
    return figure


def _draw(axes: Axes, timings: list[Timing]) -> None:
    colours = [_colour(each.speedup) for each in timings]
    bars = axes.bar([str(each.batch) for each in timings], [each.speedup for each in timings], 0.6, color=colours)
    words = [f"{each.speedup:.1f}×\n{milliseconds(each.dense)} → {milliseconds(each.sparse)} ms" for each in timings]
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.bar_label(bars, words, fontsize=7, padding=3, bbox=paper)
    line = palette.colour(DENSE, [DENSE])
    axes.axhline(1, color=line, linestyle=":", linewidth=1.2)
    axes.annotate("dense", (1, 1), xycoords=("axes fraction", "data"), xytext=(2, 0), textcoords="offset points",
                  fontsize=7, color=line, va="center", annotation_clip=False)  # fmt: skip
    axes.set_xlabel("batch", fontsize=9)
    quiet(axes)
    axes.grid(axis="x", visible=False)


def _colour(speedup: float) -> str:
    if abs(speedup - 1) < NOISE:
        return _SAME
    return _FASTER if speedup > 1 else _SLOWER


def write(path: Path, found: Bench, title: str = "") -> None:
    """Write the picture as SVG, PNG or PDF, by the ending of the name."""
    kind = check_kind(path)
    with rc_context({"svg.hashsalt": "bench"}):
        save(path, picture(found, title), kind)


def check_kind(path: Path) -> str:
    """The kind of picture that a file's name asks for."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise ValueError(f"a picture's name must end with {', '.join(f'.{each}' for each in KINDS)}, got {path.name}")
    return kind
