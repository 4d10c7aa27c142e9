"""Whether a run is as good as its like, or went wrong.

*Collapsed*: no path leads from input to output. *Unstable*: a run ends far below other seeds of the same runs that
came out well, or, if there are none, far below the dense network, or no better than it was before its cut. *Weak*:
it is far below the dense network, and so are all its seeds: that is how good these networks are, and no accident.
*Sound*: none of these.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from driveprune.runs.store import Run

Word = Literal["sound", "weak", "unstable", "collapsed"]

KEPT = 0.9
"""The fraction of the dense network's accuracy from which a run is sound."""
FAR = 0.10
"""Accuracy below other seeds from which a run is no longer one of them."""
VERY_FAR = 0.25
"""The same to the best of the other seeds, if that one has learnt well and there is no dense run to compare with."""
SPREADS = 5.0
"""How many robust standard deviations of the other seeds a run must be below them."""
LOST = 0.20, 0.75
"""A single run is far below a dense one if it is so much less accurate, and has kept less than this part."""
LEARNT = 0.9
"""A run has learnt nothing if its training loss ends above this part of that of its first epoch."""
WELL = 0.3
"""It has learnt well if the loss ends below this part."""


@dataclass(frozen=True)
class Finding:
    """What is to be said of a run."""

    word: Word
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def judged(run: Run, others: Sequence[Run] = (), dense: float | None = None) -> Finding:
    """What is to be said of a finished run.

    Args:
        run: the run.
        others: the finished runs of the same method, sparsity and training with other seeds.
        dense: the mean accuracy of the dense runs, if there are any; None for a dense run itself.

    """
    result = run.result or {}
    if result.get("collapsed"):
        return Finding("collapsed", "no path leads from input to output, the network cannot learn")
    last = _last(run)
    seeds = [value for other in others if (value := _last(other)) is not None]
    if last is None or (dense is not None and last >= KEPT * dense):
        return Finding("sound")
    if seeds:
        best = max(others, key=lambda other: _last(other) or 0.0)
        return _among(last, seeds, dense, learnt=_loss(best.result or {}, WELL) is None)
    return _alone(result, last, dense)


def _last(run: Run) -> float | None:
    value = (run.result or {}).get("last")
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def _loss(result: Mapping[str, Any], part: float) -> tuple[float, float] | None:
    """The training loss of the first epoch and at the end, if that is above a part of the first one."""
    losses = [float(row["loss"]) for row in result.get("rows") or () if isinstance(row.get("loss"), int | float)]
    return (losses[0], losses[-1]) if len(losses) > 2 and losses[-1] > part * losses[0] > 0 else None


def _among(last: float, seeds: Sequence[float], dense: float | None, learnt: bool) -> Finding:
    """Of a run that other seeds can be compared with."""
    good = [value for value in seeds if dense is not None and value >= KEPT * dense]
    usual = statistics.median(good or seeds)
    spread = 1.4826 * statistics.median(abs(value - usual) for value in seeds)
    outlier = usual - last > max(FAR, SPREADS * max(0.01, spread))
    exceptional = dense is None and learnt and max(seeds) - last > VERY_FAR
    if (good and usual - last > FAR) or outlier or exceptional:
        best = max(seeds)
        return Finding("unstable", f"{_points(best - last)} below the best of the other seeds ({100 * best:.1f}%)")
    if dense is None or good:
        return Finding("sound")
    count = len(seeds) + 1
    said = f"as are all {count} seeds" if count > 2 else "as is the other seed"
    return Finding("weak", f"{_points(dense - last)} below the dense network ({100 * dense:.1f}%), {said}")


def _alone(result: Mapping[str, Any], last: float, dense: float | None) -> Finding:
    """Of a run without other seeds: by the dense network, or by what it was itself."""
    if dense is not None:
        if dense - last > LOST[0] and last < LOST[1] * dense:
            why = f"{_points(dense - last)} below the dense network ({100 * dense:.1f}%)"
            return Finding("unstable", f"{why}; other seeds would show whether it is this seed or this sparsity")
        return Finding("sound")
    rows = result.get("rows") or []
    before = [row["test"] for row in rows if row.get("test") is not None and row.get("sparsity") == 0]
    if before and result.get("sparsity") and before[-1] - last > LOST[0] and last < LOST[1] * before[-1]:
        return Finding("unstable", f"{_points(before[-1] - last)} below its own accuracy before the cut")
    if last < LOST[1] and (losses := _loss(result, LEARNT)) is not None:
        said = f"its training loss ends at {losses[1]:.2f}, after {losses[0]:.2f} in the first epoch"
        return Finding("unstable", f"{said}: it has learnt nothing since")
    return Finding("sound")


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"
