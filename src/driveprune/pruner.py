"""Carrying out plans, step by step, driven by the user's training loop."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from driveprune import methods
from driveprune.collectives import Group, among, full, is_sharded, part, placed
from driveprune.cut import (
    Budget,
    Progress,
    Seconds,
    Settings,
    asked_sparsity,
    check_group,
    check_means,
    check_progress,
    cut,
    provenance,
)
from driveprune.gradients import cross_entropy, seeded
from driveprune.hold import Held, Optimizers, check_free, hold, listed
from driveprune.kinds import Count, OptionError, Positive, brief, checked, qualified
from driveprune.mask import (
    Loss,
    Mask,
    buffers,
    check_fits,
    check_model,
    group_of,
    parameters,
    restore,
    unwrap,
)
from driveprune.mask import (
    sparsity as sparsity_of,
)
from driveprune.plan import Plan, Prune, Reinit, Rewind, Shuffle, Train, final_step, total_steps
from driveprune.seeds import generator_for, seed_for


class Scheduler(Protocol):
    """A learning-rate schedule, such as one of torch's."""

    def step(self) -> None:
        """Go on by one epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go back to where it was."""


class Pruner:
    """Follows the plan of a method while you train: cuts, holds and rewinds when the plan says so.

    Call `step()` after every step of the optimiser, for `epochs` epochs. What the plan does before any training
    (the cut of SNIP, say) happens when the pruner is made. Removed weights are held at zero.

    Args:
        model, optimizer: what you train; several optimisers may be given as a list.
        batches: batches to score with, such as your data loader.
        sparsity, method, knobs, loss, include, exclude, frozen, min_kept, budget, seed, progress, group: as for
            `prune`.
        epochs: epochs of the training that ends with the sparse network, early epochs included; the last one need
            not be whole. A method that trains several times (IMP) needs more: see the attribute `epochs`. A plan of
            your own says how long it trains: leave out epochs and sparsity.
        steps_per_epoch: steps of the optimiser in one epoch.
        scheduler: a learning-rate scheduler for the pruner to step once an epoch, and to take back at a rewind.
        resume: a `state_dict()` to go on from, instead of the beginning of the plan.

    >>> x, y = torch.randn(64, 10), torch.randint(2, (64,))
    >>> net = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> pruner = Pruner(net, optimizer, [(x, y)], method="drive", sparsity=0.9, epochs=10, steps_per_epoch=1)
    >>> for epoch in range(pruner.epochs):
    ...     nn.functional.cross_entropy(net(x), y).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     pruner.step()
    >>> int((net[0].weight != 0).sum() + (net[2].weight != 0).sum())
    60

    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        batches: Iterable[Any] | None = None,
        *,
        sparsity: float | None = None,
        epochs: float | None = None,
        steps_per_epoch: int,
        method: methods.Method = "drive",
        knobs: Mapping[str, Any] | None = None,
        loss: Loss = cross_entropy,
        scheduler: Scheduler | None = None,
        include: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        frozen: bool = False,
        min_kept: int = 0,
        budget: Budget = "weights",
        seed: int = 0,
        progress: Progress = True,
        resume: Mapping[str, Any] | None = None,
        group: Group = None,
    ) -> None:
        check_model(model, "Pruner(model, optimizer, batches)")
        check_progress(progress)
        check_group(group)
        _check_scheduler(scheduler)
        self._settings = Settings(
            loss=loss, include=include, exclude=exclude, frozen=frozen, min_kept=min_kept, budget=budget, seed=seed
        )
        given = methods.check_knobs(method, knobs)
        self._asked = asked_sparsity(sparsity, method)
        steps = _steps(epochs, steps_per_epoch, method)
        steps_per_epoch = int(steps_per_epoch)
        make = partial(methods.make_plan, method, self._asked, steps, steps_per_epoch)
        self.plan: Plan = make(given)
        check_means(self.plan, self._settings, batches)
        self._method, self._knobs = method, methods.acting(method, make, given)
        self.epochs = ceil(total_steps(self.plan) / steps_per_epoch)
        """How many epochs to train in all, over all cycles of the plan."""
        self.steps_per_epoch = steps_per_epoch
        self.cycle = 0
        """How often the plan has rewound so far."""
        self.cycle_step = 0
        """Steps of the optimiser within the cycle: what a learning-rate schedule should look at."""
        self.seconds = Seconds(float)
        """Where the time of the cuts went so far: "scoring" and "selection"."""
        self._model, self._batches, self._scheduler = unwrap(model), batches, scheduler
        self._optimizers, self._group = listed(optimizer), group or group_of(model)
        self._progress = progress
        self.cursor = 0
        """Which phase of the plan is under way."""
        self._snapshots: dict[int, dict[str, Any]] = {}
        self._held: Held | None = None
        self._mask = self._with_provenance(self._settings.everything(model))
        check_free(check_fits(self._model, self._mask), self._optimizers)
        if resume is not None:
            if not isinstance(resume, Mapping):
                raise OptionError(f"resume must be the state_dict() of a pruner, got {brief(resume)}")
            self.load_state_dict(resume)
        else:
            self._begin()

    def _begin(self) -> None:
        """Do what comes before any training; if that fails, everything is as it was before."""
        before = {} if isinstance(self.plan[0], Train) else self._values(self._tensors())
        try:
            self.advance()
        except BaseException:
            if self._held is not None:
                self._held.release()
            restore(self._tensors(), before)
            raise

    @property
    def mask(self) -> Mask:
        """What is kept at the moment."""
        return self._mask

    @property
    def held(self) -> Held | None:
        """The hold on the network, from the first cut on."""
        return self._held

    @property
    def done(self) -> bool:
        """Whether the plan has come to its end."""
        return self.cursor == len(self.plan)

    @property
    def cuts_left(self) -> int:
        """How many Prune phases are still to come."""
        return sum(isinstance(phase, Prune) for phase in self.plan[self.cursor :])

    @property
    def steps_left(self) -> int:
        """How many steps to train before the plan cuts, rewinds or ends."""
        phase = None if self.done else self.plan[self.cursor]
        return phase.until - self.cycle_step if isinstance(phase, Train) else 0

    def step(self) -> None:
        """Say that the optimiser has made one step; do what the plan has for this moment."""
        if self.done:
            return
        self.cycle_step += 1
        if self._scheduler is not None and self.cycle_step % self.steps_per_epoch == 0:
            self._scheduler.step()
        self.advance()

    def advance(self) -> None:
        """Carry out phases until one needs training: nothing, unless a cut was interrupted."""
        values: dict[str, Tensor] = {}
        while not self.done:
            self._remember()
            phase = self.plan[self.cursor]
            if isinstance(phase, Train) and self.cycle_step < phase.until:
                return
            values = self._carry_out(phase, values)
            self.cursor += 1

    def _carry_out(self, phase: object, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Do one phase at once. `values` are the weights before the last cut or rewind took some away."""
        match phase:
            case Prune():
                if any(isinstance(later, Shuffle) for later in self.plan[self.cursor :]):
                    values = self._values(self._mask)
                self._prune(phase)
            case Rewind():
                values = self._snapshots[phase.to]["values"]
                self._rewind(phase)
            case Shuffle():
                self._hold(_shuffled(self._mask, phase.seed), values)
            case Reinit():
                _reinitialise(self._model, phase.seed)
                self._forget_optimizers()
                self._hold(self._mask, {})
        return values

    def _prune(self, phase: Prune) -> None:
        with among(self._group):
            kept = cut(
                self._model, self._mask, phase, self._batches, loss=self._settings.loss, seed=self._settings.seed,
                counter=(self.cycle, self.cursor), is_last=self.cuts_left == 1, min_kept=self._settings.min_kept,
                budget=self._settings.budget, progress=self._progress, seconds=self.seconds,
            )  # fmt: skip
        self._hold(kept, {})

    def _hold(self, mask: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Take over a mask; `values` are given back to weights first."""
        restore(parameters(self._model), {name: value for name, value in values.items() if name in mask})
        self._mask = self._with_provenance(mask)
        if self._held is None:
            self._held = hold(self._model, self._optimizers, self._mask)
        else:
            self._held.update(self._mask)

    def _with_provenance(self, mask: Mapping[str, Tensor]) -> Mask:
        about = provenance(self._method, self._knobs, self._settings, self._asked, sparsity_of(mask))
        return Mask(mask, about)

    def _remember(self) -> None:
        """Take a snapshot if the plan is going to rewind to this step."""
        targets = {phase.to for phase in self.plan if isinstance(phase, Rewind)}
        if self.cycle_step in targets and self.cycle_step not in self._snapshots:
            self._snapshots[self.cycle_step] = {
                "values": self._values(self._tensors()),
                "groups": [[_settings(group) for group in one.param_groups] for one in self._optimizers],
                "scheduler": None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict()),
            }

    def _tensors(self) -> dict[str, Tensor]:
        return {**parameters(self._model), **buffers(self._model)}

    def _values(self, names: Iterable[str]) -> dict[str, Tensor]:
        known = self._tensors()
        return {name: known[name].detach().clone() for name in names}

    def _rewind(self, phase: Rewind) -> None:
        snapshot = self._snapshots[phase.to]
        restore(self._tensors(), snapshot["values"])
        self._forget_optimizers()
        for optimizer, groups in zip(self._optimizers, snapshot["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=False):  # later groups stay as they are
                group.update(copy.deepcopy(settings))
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copy.deepcopy(snapshot["scheduler"]))
        self.cycle += 1
        self.cycle_step = phase.to
        if self._held is not None:
            self._held.clean()

    def _forget_optimizers(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Where the plan is, as tensors, numbers and strings; model and optimiser are saved by you, as ever."""
        return {
            "identity": self._identity(),
            "cursor": self.cursor,
            "cycle": self.cycle,
            "cycle_step": self.cycle_step,
            "held": self._held is not None,
            "mask": dict(self._mask),
            "snapshots": {str(step): snapshot for step, snapshot in self._snapshots.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; model and optimiser are loaded by you, before or after."""
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ValueError(f"this is no state of a pruner: it has no {missing[0]!r}")
        differences = self._differences(json.loads(state["identity"]))
        if other := sorted(state["mask"].keys() ^ self._mask.keys()):
            raise ValueError(
                f"this checkpoint prunes other weights than this pruner: only one of them has {other[0]}"
                + (f" ({'; '.join(differences)})" if differences else "")
            )
        if differences:
            raise ValueError(f"this checkpoint belongs to another plan: {'; '.join(differences)}")
        weights = check_fits(self._model, state["mask"])
        mask = {name: kept.to(weights[name].device, copy=True) for name, kept in state["mask"].items()}
        if state["held"] or self._held is not None:
            self._hold(mask, {})
        if self._held is not None and not state["held"]:
            self._held.release()
            self._held = None
        self._snapshots = {int(step): copy.deepcopy(snapshot) for step, snapshot in state["snapshots"].items()}
        self.cursor, self.cycle, self.cycle_step = state["cursor"], state["cycle"], state["cycle_step"]

    def _identity(self) -> str:
        about = {key: value for key, value in self._mask.provenance.items() if key not in {"versions", "asked"}}
        plan: dict[str, Any] = {"sparsity": self._asked, "steps": total_steps(self.plan), "phases": len(self.plan)}
        if isinstance(self._method, list):  # the plans of methods follow from their knobs
            plan["plan"] = ", ".join(map(_described, self.plan))
        return json.dumps({**about, **plan}, sort_keys=True)

    def _differences(self, theirs: Mapping[str, Any]) -> list[str]:
        """In what a checkpoint is not of this pruner, in words; older ones know fewer options."""
        ours = json.loads(self._identity())
        known = {} if isinstance(self._method, list) else methods.knobs(self._method)
        defaults = json.loads(json.dumps(known, default=repr))
        both = [({**defaults, **each.pop("knobs", {})}, each) for each in (dict(theirs), ours)]
        (their_knobs, theirs), (our_knobs, ours) = both
        pairs = [(name, theirs[name], value) for name, value in ours.items() if name in theirs]
        pairs.sort(key=lambda pair: pair[0] != "method")
        if theirs["method"] == ours["method"]:
            pairs += [(name, their_knobs.get(name), value) for name, value in our_knobs.items()]
        return [
            f"its {name} is {value!r}, and that of this pruner {own!r}"
            for name, value, own in pairs
            if not (_is_same_function(value, own) if name == "loss" else value == own)
        ]


def _check_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError("a ReduceLROnPlateau needs your metric at each step: step it yourself, without the pruner")
    needed = ("step", "state_dict", "load_state_dict")
    if scheduler is not None and not all(callable(getattr(scheduler, name, None)) for name in needed):
        raise OptionError(
            f"scheduler must be a learning-rate scheduler of torch or one like it, got {brief(scheduler)}"
        )


def _steps(epochs: float | None, steps_per_epoch: int, method: methods.Method) -> int:
    """The steps of the training that ends with the sparse network; an error if a plan of one's own says otherwise."""
    per_epoch: int = checked("steps_per_epoch", steps_per_epoch, Count)
    own = final_step(method) if isinstance(method, list) else None
    if epochs is None:
        if own is None:
            raise OptionError("epochs must be given: those of the training that ends with the sparse network")
        return own
    steps: int = round(checked("epochs", epochs, Positive) * per_epoch)
    if own is not None and steps != own:
        raise OptionError(
            f"the plan ends at step {own}, which is {own / per_epoch:g} epochs, so epochs={epochs} would do nothing: "
            "leave it out, or change the plan's last Train"
        )
    if steps < 1:
        raise OptionError(
            "there must be at least 1 step in an epoch and in all epochs, "
            f"got epochs={epochs}, steps_per_epoch={steps_per_epoch}"
        )
    return steps


def _described(phase: object) -> str:
    """A phase of a plan in words that are the same in another process."""
    known = [(item, getattr(phase, item.name)) for item in fields(phase)]  # type: ignore[arg-type]
    settings = [
        value for item, value in known if item.name != "skip" or value
    ]  # checkpoints from before know no skip
    said = [qualified(setting) if callable(setting) else repr(setting) for setting in settings]
    return f"{type(phase).__name__}({', '.join(said)})"


def _is_same_function(one: str, other: str) -> bool:
    """Whether two names mean one function, which a script has that is run, and a module that is imported."""
    names = [name.removeprefix("__main__.") for name in (one, other)]
    is_main = names != [one, other]
    return names[0] == names[1] or (is_main and any(a.endswith(f".{b}") for a, b in (names, names[::-1])))


def _shuffled(mask: Mask, seed: int) -> Mask:
    """The mask with the places within each layer permuted: the same densities, other weights."""
    shuffled = Mask(provenance=mask.provenance)
    for name, kept in mask.items():
        order = torch.randperm(kept.numel(), generator=generator_for(seed, "shuffle", name))
        whole = full(kept).reshape(-1)[order.to(kept.device)].view(kept.shape)
        shuffled[name] = placed(part(whole, kept), kept)
    return shuffled


def _reinitialise(model: nn.Module, seed: int) -> None:
    """Draw all weights anew with the modules' own reset_parameters(); the outermost one counts."""
    if any(map(is_sharded, model.parameters())):
        raise ValueError("a sharded model cannot draw new weights: the modules' reset_parameters() know no shards")
    resets = list(_resets(model, "the model"))  # all of them, before the first one is called
    with seeded(model, seed_for(seed, "reinit")):
        for reset in resets:
            reset()


def _resets(module: nn.Module, name: str) -> Iterator[Callable[[], object]]:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        yield reset
        return
    if own := list(module._parameters):
        raise ValueError(f"{name} has parameters ({own[0]}, ...) but no reset_parameters() to draw them anew")
    for child_name, child in module.named_children():
        yield from _resets(child, child_name)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
