"""DRIVE: a few epochs of dense training, then many quick cuts by a score of two gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from driveprune.gradients import check_batches, gradients, in_mode
from driveprune.kinds import Amount, Count, Mode, OptionError, PathName, Window
from driveprune.mask import Loss, Scores, parameters
from driveprune.plan import Plan, Prune, Train, check_spread, spread
from driveprune.schedule import named

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
    mode: Mode = "training",
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
    with in_mode(model, mode):
        found = gradients(model, mask, batches, loss=loss, count=batches_per_cut, combine=combine)
    return {name: _root(weights[name].detach(), g, a, b) for name, g in found.items()}


def _powers(terms: Sequence[str]) -> tuple[int, int]:
    if isinstance(terms, str) or not terms or set(terms) - set(TERMS):
        raise ValueError(f"terms must be some of {', '.join(TERMS)}, got {terms!r}")
    magnitude, connection, convergence = (term in terms for term in TERMS)
    return magnitude + connection, connection + convergence


def _check_used(
    terms: Sequence[str], *, cuts: int, fresh: bool, batches_per_cut: int, combine: str, mode: str, window: float
) -> None:
    """An error for a knob that would do nothing beside the others."""
    _, looks_at_data = _powers(terms)
    changed = {
        "fresh": fresh is not True, "batches_per_cut": batches_per_cut != 1, "combine": combine != "mean",
        "mode": mode != "training",
    }  # fmt: skip
    if not looks_at_data and any(changed.values()):
        given = ", ".join(name for name, is_other in changed.items() if is_other)
        raise OptionError(f"{given} would do nothing with terms={list(terms)}: magnitudes need no data")
    if changed["combine"] and batches_per_cut == 1:
        raise OptionError('combine="squares" would do nothing with batches_per_cut=1: there is one batch to combine')
    if changed["fresh"] and cuts == 1:
        raise OptionError("fresh=False would do nothing with cuts=1: there is no later cut for another batch")
    if changed["fresh"] and window:
        raise OptionError(
            f"fresh=False cannot be with window={window}: cuts at different moments have batches of their own"
        )


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
    early_epochs: Amount = 5.0,
    cuts: Count = 100,
    fresh: bool = True,
    batches_per_cut: Count = 1,
    combine: Literal["mean", "squares"] = "mean",
    terms: Sequence[str] = TERMS,
    mode: Mode = "training",
    window: Window = 0.0,
    path: PathName = "exponential",
) -> Plan:
    """Train `early_epochs` dense, cut `cuts` times along a path, train on to the end.

    Knobs:
        early_epochs: epochs of dense training before the first cut (0: prune at initialisation).
        cuts: number of cuts (1: one shot).
        fresh: a new batch for each cut; False scores every cut on the batch of the first.
        batches_per_cut: batches that act as one large batch for a cut.
        combine: "mean" averages their gradients; "squares" sums their squares, Σ_b (θ·g_b)².
        terms: which of "magnitude", "connection" and "convergence" count.
        mode: "training" scores the model as it is trained; "evaluation" with its running statistics.
        window: epochs from the first cut to the last, with training between them (0: all at one moment).
        path: "exponential" removes the same share at each cut; "cubic" much at first and little at the end.
    """
    check_batches(batches_per_cut, combine)
    check_spread(cuts, window, path)
    _check_used(
        terms, cuts=cuts, fresh=fresh, batches_per_cut=batches_per_cut, combine=combine, mode=mode, window=window
    )
    rank = partial(score, batches_per_cut=batches_per_cut, combine=combine, terms=tuple(terms), mode=mode)
    cut = Prune(rank, named(path, sparsity, cuts), fresh=fresh)
    return [*spread(cut, early_epochs, window, steps_per_epoch, batches_per_cut), Train(steps)]
