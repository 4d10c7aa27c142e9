"""Plans: what a method does and in which order, as data. `driveprune.Pruner` carries them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from torch import Tensor

from driveprune.kinds import Amount, OptionError, Whole, checked
from driveprune.mask import Scores, check_sparsity

Score = Callable[..., Scores]
"""(model, mask, batches, *, loss, generator) -> scores. `batches` is an endless iterator of batches."""

Allocation = Callable[[Mapping[str, Tensor], float], dict[str, int]]
"""(mask, sparsity) -> the number of weights to keep, by name."""


@dataclass(frozen=True)
class Train:
    """Train until a step of the optimiser, counted within the cycle (a rewind begins a new one)."""

    until: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "until", checked("the step until which to train", self.until, Whole))


@dataclass(frozen=True)
class Prune:
    """Cut once for each sparsity of the path: score, keep the best, set the rest to zero.

    With `revive`, removed weights keep their values during the phase and may come back; the score function
    then sees the unmasked weights. With `fresh=False` every cut sees the batches of the first one. `skip` batches
    are passed over first: those that earlier cuts of a window have seen.
    """

    score: Score
    path: tuple[float, ...]
    scope: Literal["global", "layer"] | Allocation = "global"
    revive: bool = False
    fresh: bool = True
    skip: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.path, str) or not isinstance(self.path, Iterable) or not tuple(self.path):
            raise OptionError(
                f"the path of a Prune must be sparsities, one for each cut, such as (0.5, 0.9), got {self.path!r}"
            )
        object.__setattr__(self, "path", tuple(check_sparsity(reached) for reached in self.path))
        if not callable(self.scope) and self.scope not in ("global", "layer"):
            raise OptionError(
                'the scope of a Prune must be "global", "layer" or a function of (mask, sparsity) that allocates, '
                f"got {self.scope!r}"
            )
        for name in ("revive", "fresh"):
            object.__setattr__(self, name, checked(name, getattr(self, name), bool))
        object.__setattr__(self, "skip", checked("skip", self.skip, Whole))


@dataclass(frozen=True)
class Rewind:
    """Back to step `to`: all parameters and buffers of then, under the mask of now.

    The optimiser's state is cleared, and the schedule starts again from that step.
    """

    to: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", checked("the step to rewind to", self.to, Whole))


@dataclass(frozen=True)
class Shuffle:
    """Permute the mask within each layer: a sanity check of what the mask knows."""

    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked("seed", self.seed, int))


@dataclass(frozen=True)
class Reinit:
    """Draw new initial weights under the same mask: a sanity check of what the weights know."""

    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked("seed", self.seed, int))


Phase = Train | Prune | Rewind | Shuffle | Reinit
Plan = list[Phase]


def early(epochs: float, steps_per_epoch: int) -> Plan:
    """Dense training before the first cut; nothing for 0 epochs."""
    epochs = checked("early_epochs", epochs, Amount)
    return [Train(round(epochs * steps_per_epoch))] if epochs else []


def spread(cuts: Prune, early_epochs: float, window: float, steps_per_epoch: int, batches_per_cut: int = 1) -> Plan:
    """Early training, then the cuts of a phase with training between them: evenly spread over `window` epochs.

    Of N cuts over w steps cut n comes round(w·(n-1)/(N-1)) steps after the first. Cuts that fall on one step are made
    at once, in one phase: all of them if the window is 0.
    """
    first, length = round(early_epochs * steps_per_epoch), round(window * steps_per_epoch)
    last = max(1, len(cuts.path) - 1)
    moments = [first + round(length * n / last) for n in range(len(cuts.path))]
    plan = early(early_epochs, steps_per_epoch)
    for moment, group in groupby(range(len(moments)), key=moments.__getitem__):
        numbers = list(group)
        path = tuple(cuts.path[n] for n in numbers)
        plan += [Train(moment)] if moment > first else []
        plan.append(replace(cuts, path=path, skip=numbers[0] * batches_per_cut))
    return plan


def check_spread(cuts: int, window: float, path: str) -> None:
    """An error for knobs that would do nothing with a single cut."""
    given = [said for said, acts in ((f"window={window}", window), (f"path={path!r}", path != "exponential")) if acts]
    if cuts == 1 and given:
        raise OptionError(f"{' and '.join(given)} would do nothing with cuts=1: one cut has one moment and no path")


def counts_epochs(knob: str) -> bool:
    """Whether a knob counts epochs, by its name: such knobs grow and shrink with the training.

    >>> counts_epochs("early_epochs"), counts_epochs("window"), counts_epochs("cuts")
    (True, True, False)
    """
    return knob.endswith("epochs") or knob == "window"


def final_sparsity(plan: Plan) -> float:
    """The sparsity of the last cut of a plan; 0 if it does not cut."""
    return next((phase.path[-1] for phase in reversed(plan) if isinstance(phase, Prune)), 0.0)


def final_step(plan: Plan) -> int:
    """The step within the last cycle at which a plan ends."""
    moments = (p.until if isinstance(p, Train) else p.to for p in reversed(plan) if isinstance(p, Train | Rewind))
    return next(moments, 0)


def total_steps(plan: Plan) -> int:
    """How many steps of the optimiser a plan takes, over all its cycles; an error if they do not fit."""
    total = step = 0
    for phase in plan:
        if isinstance(phase, Train):
            if phase.until < step:
                raise ValueError(
                    "the epochs before the cut are more than the whole training has: the plan is at step "
                    f"{step} of its cycle by then, and should train until step {phase.until}"
                )
            total += phase.until - step
            step = phase.until
        elif isinstance(phase, Rewind):
            if phase.to > step:
                raise ValueError(f"the plan rewinds to step {phase.to}, but has only reached step {step}")
            step = phase.to
    return total


def check_length(plan: Plan, steps: int, steps_per_epoch: int, epochs: Mapping[str, Any]) -> None:
    """An error if a method's epochs, given by the names of its knobs, do not fit into the training."""
    try:
        total_steps(plan)
    except ValueError as error:
        given = {name: value for name, value in epochs.items() if value}
        said = ", ".join(f"{name}={value} ({round(value * steps_per_epoch)} steps)" for name, value in given.items())
        raise ValueError(
            f"{error}. The training has {steps} steps in {steps / steps_per_epoch:g} epochs"
            + (f", and these knobs ask for more: {said}. Set them lower, or train longer" if said else "")
        ) from None
