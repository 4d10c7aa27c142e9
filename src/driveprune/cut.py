"""Cutting: one Prune phase of a plan, and `prune`, which is that and nothing else."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import chain
from typing import Any, Literal
from zlib import crc32

import torch
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
from driveprune.gradients import cross_entropy, endless, same_generators, scoring
from driveprune.graph import CollapseWarning, Inputs, check_paths, example_of, positions
from driveprune.mask import (
    Loss,
    Mask,
    all_weights,
    apply,
    check_fits,
    check_sparsity,
    empty_layers,
    everything,
    group_of,
    kept_count,
    kept_weights,
    prunable,
    restore,
)
from driveprune.plan import Plan, Prune, Rewind
from driveprune.screen import Screen
from driveprune.seeds import generator_for, seed_for
from driveprune.selection import keep_top

Progress = bool | Callable[[int, int], None]
Budget = Literal["weights", "macs"]
"""What a sparsity is a fraction of: all weights, or all multiply-adds."""
Seconds = defaultdict[str, float]
"""Where the time went: name of the work -> seconds."""


def prune(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    sparsity: float,
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
        sparsity: the fraction of weights to remove, in [0, 1).
        method: the name of a method, a module, or a score function of your own.
        knobs: options of the method; `driveprune.methods.knobs(method)` lists them.
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

    If anything goes wrong, the model is as it was before.

    >>> import torch
    >>> x, y = torch.randn(64, 10), torch.randint(2, (64,))
    >>> net = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))
    >>> kept = prune(net, [(x, y)], method="drive", sparsity=0.9)
    >>> sum(int(m.sum()) for m in kept.values())
    60

    """
    sparsity, seed = check_sparsity(sparsity), int(seed)
    phase = _only_cut(methods.make_plan(method, sparsity, 0, 0, knobs), method)
    if mask is not None and (include or exclude or frozen):
        raise ValueError("a mask says already which weights to prune: leave out include, exclude and frozen")
    start = (
        Mask(mask)
        if mask is not None
        else everything(prunable(model, include=include, exclude=exclude, frozen=frozen))
    )
    with among(group or group_of(model)):
        kept = cut(
            model, start, phase, batches, loss=loss, seed=seed, counter=(0, 0), is_last=True, min_kept=min_kept,
            budget=budget, progress=progress,
        )  # fmt: skip
    return Mask(kept, provenance(method, knobs, sparsity, seed, budget))


def _only_cut(plan: Plan, method: methods.Method) -> Prune:
    """The one Prune phase of a plan, or an error if the plan trains between cuts or rewinds."""
    cuts = [phase for phase in plan if isinstance(phase, Prune)]
    if len(cuts) != 1 or any(isinstance(phase, Rewind) for phase in plan):
        raise ValueError(
            f"{methods.describe(method)} trains between its cuts, and prune() only cuts: "
            "use driveprune.Pruner in your training loop"
        )
    return cuts[0]


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
    feed = _Feed(batches, phase.fresh)
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
        mask = keep_top(scores, mask, reached, scope=scope, min_kept=min_kept, revive=phase.revive, costs=costs)
        del scores  # before the next ones are made
        if not phase.revive:
            apply(model, mask)
    apply(model, mask)
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
    if callable(phase.scope) or phase.scope != "global" or min_kept:
        raise ValueError("a budget of multiply-adds needs a method whose weights compete globally, without min_kept")
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

    def __init__(self, batches: Iterable[Any] | None, fresh: bool) -> None:
        self._batches, self._fresh = batches, fresh
        self._stream = self._noted(endless(batches))
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
    method: methods.Method, knobs: Mapping[str, Any] | None, sparsity: float, seed: int, budget: Budget = "weights"
) -> dict[str, Any]:
    """Where a mask comes from: what `driveprune.save` writes beside it."""
    known = {} if isinstance(method, list) else methods.knobs(method)
    packages = ("driveprune", "torch", "numpy")
    return {
        "method": methods.describe(method),
        "knobs": json.loads(json.dumps({**known, **(knobs or {})}, default=repr)),
        "sparsity": sparsity,
        "budget": budget,
        "seed": seed,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }
