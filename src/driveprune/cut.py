"""Cutting: one Prune phase of a plan, and `prune`, which is that and nothing else."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import chain
from typing import Any, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor, nn

from driveprune import methods
from driveprune.collectives import (
    Group,
    among,
    counted,
    from_first,
    is_first,
    is_same,
    is_sharded,
    size,
    together,
)
from driveprune.gradients import (
    check_collection,
    check_loss,
    cross_entropy,
    endless,
    same_generators,
    scoring,
)
from driveprune.graph import CollapseWarning, Inputs, check_paths, example_of, positions
from driveprune.kinds import OptionError, Whole, brief, checked, kinds_of_fields, qualified
from driveprune.mask import (
    Loss,
    Mask,
    all_weights,
    apply,
    check_fits,
    check_mask,
    check_model,
    check_sparsity,
    empty_layers,
    everything,
    group_of,
    kept_count,
    kept_weights,
    prunable,
    restore,
)
from driveprune.mask import sparsity as sparsity_of
from driveprune.plan import Plan, Prune, Rewind, final_sparsity
from driveprune.screen import Screen
from driveprune.seeds import generator_for, seed_for
from driveprune.selection import keep_top
from driveprune.ties import Ties

Progress = bool | Callable[[int, int], None]
Budget = Literal["weights", "macs"]
"""What a sparsity is a fraction of: all weights, or all multiply-adds."""
Seconds = defaultdict[str, float]
"""Where the time went: name of the work -> seconds."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `prune`, `Pruner` and `fit` let their user choose alike, checked."""

    loss: Loss
    include: str | Iterable[str]
    exclude: str | Iterable[str]
    frozen: bool
    min_kept: Whole
    budget: Budget
    seed: int

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_budget(self.budget)
        kinds = kinds_of_fields(Settings)
        for name in ("frozen", "min_kept", "seed"):
            object.__setattr__(self, name, checked(name, getattr(self, name), kinds[name]))
        for name in ("include", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))

    def everything(self, model: nn.Module) -> Mask:
        """The mask that keeps all weights that are to be pruned."""
        return everything(prunable(model, include=self.include, exclude=self.exclude, frozen=self.frozen))

    def about(self) -> dict[str, Any]:
        """All of it, as JSON knows it."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        lists = {name: list(values[name]) for name in ("include", "exclude")}
        return {**values, **lists, "loss": qualified(self.loss)}


def _patterns(name: str, patterns: Any) -> tuple[str, ...]:
    found = (patterns,) if isinstance(patterns, str) or not isinstance(patterns, Iterable) else tuple(patterns)
    if not all(isinstance(each, str) for each in found):
        raise OptionError(f"{name} must be a pattern of parameter names, or several, got {brief(patterns)}")
    return found


def prune(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    sparsity: float | None = None,
    method: methods.Method = "drive",
    knobs: Mapping[str, Any] | None = None,
    loss: Loss = cross_entropy,
    mask: Mapping[str, Tensor] | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    frozen: bool = False,
    min_kept: int = 0,
    budget: Budget = "weights",
    seed: int = 0,
    progress: Progress = True,
    group: Group = None,
) -> Mask:
    """Cut a network to a sparsity, now: removed weights become zero, and the mask of what is kept is returned.

    Args:
        model: the network, wherever it is in training.
        batches: batches to score with, such as a data loader; they start again when they end.
        sparsity: the fraction of weights to remove, in [0, 1). A plan of your own says it already.
        method: the name of a method, a module, a score function of your own, or a plan of one `Prune`.
        knobs: options of the method; `driveprune.methods.knobs(method)` lists them. Those that say when to cut, such
            as `early_epochs`, are for `Pruner` and `fit`.
        loss: (model, batch) -> scalar; by default the cross entropy of model(x) against y for batches (x, y).
        mask: go on from this mask instead of from all prunable weights.
        include: patterns of parameter names to prune as well, see `prunable`.
        exclude: patterns of parameter names to leave out.
        frozen: prune frozen parameters, too.
        min_kept: keep at least this many weights in each layer.
        budget: "weights", or "macs": the sparsity is the fraction of multiply-adds to remove, and weights compete by
            their score per multiply-add, for that is what speed follows.
        seed: for random scores and for loaders that draw at random.
        progress: show a progress bar on a terminal; or a function that is called with the number of each cut and
            of all cuts.
        group: the processes that prune this network together, each with batches of its own: those of a process
            group, "alone", or by default those of the model's DDP, else all if torch.distributed is at work.

    If anything goes wrong, the model is as it was before. The mask's `provenance` says what was done: the options and
    knobs that acted, and the sparsity that was reached.

    >>> import torch
    >>> x, y = torch.randn(64, 10), torch.randint(2, (64,))
    >>> net = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))
    >>> kept = prune(net, [(x, y)], method="drive", sparsity=0.9)
    >>> sum(int(m.sum()) for m in kept.values())
    60

    """
    check_model(model, "prune(model, batches)")
    check_progress(progress)
    check_group(group)
    settings = Settings(
        loss=loss, include=include, exclude=exclude, frozen=frozen, min_kept=min_kept, budget=budget, seed=seed
    )
    given = methods.check_knobs(method, knobs)
    sparsity = asked_sparsity(sparsity, method)
    phase = _only_cut(methods.make_plan(method, sparsity, 0, 0, given), method)
    acted = knobs_of_cut(method, sparsity, given)
    check_means([phase], settings, batches)
    if mask is not None and (include or exclude or frozen):
        raise ValueError("a mask says already which weights to prune: leave out include, exclude and frozen")
    if mask is not None:
        check_mask(mask)
    with among(group or group_of(model)):
        kept = cut(
            model, settings.everything(model) if mask is None else Mask(mask), phase, batches, loss=loss,
            seed=settings.seed, counter=(0, 0), is_last=True, min_kept=settings.min_kept, budget=budget,
            progress=progress,
        )  # fmt: skip
        return Mask(kept, provenance(method, acted, settings, sparsity, sparsity_of(kept)))


def asked_sparsity(sparsity: float | None, method: methods.Method) -> float:
    """The sparsity to reach: what is asked for, or what a plan of the user's own says; an error if the two differ."""
    if not isinstance(method, list):
        if sparsity is None:
            raise OptionError("sparsity must be given: the fraction of weights to remove, in [0, 1)")
        return check_sparsity(sparsity)
    own = final_sparsity(methods.check_own(method))
    if sparsity is not None and abs(check_sparsity(sparsity) - own) > 1e-9:
        raise OptionError(
            f"the plan cuts to sparsity {own:g}, so sparsity={sparsity} would do nothing: leave it out, or change "
            "the path of the plan's last Prune"
        )
    return own


