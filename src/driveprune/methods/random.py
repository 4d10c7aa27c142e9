"""Random: the floor that every method has to beat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from driveprune.kinds import Amount
from driveprune.mask import Loss, Scores
from driveprune.plan import Plan, Prune, Train, early
from driveprune.seeds import uniform


def score(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    batches: Iterator[Any],
    *,
    loss: Loss,
    generator: torch.Generator,
) -> Scores:
    """Uniform random numbers, the same for the same seed on every device and for any number of ranks."""
    return {name: uniform(kept, generator) for name, kept in mask.items()}


def plan(sparsity: float, steps: int, steps_per_epoch: int, *, early_epochs: Amount = 0.0) -> Plan:
    """Cut once, evenly over the network, then train.

    Knobs:
        early_epochs: epochs of dense training before the cut.
    """
    return [*early(early_epochs, steps_per_epoch), Prune(score, (sparsity,)), Train(steps)]
