"""Plans: what a method does and in which order, as data. `driveprune.Pruner` carries them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from driveprune.mask import Scores

Score = Callable[..., Scores]
"""(model, mask, batches, *, loss, generator) -> scores. `batches` is an endless iterator of batches."""

Allocation = Callable[[Mapping[str, Tensor], float], dict[str, int]]
"""(mask, sparsity) -> the number of weights to keep, by name."""


@dataclass(frozen=True)
class Train:
    """Train until a step of the optimiser, counted within the cycle (a rewind begins a new one)."""

    until: int


@dataclass(frozen=True)
class Prune:
    """Cut once for each sparsity of the path: score, keep the best, set the rest to zero.

    With `revive`, removed weights keep their values during the phase and may come back; the score function
    then sees the unmasked weights. With `fresh=False` every cut sees the batches of the first one.
    """

    score: Score
    path: tuple[float, ...]
    scope: Literal["global", "layer"] | Allocation = "global"
    revive: bool = False
    fresh: bool = True


@dataclass(frozen=True)
class Rewind:
    """Back to step `to`: all parameters and buffers of then, under the mask of now.

    The optimiser's state is cleared, and the schedule starts again from that step.
    """

    to: int = 0


@dataclass(frozen=True)
class Shuffle:
    """Permute the mask within each layer: a sanity check of what the mask knows."""

    seed: int = 0


@dataclass(frozen=True)
class Reinit:
    """Draw new initial weights under the same mask: a sanity check of what the weights know."""

    seed: int = 0


Plan = list[Train | Prune | Rewind | Shuffle | Reinit]


def early(epochs: float, steps_per_epoch: int) -> Plan:
    """Dense training before the first cut; nothing for 0 epochs."""
    if not epochs >= 0:
        raise ValueError(f"early_epochs must not be negative, got {epochs}")
    return [Train(round(epochs * steps_per_epoch))] if epochs else []


def total_steps(plan: Plan) -> int:
    """How many steps of the optimiser a plan takes, over all its cycles; an error if they do not fit."""
    total = step = 0
    for phase in plan:
        if isinstance(phase, Train):
            if phase.until < step:
                raise ValueError(
                    f"the plan trains until step {phase.until} of the cycle after it was at step {step}: "
                    "the epochs before the cut are more than the whole training has"
                )
            total += phase.until - step
            step = phase.until
        elif isinstance(phase, Rewind):
            if phase.to > step:
                raise ValueError(f"the plan rewinds to step {phase.to}, but has only reached step {step}")
            step = phase.to
    return total
