"""FORCE: SNIP in many cuts, where removed weights may come back; and iterative SNIP, where they may not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from driveprune.gradients import gradients, in_mode
from driveprune.kinds import Amount, Count, Mode, OptionError
from driveprune.mask import Loss, Scores, masked, parameters
from driveprune.methods import snip
from driveprune.plan import Plan, Prune, Train, early
from driveprune.schedule import exponential


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
    """|θ·g| with g = ∂L/∂w taken at the pruned network w = θ⊙m, for removed weights too.

    Reference: de Jorge et al., Progressive Skeletonization: Trimming more fat from a network at initialization,
    2021.
    """
    weights = parameters(model)
    with masked(model, mask), in_mode(model, mode):
        found = gradients(model, mask, batches, loss=loss, count=batches_per_cut)
    return {name: torch.mul(weights[name].detach().to(g.dtype), g).abs_() for name, g in found.items()}


def plan(
    sparsity: float,
    steps: int,
    steps_per_epoch: int,
    *,
    early_epochs: Amount = 0.0,
    cuts: Count = 60,
    revive: bool = True,
    fresh: bool = True,
    batches_per_cut: Count = 1,
    mode: Mode = "training",
) -> Plan:
    """Cut along an exponential path, then train.

    Knobs:
        early_epochs: epochs of dense training before the first cut.
        cuts: number of cuts.
        revive: let removed weights come back; False is iterative SNIP.
        fresh: a new batch for each cut; False scores every cut on the batch of the first.
        batches_per_cut: batches that act as one large batch for a cut.
        mode: "training" scores the model as it is trained; "evaluation" with its running statistics.
    """
    if cuts == 1 and not (revive and fresh):
        raise OptionError("revive and fresh do nothing with cuts=1: nothing is looked at twice, which is method snip")
    rank = partial(score if revive else snip.score, batches_per_cut=batches_per_cut, mode=mode)
    cut = Prune(rank, exponential(sparsity, cuts), revive=revive, fresh=fresh)
    return [*early(early_epochs, steps_per_epoch), cut, Train(steps)]
