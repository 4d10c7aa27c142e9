"""DRIVE: a few epochs of dense training, then many quick cuts by a score of two gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from driveprune.gradients import check_batches, gradients
from driveprune.mask import Loss, Scores, parameters
from driveprune.plan import Plan, Prune, Train, early
from driveprune.schedule import exponential

TERMS = ("magnitude", "connection", "convergence")


def score(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    batches: Iterator[Any],
    *,
    loss: Loss,
    generator: torch.Generator,
    batches_per_cut: int = 1,
    combine: Literal["mean", "squares"] = "mean",
    terms: Sequence[str] = TERMS,
) -> Scores:
    """Rank weights as S = |θ · ∂L/∂m · ∂L/∂θ| does: magnitude, connection and convergence sensitivity.

    With w = θ⊙m and g = ∂L/∂w the two gradients are ∂L/∂m = θ·g and ∂L/∂θ = m·g, so one backward pass gives
    both, and on the kept weights S = (θ·g)². What is returned is √S = |θ·g|, which has the same order and does
    not underflow. With fewer terms, S = |θ|^a·|g|^b with a = magnitude + connection, b = connection +
    convergence, and its root of degree max(a, b) is returned.

    Reference: Saikumar and Varghese, DRIVE: Dual Gradient-Based Rapid Iterative Pruning, 2024.
    """
    weights = parameters(model)
    a, b = _powers(terms)
    if b == 0:
        return {name: weights[name].detach().abs() for name in mask}
    found = gradients(model, mask, batches, loss=loss, count=batches_per_cut, combine=combine)
    return {name: _root(weights[name].detach(), g, a, b) for name, g in found.items()}


def _powers(terms: Sequence[str]) -> tuple[int, int]:
    if isinstance(terms, str) or not terms or set(terms) - set(TERMS):
        raise ValueError(f"terms must be some of {', '.join(TERMS)}, got {terms!r}")
    magnitude, connection, convergence = (term in terms for term in TERMS)
    return magnitude + connection, connection + convergence


def _root(theta: Tensor, g: Tensor, a: int, b: int) -> Tensor:
    """(|θ|^a·|g|^b)^(1 / max(a, b)), in the precision of g."""
    if a == b:
        return torch.mul(theta.to(g.dtype), g).abs_()
    if a == 0:
        return g.abs()
    theta = theta.to(g.dtype).abs()
    return theta * g.abs().sqrt_() if a > b else theta.sqrt_() * g.abs()


def plan(
    sparsity: float,
    steps: int,
    steps_per_epoch: int,
    *,
    early_epochs: float = 5.0,
    cuts: int = 100,
    fresh: bool = True,
    batches_per_cut: int = 1,
    combine: Literal["mean", "squares"] = "mean",
    terms: Sequence[str] = TERMS,
) -> Plan:
    """Train `early_epochs` dense, cut `cuts` times along an exponential path, train on to the end.

    Knobs:
        early_epochs: epochs of dense training before the first cut (0: prune at initialisation).
        cuts: number of cuts (1: one shot).
        fresh: a new batch for each cut; False scores every cut on the batch of the first.
        batches_per_cut: batches that act as one large batch for a cut.
        combine: "mean" averages their gradients; "squares" sums their squares, Σ_b (θ·g_b)².
        terms: which of "magnitude", "connection" and "convergence" count.
    """
    _powers(terms)
    check_batches(batches_per_cut, combine)
    rank = partial(score, batches_per_cut=batches_per_cut, combine=combine, terms=tuple(terms))
    cut = Prune(rank, exponential(sparsity, cuts), fresh=fresh)
    return [*early(early_epochs, steps_per_epoch), cut, Train(steps)]
