"""The whole job in one call: early training, cuts, and the training that follows, by a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from driveprune import methods, recipes
from driveprune.batches import Batches, Data, split, subset
from driveprune.collectives import rank, share_of, size
from driveprune.cut import Budget, Progress
from driveprune.engine import EngineName
from driveprune.gradients import batch_size, cross_entropy, generators_of
from driveprune.mask import Loss, check_ordinary
from driveprune.progress import shown
from driveprune.pruner import Pruner
from driveprune.recipes import Recipe
from driveprune.seeds import generator_for, seed_for
from driveprune.train import (
    Beginning,
    Checkpoints,
    Measure,
    Moment,
    Precision,
    Source,
    Stop,
    Trained,
    never,
    right,
    train,
)

OwnData = Data | tuple[Any, Any] | Iterable[Any]
"""Data; (training, test) of tensor pairs (x, y) or re-iterable loaders; or training data alone."""


def fit(
    model: nn.Module,
    data: OwnData,
    *,
    sparsity: float,
    method: methods.Method = "drive",
    knobs: Mapping[str, Any] | None = None,
    recipe: Recipe | str | None = None,
    epochs: int | None = None,
    holdout: int = 0,
    loss: Loss | None = None,
    measure: Measure = right,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    frozen: bool = False,
    min_kept: int = 0,
    budget: Budget = "weights",
    precision: Precision = "fp32",
    engine: EngineName = "dense",
    channels_last: bool = False,
    seed: int = 0,
    progress: bool = True,
    checkpoints: Checkpoints | None = None,
    every: float = 60.0,
    beginning: Beginning | None = None,
    watch: Callable[[Moment], None] | None = None,
    stop: Stop = never,
) -> Trained:
    """Train a network and prune it early, by a recipe; afterwards the model is the trained sparse network.

    With several ranks, each has its share of every batch: the training is that of one process with the same recipe,
    but for batch statistics, which each rank has of its own share.

    Args:
        model: the network, freshly built, on the device where it shall train.
        data: a `Data` of `driveprune.datasets`; or (training, test), each a pair of tensors (x, y) or a loader
            that can be iterated again and again; or training data alone.
        sparsity, method, knobs, include, exclude, frozen, min_kept, budget: as for `prune`.
        recipe: the settings of the training, a `Recipe` or its name; by default the general one of `strong`.
        epochs: another number of epochs; the recipe's schedule, early epochs and cycles are scaled with it.
        holdout: so many training images are held out, and the best epoch is chosen by them.
        loss: (model, batch) -> scalar; by default the cross entropy, smoothed as the recipe says.
        measure: (model, batch) -> a value an example; by default 1 where the largest output is the target.
        precision: "fp32", "bf16" or "fp16" for the passes in training.
        engine: "sparse" trains the kept weights alone after a cut, on the CPU; "auto" does so if it is faster.
        channels_last: keep images and convolutions in that memory format.
        seed: for the order of the data, crops, flips, dropout and scores.
        progress: show a progress bar on a terminal.
        checkpoints, every, beginning, watch, stop: as for `driveprune.train.train`.

    >>> x, y = torch.randn(64, 10), torch.randint(2, (64,))
    >>> net = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))
    >>> trained = fit(net, ((x, y), (x, y)), sparsity=0.9, epochs=2)
    >>> sum(int(kept.sum()) for kept in trained.mask.values())
    60

    """
    check_ordinary(model)
    chosen = _recipe(recipe, epochs)
    device = next(model.parameters()).device
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training, tests = sources(data, chosen, holdout=holdout, seed=seed, device=device, channels_last=channels_last)
    training, tests = _shared(training), {name: _shared(source) for name, source in tests.items()}
    used_loss = loss or partial(cross_entropy, smoothing=chosen.label_smoothing)
    optimizer = chosen.make_optimizer(model)
    scheduler = chosen.make_scheduler(optimizer)
    given = {**chosen.knobs.get(method, {}), **(knobs or {})} if isinstance(method, str) else knobs

    def make_pruner(resume: Mapping[str, Any] | None, tell: Progress) -> Pruner:
        return Pruner(
            model, optimizer, training, sparsity=sparsity, epochs=chosen.epochs, steps_per_epoch=len(training),
            method=method, knobs=given, loss=used_loss, scheduler=scheduler, include=include, exclude=exclude,
            frozen=frozen, min_kept=min_kept, budget=budget, seed=seed, progress=tell, resume=resume,
        )  # fmt: skip

    with shown("training", progress and watch is None) as bar:
        return train(
            model, optimizer, training, make_pruner, loss=used_loss, scheduler=scheduler, tests=tests,
            measure=measure, precision=precision, engine=engine, seed=seed, checkpoints=checkpoints, every=every,
            beginning=beginning, watch=watch or bar, stop=stop,
        )  # fmt: skip


def _shared(source: Source) -> Source:
    """The rank's own share of each batch of a source."""
    kind: Any = source
    shared: Source = replace(kind, share=(rank(), size()))
    return shared


def _recipe(recipe: Recipe | str | None, epochs: int | None) -> Recipe:
    chosen = recipes.get(recipe or "strong-general") if recipe is None or isinstance(recipe, str) else recipe
    return recipes.scaled(chosen, epochs=epochs)


