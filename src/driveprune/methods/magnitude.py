"""Magnitude: train, cut the smallest weights, train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from driveprune.kinds import Amount
from driveprune.mask import Loss, Scores, parameters
from driveprune.plan import Plan, Prune, Train, early


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


def plan(sparsity: float, steps: int, steps_per_epoch: int, *, early_epochs: Amount | None = None) -> Plan:
    """Train dense, cut once, train on to the end.

    Knobs:
        early_epochs: epochs before the cut; by default half of all.
    """
    before = steps / 2 / max(1, steps_per_epoch) if early_epochs is None else early_epochs
    return [*early(before, steps_per_epoch), Prune(score, (sparsity,)), Train(steps)]
