"""DriveFlow: DRIVE with a score that knows paths, too: the geometric mean of SynFlow's score and DRIVE's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from typing import Any

from torch import Tensor, nn

from driveprune.mask import Loss, Scores
from driveprune.methods import drive, synflow
from driveprune.plan import Plan, Prune, Score


def score(
    model: nn.Module, mask: Mapping[str, Tensor], batches: Iterator[Any], *, loss: Loss, generator: Any,
    rank: Score = drive.score,
) -> Scores:  # fmt: skip
    """√(SynFlow's score · DRIVE's score), by `rank`: |θ·∂A/∂θ| · |θ·g| under the root.

    The roots are taken first, in float64, where no product of them underflows.
    """
    first = next(batches)
    flows = synflow.score(model, mask, iter([first]), loss=loss, generator=generator)
    drives = rank(model, mask, chain([first], batches), loss=loss, generator=generator)
    return {name: flow.double().sqrt() * drives[name].double().sqrt() for name, flow in flows.items()}


@wraps(drive.plan)
def plan(*args: Any, **knobs: Any) -> Plan:
    """Carry out DRIVE's plan with its knobs, by the score above."""
    phases = drive.plan(*args, **knobs)
    return [replace(p, score=partial(score, rank=p.score)) if isinstance(p, Prune) else p for p in phases]
