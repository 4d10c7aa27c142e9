"""A pruner as a guest in the training of another program, which has its own steps, schedules and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from driveprune import methods
from driveprune.cut import Budget, Settings, asked_sparsity
from driveprune.gradients import check_collection, cross_entropy
from driveprune.kinds import Count, checked, qualified
from driveprune.mask import Loss, Mask, sparsity
from driveprune.plan import total_steps
from driveprune.pruner import Pruner, Scheduler


@dataclass(frozen=True)
class Order:
    """What to prune, and how: the arguments of `Pruner` that do not depend on the training, checked."""

    sparsity: float | None
    method: methods.Method
    knobs: Mapping[str, Any] | None
    include: str | Iterable[str]
    exclude: str | Iterable[str]
    frozen: bool
    min_kept: int
    budget: Budget
    seed: int
    batches: Iterable[Any] | None
    loss: Loss | None
    steps_per_epoch: int | None

    def __post_init__(self) -> None:
        Settings(
            loss=self.loss or cross_entropy, include=self.include, exclude=self.exclude, frozen=self.frozen,
            min_kept=self.min_kept, budget=self.budget, seed=self.seed,
        )  # fmt: skip
        methods.check_knobs(self.method, self.knobs)
        asked_sparsity(self.sparsity, self.method)
        if self.batches is not None:
            check_collection(self.batches)
        if self.steps_per_epoch is not None:
            checked("steps_per_epoch", self.steps_per_epoch, Count)

    @property
    def asked(self) -> float:
        """The sparsity to reach, which a plan of the user's own says itself."""
        return asked_sparsity(self.sparsity, self.method)


def called_as(loss: Loss | None, calling: Loss) -> Loss:
    """A function that calls the user's own loss, under its name, which provenance tells and a resume compares."""
    if loss is not None:
        calling.__module__, calling.__qualname__ = "", qualified(loss)
    return calling


@dataclass(frozen=True)
class Length:
    """How long a training is, in steps of the optimiser."""

    steps: int
    per_epoch: int


class Guest:
    """Makes a pruner when a training begins, and lets go of the network when it ends."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._pruner: Pruner | None = None
        self._length: Length | None = None
        self.sparsity = 0.0
        """What is removed at the moment, as a fraction."""

    @property
    def pruner(self) -> Pruner:
        """There from the beginning of the training on."""
        if self._pruner is None:
            raise ValueError("there is no pruner yet: the training has not begun")
        return self._pruner

    def begin(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        schedulers: list[Any],
        batches: Iterable[Any],
        *,
        loss: Loss,
        length: Length,
        state: Mapping[str, Any] | None,
    ) -> None:
        """Make the pruner, from the start of its plan or from a state; that one's plan keeps its own length."""
        if state is not None:
            length = Length(state["steps"], state["per_epoch"])
        order = self._order
        self._length = length
        epochs = _last_steps(order, length) / length.per_epoch
        self._pruner = Pruner(
            model, optimizers, batches if order.batches is None else order.batches, sparsity=order.sparsity,
            epochs=None if isinstance(order.method, list) else epochs,  # a plan that is given says it
            steps_per_epoch=length.per_epoch, method=order.method, knobs=order.knobs, loss=loss,
            scheduler=Schedules(schedulers), include=order.include, exclude=order.exclude, frozen=order.frozen,
            min_kept=order.min_kept, budget=order.budget, seed=order.seed, progress=False,
            resume=None if state is None else state["pruner"],
        )  # fmt: skip
        self.sparsity = sparsity(self._pruner.mask)

    def step(self) -> None:
        """Say that the optimiser has made one step."""
        before = self.pruner.cursor
        self.pruner.step()
        if self.pruner.cursor != before:
            self.sparsity = sparsity(self.pruner.mask)

    def end(self, *, early: bool = False) -> None:
        """Let go: an ordinary network is left. Warns if cuts are missing, unless an error ends it `early`."""
        if self._pruner is None:
            return
        if self._pruner.held is not None:
            self._pruner.held.release()
        if self._pruner.cuts_left and not early:
            warnings.warn(
                f"the training ended before the plan: {self._pruner.cuts_left} cuts were still to come, the sparsity "
                f"is {self.sparsity:.4g} and not {self._order.asked}",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on: tensors, numbers and strings. Empty before the training."""
        if self._pruner is None or self._length is None:
            return {}
        return {
            "steps": self._length.steps,
            "per_epoch": self._length.per_epoch,
            "pruner": self._pruner.state_dict(),
        }

    @property
    def mask(self) -> Mask:
        """What is kept at the moment."""
        return self.pruner.mask


def _last_steps(order: Order, length: Length) -> int:
    """The steps of the training that ends with the sparse network: all, but those of cycles that are taken back."""
    plan = methods.make_plan(order.method, order.asked, length.steps, length.per_epoch, order.knobs)
    is_own = isinstance(order.method, list)  # a plan that is given has its length
    taken_back = 0 if is_own else total_steps(plan) - length.steps
    least = total_steps(plan) if is_own else taken_back + 1
    if least > length.steps:
        knobs = {} if is_own else {**methods.knobs(order.method), **(order.knobs or {})}
        said = ", ".join(f"{name}={value}" for name, value in knobs.items())
        raise ValueError(
            f"{methods.describe(order.method)} takes at least {least} steps, with {length.per_epoch} in an epoch, "
            f"and the training has only {length.steps}" + (f" ({said})" if said else "")
        )
    return length.steps - taken_back


class Schedules:
    """Learning-rate schedules that another program steps: a rewind takes them back, nothing else happens here."""

    def __init__(self, schedulers: list[Scheduler]) -> None:
        self._schedulers = schedulers

    def step(self) -> None:
        """The other program does."""

    def state_dict(self) -> dict[str, Any]:
        """Where they are."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take them back."""
        for scheduler, own in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