def sources(
    data: OwnData, recipe: Recipe, *, holdout: int, seed: int, device: torch.device | str, channels_last: bool = False
) -> tuple[Source, dict[str, Source]]:
    """What to train on, and what to test with, by name."""
    if isinstance(data, Data):
        return _image_sources(data, recipe, holdout, seed, device, channels_last)
    training, test = _parts(data)
    source, tests = _source(training, recipe.batch, seed), {} if test is None else {"test": _source(test, 500, None)}
    if holdout:
        if not isinstance(source, Tensors):
            raise ValueError("holdout needs data as tensors: hold out some yourself and pass them as the test data")
        source, tests["holdout"] = source.split(holdout)
    return source, tests


def _image_sources(
    data: Data, recipe: Recipe, holdout: int, seed: int, device: torch.device | str, channels_last: bool
) -> tuple[Source, dict[str, Source]]:
    training, held_out = split(subset(data.train, recipe.images), holdout)
    batches = partial(Batches, mean=data.mean, deviation=data.deviation, device=device, channels_last=channels_last)
    plain = partial(batches, size=500, shuffle=False)
    tests: dict[str, Source] = {"test": plain(subset(data.test, recipe.test_images))}
    if holdout:
        tests["holdout"] = plain(held_out)
    return batches(training, size=recipe.batch, padding=recipe.padding, flip=recipe.flip, seed=seed), tests


def _source(data: Any, size: int, seed: int | None) -> Source:
    """Tensors or a loader as a source; without a seed in the given order."""
    if _is_tensors(data):
        x, y = data
        return Tensors(x, y, size, seed)
    if isinstance(data, Dataset):
        raise TypeError("a Dataset has single examples: wrap it in a torch.utils.data.DataLoader with a batch size")
    if not hasattr(data, "__len__") or iter(data) is data:
        raise TypeError(
            "data must be a Data, a pair of tensors (x, y), or a loader with a length that can be iterated "
            f"again and again, got {type(data).__name__}"
        )
    if len(data) == 0:
        raise ValueError("a loader of data must have at least one batch, got an empty one")
    return Loader(data, seed)


def _parts(data: Any) -> tuple[Any, Any]:
    """Training and test data; None for data that are not there."""
    return data if isinstance(data, tuple) and len(data) == 2 and not _is_tensors(data) else (data, None)


def _is_tensors(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


@dataclass(frozen=True)
class Tensors:
    """Inputs and targets in memory, in batches of a size; shuffled by (seed, cycle, epoch), or not without a seed.

    >>> source = Tensors(torch.arange(5), torch.arange(5), size=2, seed=0)
    >>> len(source), [len(x) for x, y in source.epoch(0, 0)]
    (3, [2, 2, 1])
    """

    x: Tensor
    y: Tensor
    size: int
    seed: int | None
    share: tuple[int, int] = (0, 1)
    """(rank, ranks): of each batch only this rank's share comes out."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) == 0:
            raise ValueError(f"there must be as many inputs as targets, got {len(self.x)} and {len(self.y)}")

    def __len__(self) -> int:
        return ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch("scoring", 0)

    def epoch(self, cycle: int | str, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch from batch `start` on."""
        order = torch.arange(len(self.x))
        if self.seed is not None:
            order = torch.randperm(len(self.x), generator=generator_for(self.seed, "order", cycle, number))
        for chosen in order[start * self.size :].split(self.size):  # type: ignore[no-untyped-call]
            own = chosen[share_of(len(chosen), self.share)]
            yield self.x[own], self.y[own]

    def split(self, holdout: int) -> tuple[Tensors, Tensors]:
        """Training and held-out data, the same for every seed."""
        if not 0 <= holdout < len(self.x):
            raise ValueError(f"holdout must be at least 0 and less than the {len(self.x)} examples, got {holdout}")
        order = torch.randperm(len(self.x), generator=generator_for(0, "holdout"))
        kept, held = order[holdout:], order[:holdout]
        return (
            Tensors(self.x[kept], self.y[kept], self.size, self.seed),
            Tensors(self.x[held], self.y[held], 500, None),
        )


@dataclass(frozen=True)
class Loader:
    """A loader of the user's own. torch's draw from the global generator, which is seeded here for each batch."""

    batches: Any
    seed: int | None
    share: tuple[int, int] = (0, 1)
    """(rank, ranks): of each batch only this rank's share comes out."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self._seed("epoch", "scoring", 0)
        return map(self._own, self.batches)

    def _own(self, batch: Any) -> Any:
        """The rank's share of a batch: of every tensor in it that has as many rows as there are examples."""
        if self.share == (0, 1):
            return batch
        count = batch_size(batch)
        own = share_of(count, self.share)
        return tree_map(
            lambda leaf: leaf[own] if isinstance(leaf, Tensor) and leaf.shape[:1] == (count,) else leaf, batch
        )

    def epoch(self, cycle: int | str, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of one epoch from batch `start` on; those before are drawn and dropped."""
        self._seed("epoch", cycle, number)
        batches = iter(self.batches)
        for place in range(len(self)):
            self._seed("batch", cycle, number, place)
            batch = next(batches, self)
            if batch is self:
                raise ValueError(f"the loader has {place} batches, but says that it has {len(self)}")
            if place >= start:
                yield self._own(batch)

    def _seed(self, *counter: str | int) -> None:
        """Seed the global generator, and at the start of an epoch those that the loader was given."""
        if self.seed is not None:
            torch.manual_seed(seed_for(self.seed, *counter))
            for generator in generators_of(self.batches) if counter[0] == "epoch" else ():
                generator.manual_seed(seed_for(self.seed, *counter))
