"""Magnitude: train, cut the smallest weights, train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from driveprune.kinds import LATER, Amount, Count, OptionError, PathName, Window
from driveprune.mask import Loss, Scores, parameters
from driveprune.plan import Phase, Plan, Prune, Train, check_spread, spread
from driveprune.schedule import named


def score(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    batches: Iterator[Any],
    *,
    loss: Loss,
    generator: torch.Generator,
) -> Scores:
    """The magnitude |θ|.

    Reference: Han et al., Learning both weights and connections for efficient neural networks, 2015.
    """
    weights = parameters(model)
    return {name: weights[name].detach().abs() for name in mask}


def plan(
    sparsity: float,
    steps: int,
    steps_per_epoch: int,
    *,
    early_epochs: Amount | None = None,
    window: Window = 0.0,
    cuts: Annotated[Count, LATER] = 100,
    path: PathName = "exponential",
) -> Plan:
    """Train dense, cut, train on to the end.

    Knobs:
        early_epochs: epochs before the first cut; by default half of all.
        window: epochs from the first cut to the last, with training between them (0: one cut).
        cuts: number of cuts in a window.
        path: "exponential" removes the same share at each cut; "cubic" much at first and little at the end.
    """
    check_spread(cuts, window, path)
    if not window and (cuts != 100 or path != "exponential"):
        raise OptionError(
            f"cuts={cuts}, path={path!r} would do nothing with window=0: only training changes magnitudes"
        )
    before = steps / 2 / max(1, steps_per_epoch) if early_epochs is None else early_epochs
    phases = spread(Prune(score, named(path, sparsity, cuts)), before, window, steps_per_epoch, batches_per_cut=0)
    return [*map(_at_once, phases), Train(steps)]


def _at_once(phase: Phase) -> Phase:
    """A phase with one cut where several fall on one step: magnitudes are the same for each."""
    return replace(phase, path=phase.path[-1:]) if isinstance(phase, Prune) else phase
