"""SNIP: one cut at initialisation, by how much the loss feels each connection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from driveprune.gradients import gradients, in_mode
from driveprune.kinds import Amount, Count, Mode
from driveprune.mask import Loss, Scores, parameters
from driveprune.plan import Plan, Prune, Train, early


def score(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    batches: Iterator[Any],
    *,
    loss: Loss,
    generator: torch.Generator,
    batches_per_cut: int = 1,
    mode: Mode = "training",
) -> Scores:
    """Connection sensitivity |∂L/∂m| = |θ·g|, with g = ∂L/∂(θ⊙m).

    Its division by the sum over all weights is left out: it changes no ranking.

    Reference: Lee, Ajanthan and Torr, SNIP: Single-shot Network Pruning, 2019.
    """
    weights = parameters(model)
    with in_mode(model, mode):
        found = gradients(model, mask, batches, loss=loss, count=batches_per_cut)
    return {name: torch.mul(weights[name].detach().to(g.dtype), g).abs_() for name, g in found.items()}


def plan(
    sparsity: float,
    steps: int,
    steps_per_epoch: int,
    *,
    early_epochs: Amount = 0.0,
    batches_per_cut: Count = 1,
    mode: Mode = "training",
) -> Plan:
    """Cut once, then train.

    Knobs:
        early_epochs: epochs of dense training before the cut.
        batches_per_cut: batches that act as one large batch.
        mode: "training" scores the model as it is trained; "evaluation" with its running statistics.
    """
    cut = Prune(partial(score, batches_per_cut=batches_per_cut, mode=mode), (sparsity,))
    return [*early(early_epochs, steps_per_epoch), cut, Train(steps)]