def _only_cut(plan: Plan, method: methods.Method) -> Prune:
    """The one Prune phase of a plan, or an error if the plan trains between cuts or rewinds."""
    cuts = [phase for phase in plan if isinstance(phase, Prune)]
    is_own = isinstance(method, list)
    if len(cuts) != 1 or any(is_own or isinstance(phase, Rewind) for phase in plan if phase is not cuts[0]):
        raise ValueError(
            f"{methods.describe(method)} trains between its cuts, and prune() only cuts: "
            "use driveprune.Pruner in your training loop"
            + (", or pass a plan of one Prune and nothing else" if is_own else "")
        )
    return cuts[0]


def knobs_of_cut(method: methods.Method, sparsity: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs that act on the cut alone; an error if one is given that acts on the training around it."""
    acted = methods.acting(
        method, lambda values: _only_cut(methods.make_plan(method, sparsity, 0, 0, values), method), given
    )
    if given.keys() <= acted.keys():
        return acted
    trains = methods.acting(method, lambda values: methods.make_plan(method, sparsity, 10**6, 1000, values), given)
    if idle := [name for name in given if name in trains and name not in acted]:
        raise OptionError(
            f"{idle[0]}={given[idle[0]]!r} would do nothing: it says how {methods.describe(method)} trains, and "
            "prune() only cuts, now. It is a knob for driveprune.Pruner and driveprune.fit, which follow the plan"
        )
    return acted


def check_progress(progress: Any) -> None:
    """An error if this is neither yes, nor no, nor a function that is told."""
    if not callable(progress) or isinstance(progress, type):
        checked("progress", progress, bool)


def check_group(group: Any) -> None:
    """An error if this is no group of processes."""
    if not (group is None or group == "alone" or isinstance(group, dist.ProcessGroup)):
        raise OptionError(f'group must be a process group of torch.distributed, "alone" or None, got {brief(group)}')


def check_means(plan: Plan, settings: Settings, batches: Any) -> None:
    """An error, before anything happens, if cuts of a plan cannot be made as they are asked for."""
    if batches is not None:
        check_collection(batches)
    if settings.budget == "macs" and any(isinstance(phase, Prune) for phase in plan):
        check_macs(plan, settings.min_kept)
        if batches is None:
            raise ValueError(
                "a budget of multiply-adds needs batches: their first example shows how often weights are used"
            )


def check_macs(plan: Plan, min_kept: int = 0) -> None:
    """An error if a plan cannot be carried out with a budget of multiply-adds."""
    if min_kept or any(isinstance(phase, Prune) and phase.scope != "global" for phase in plan):
        raise OptionError(
            "a budget of multiply-adds needs a method whose weights compete globally, by their score per "
            "multiply-add, without min_kept; erk, for one, fixes the count of each layer"
        )


def cut(
    model: nn.Module,
    mask: Mask,
    phase: Prune,
    batches: Iterable[Any] | None,
    *,
    loss: Loss,
    seed: int,
    counter: tuple[int, int],
    is_last: bool,
    min_kept: int,
    budget: Budget = "weights",
    progress: Progress,
    seconds: Seconds | None = None,
) -> Mask:
    """Carry out a Prune phase: the new mask. The removed weights are zero afterwards.

    Adds the time for scores to `seconds["scoring"]` and all other time to `seconds["selection"]`. Warns if the
    network is left cut. If anything goes wrong, the model is as it was before.
    """
    weights = check_fits(model, mask)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    feed = _Feed(batches, phase, seed)
    seconds = defaultdict(float) if seconds is None else seconds
    start, scored = time.perf_counter(), seconds["scoring"]
    try:
        with same_generators(batches):
            costs = _costs(model, mask, phase, feed, loss, min_kept) if check_budget(budget) == "macs" else None
            kept = _along_the_path(model, mask, phase, feed, loss, seed, counter, min_kept, costs, progress, seconds)
            if is_last or len(empty_layers(kept)) > len(empty_layers(mask)):
                with scoring(model, seed_for(seed, "example", *counter)) as plain:
                    check_paths(plain, kept, feed.example(plain, loss))
            _check_same(kept)
        seconds["selection"] += time.perf_counter() - start - (seconds["scoring"] - scored)
        return kept
    except BaseException:
        restore(weights, before)
        raise


def _along_the_path(
    model: nn.Module,
    mask: Mask,
    phase: Prune,
    feed: _Feed,
    loss: Loss,
    seed: int,
    counter: tuple[int, int],
    min_kept: int,
    costs: Mapping[str, float] | None,
    progress: Progress,
    seconds: Seconds,
) -> Mask:
    """Score, keep the best and apply, for each sparsity of the path."""
    ties = Ties(len(phase.path), phase.revive)
    if not phase.revive:
        apply(model, mask)
    for number, reached in _shown(phase.path, progress):
        if _nothing_to_cut(mask, phase, reached, costs):
            continue
        start = time.perf_counter()
        with together(), scoring(model, seed_for(seed, "cut", *counter, number)) as plain:
            generator = generator_for(seed, "score", *counter, number)
            scores = phase.score(plain, mask, feed.cut(), loss=loss, generator=generator)
        seconds["scoring"] += time.perf_counter() - start
        scope = phase.scope(mask, reached) if callable(phase.scope) else phase.scope
        kept = keep_top(scores, mask, reached, scope=scope, min_kept=min_kept, revive=phase.revive, costs=costs)
        ties.look(scores, mask, kept, number)
        del scores  # before the next ones are made
        mask = kept
        if not phase.revive:
            apply(model, mask)
    apply(model, mask)
    ties.warn()
    return mask


def _check_same(mask: Mask) -> None:
    """An error if ranks have chosen different weights."""
    if size() == 1:
        return
    checksum = 0
    for kept in mask.values():
        if not is_sharded(kept):
            checksum = crc32(kept.contiguous().view(torch.uint8).cpu().numpy().data, checksum)
    if not is_same(checksum):
        raise RuntimeError(
            "ranks have chosen different weights: their models differ, or the method's scores are not made of sums "
            "over all ranks, as driveprune.gradients makes them"
        )


def check_budget(budget: Budget) -> Budget:
    """The budget, or an error that lists what there is."""
    if budget not in ("weights", "macs"):
        raise ValueError(f"budget must be 'weights' or 'macs', got {budget!r}")
    return budget


def _costs(model: nn.Module, mask: Mask, phase: Prune, feed: _Feed, loss: Loss, min_kept: int) -> dict[str, float]:
    """How many multiply-adds each weight takes for one example, by name."""
    check_macs([phase], min_kept)
    example = feed.example(model, loss)
    if example is None:
        raise ValueError(
            "a budget of multiply-adds needs batches: their first example shows how often weights are used"
        )
    found = positions(model, mask, example)
    known = from_first(lambda: found)  # examples may be of other sizes on other ranks
    if uncounted := [name for name in mask if not known.get(name)]:
        raise ValueError(
            f"the multiply-adds of {uncounted[0]} cannot be counted: exclude it, or use budget='weights'"
        )
    return {name: known[name] for name in mask}


def _nothing_to_cut(mask: Mask, phase: Prune, reached: float, costs: Mapping[str, float] | None) -> bool:
    """Whether the mask has this sparsity already; an error if it is sparser than the end of the path."""
    if phase.revive:
        return False
    if costs is not None:
        used = sum(costs[name] * count for name, count in counted(mask).items())
        return used <= (1 - reached) * sum(costs[name] * kept.numel() for name, kept in mask.items())
    kept, weights = kept_weights(mask), all_weights(mask)
    if kept < kept_count(weights, phase.path[-1]):
        raise ValueError(
            f"the mask keeps {kept} of {weights} weights, fewer than sparsity {phase.path[-1]} asks for: "
            "start from a denser mask"
        )
    return phase.scope == "global" and kept <= kept_count(weights, reached)


def _shown(path: tuple[float, ...], progress: Progress) -> Iterable[tuple[int, float]]:
    """The cuts, numbered; on a terminal with a progress bar."""
    if callable(progress):
        return _told(path, progress)
    bar = progress and is_first() and len(path) > 1 and Screen(stderr=True).is_terminal
    return track(list(enumerate(path)), "pruning", transient=True, disable=not bar)


def _told(path: tuple[float, ...], tell: Callable[[int, int], None]) -> Iterator[tuple[int, float]]:
    for number, reached in enumerate(path):
        tell(number + 1, len(path))
        yield number, reached


class _Feed:
    """The batches of one Prune phase: one iterator lives across its cuts."""

    def __init__(self, batches: Iterable[Any] | None, phase: Prune, seed: int) -> None:
        self._batches, self._fresh = batches, phase.fresh
        self._stream = self._noted(endless(batches, phase.skip, seed))
        self._first: list[Any] | None = None
        self._last: list[Any] = []

    def _noted(self, stream: Iterator[Any]) -> Iterator[Any]:
        for batch in stream:
            self._last = [batch]
            if self._first is not None:
                self._first.append(batch)
            yield batch

    def cut(self) -> Iterator[Any]:
        """The batches for one cut."""
        if self._fresh:
            return self._stream
        if self._first is None:
            self._first = []
            return self._stream
        return chain(tuple(self._first), self._stream)

    def example(self, model: nn.Module, loss: Loss) -> Inputs | None:
        """An input of the model, from a batch that was looked at or, if there was none, from the first."""
        if self._batches is None:
            return None
        try:
            return example_of(model, self._last[0] if self._last else next(self._stream), loss)
        except Exception as error:  # the check for paths is a service, no reason to fail
            warnings.warn(f"paths through the network cannot be followed: {error}", CollapseWarning, stacklevel=4)
            return None


def provenance(
    method: methods.Method, knobs: Mapping[str, Any], settings: Settings, asked: float, reached: float
) -> dict[str, Any]:
    """Where a mask comes from: what `driveprune.save` writes beside it."""
    packages = ("driveprune", "torch", "numpy")
    return {
        "method": methods.describe(method),
        "knobs": json.loads(json.dumps(knobs, default=repr)),
        "sparsity": reached,
        "asked": asked,
        **settings.about(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }
