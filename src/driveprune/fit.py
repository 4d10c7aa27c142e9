"""The whole job in one call: early training, cuts, and the training that follows, by a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from driveprune import methods, recipes
from driveprune.batches import Batches, Data, augmentation, crop_and_flip, split, subset
from driveprune.collectives import rank, share_of, size
from driveprune.cut import Budget, Progress, Settings
from driveprune.engine import EngineName, engine_of
from driveprune.gradients import batch_size, check_measure, cross_entropy, endless, generators_of
from driveprune.kinds import Amount, OptionError, Whole, brief, checked
from driveprune.mask import Loss, check_model, check_ordinary
from driveprune.plan import Plan, Prune, final_step
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
    sparsity: float | None = None,
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
        sparsity, method, knobs, include, exclude, frozen, min_kept, budget: as for `prune`; the method's plan is
            followed from its start to its end.
        recipe: the settings of the training, a `Recipe` or its name; by default the general one of `strong`. Which
            data and model it is for is for you to say: they are those that you pass. Crops and flips are for images,
            (N, C, H, W). A loader makes its own batches; what a recipe that you name says of them, and they do not
            do, is told by a `RecipeWarning`.
        epochs: another number of epochs; the recipe's schedule, early epochs and cycles are scaled with it. A plan of
            your own says how many there are.
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
    check_model(model, "fit(model, data)")
    check_ordinary(model)
    settings = Settings(
        loss=loss or cross_entropy, include=include, exclude=exclude, frozen=frozen, min_kept=min_kept, budget=budget,
        seed=seed,
    )  # fmt: skip
    chosen = _recipe(recipe, epochs)
    holdout, every = checked("holdout", holdout, Whole), checked("every", every, Amount)
    channels_last, progress = checked("channels_last", channels_last, bool), checked("progress", progress, bool)
    check_measure(measure)
    _check_callables(watch=watch, stop=stop)
    _check_checkpoints(checkpoints, every)
    _check_keeper("beginning", beginning)
    _check_engine(engine, precision, method)
    device = next(model.parameters()).device
    seed = settings.seed
    if channels_last:
        _check_images(model)
    training, tests = sources(data, chosen, holdout=holdout, seed=seed, device=device, channels_last=channels_last)
    if isinstance(method, list):
        chosen = _of_length(chosen, method, len(training), is_given=recipe is not None or epochs is not None)
    if measure is not right and not tests:
        raise OptionError("measure would do nothing without test data: pass (training, test), or a holdout")
    if recipe is not None:
        _warn_of_unused(chosen, training, loss)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training, tests = _shared(training), {name: _shared(source) for name, source in tests.items()}
    used_loss = loss or partial(cross_entropy, smoothing=chosen.label_smoothing)
    optimizer = chosen.make_optimizer(model)
    scheduler = chosen.make_scheduler(optimizer)
    given = {**chosen.knobs.get(method, {}), **(knobs or {})} if isinstance(method, str) else knobs

    def make_pruner(resume: Mapping[str, Any] | None, tell: Progress) -> Pruner:
        return Pruner(
            model, optimizer, training, sparsity=sparsity, steps_per_epoch=len(training),
            epochs=None if isinstance(method, list) else chosen.epochs,
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
    if not isinstance(chosen, Recipe):
        raise OptionError(f"recipe must be a Recipe or the name of one, got {brief(recipe)}")
    return recipes.scaled(chosen, epochs=epochs)


def _check_engine(engine: EngineName, precision: Precision, method: methods.Method) -> None:
    if engine_of(engine) != "dense" and precision != "fp32":
        raise OptionError(f"the sparse engine computes in fp32, so engine={engine!r} cannot act with {precision!r}")
    if engine_of(engine) != "dense" and isinstance(method, list) and not any(isinstance(p, Prune) for p in method):
        raise OptionError(
            f"engine={engine!r} would do nothing: it trains what a cut leaves, and the plan does not cut"
        )


def _check_checkpoints(checkpoints: Any, every: float) -> None:
    if checkpoints is None and every != 60.0:
        raise OptionError(f"every={every} would do nothing without checkpoints: pass where states are to be kept")
    _check_keeper("checkpoints", checkpoints)


def _check_keeper(name: str, keeper: Any) -> None:
    if keeper is not None and not all(callable(getattr(keeper, each, None)) for each in ("load", "save")):
        raise OptionError(f"{name} must have load() and save(state), got {brief(keeper)}")


def _check_callables(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            raise OptionError(f"{name} must be a function, got {brief(value)}")


def has_convolutions(model: nn.Module) -> bool:
    """Whether a network has weights of convolutions over images, for which there is a memory format."""
    return any(parameter.dim() == 4 for parameter in model.parameters())


def _check_images(model: nn.Module) -> None:
    if not has_convolutions(model):
        raise OptionError("channels_last=True would do nothing: it is for convolutions of images, and there are none")


def _of_length(recipe: Recipe, plan: Plan, steps_per_epoch: int, *, is_given: bool) -> Recipe:
    """A recipe as long as a plan of the user's own; an error if the user asked for another length."""
    epochs = max(1, ceil(final_step(plan) / steps_per_epoch))
    if is_given and epochs != recipe.epochs:
        raise OptionError(
            f"the plan ends at step {final_step(plan)}, which is in epoch {epochs}, and the recipe has "
            f"{recipe.epochs} epochs: say epochs={epochs}, or change the plan's last Train"
        )
    return recipes.scaled(recipe, epochs=epochs)


class RecipeWarning(UserWarning):
    """A recipe says something of the data that a loader of the user's own does not do."""


def _warn_of_unused(recipe: Recipe, training: Source, loss: Loss | None) -> None:
    """Say what of a recipe that the user has named does not act."""
    unused = []
    if isinstance(training, Loader):
        size = training.size()
        if size is not None and size != recipe.batch:
            unused.append(f"batch={recipe.batch} (the loader's batches have {size} examples)")
        unused += [f"{name}={value}" for name, value in {**_augmentation(recipe), **_choice(recipe)}.items()]
    if loss is not None and recipe.label_smoothing:
        unused.append(f"label_smoothing={recipe.label_smoothing} (the loss is yours)")
    if unused:
        warnings.warn(
            f"of the recipe there is no use for {', '.join(unused)}: the batches of a loader and a loss of your own "
            "are taken as they are. Its learning rate was chosen with them",
            RecipeWarning,
            stacklevel=3,
        )


def _augmentation(recipe: Recipe) -> dict[str, Any]:
    """What a recipe does to images, without what it leaves alone."""
    found = {"padding": recipe.padding, "flip": recipe.flip}
    return {name: value for name, value in found.items() if value}


def _choice(recipe: Recipe) -> dict[str, Any]:
    """How many images of its data set a recipe takes, if not all."""
    found = {"images": recipe.images, "test_images": recipe.test_images}
    return {name: value for name, value in found.items() if value is not None}


def sources(
    data: OwnData, recipe: Recipe, *, holdout: int, seed: int, device: torch.device | str, channels_last: bool = False
) -> tuple[Source, dict[str, Source]]:
    """What to train on, and what to test with, by name."""
    if isinstance(data, Data):
        return _image_sources(data, recipe, holdout, seed, device, channels_last)
    training, test = _parts(data)
    source = _source(training, recipe.batch, seed, channels_last)
    tests = {} if test is None else {"test": _source(test, 500, None, channels_last)}
    if isinstance(source, Tensors):
        source = _augmented(source, recipe)
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


def _augmented(source: Tensors, recipe: Recipe) -> Tensors:
    """Tensors of images with the crops and flips of a recipe; an error if it wants them of something else."""
    wanted = ", ".join(f"{name}={value}" for name, value in _augmentation(recipe).items())
    if chosen := _choice(recipe):
        said = ", ".join(f"{name}={value}" for name, value in chosen.items())
        raise OptionError(
            f"the recipe has {said}, so many images of its data set, and yours are tensors: choose among them "
            "yourself, and leave it out by dataclasses.replace(recipe, images=None, test_images=None)"
        )
    if wanted and source.x.dim() != 4:
        raise OptionError(
            f"the recipe has {wanted}, crops and flips of images (N, C, H, W), but the inputs have shape "
            f"{tuple(source.x.shape)}: leave them out by dataclasses.replace(recipe, padding=0, flip=False), or take "
            "the recipe strong-general"
        )
    return replace(source, padding=recipe.padding, flip=recipe.flip)


def _source(data: Any, size: int, seed: int | None, channels_last: bool) -> Source:
    """Tensors or a loader as a source; without a seed in the given order."""
    if _is_tensors(data):
        x, y = data
        if channels_last and x.dim() != 4:
            raise OptionError(f"channels_last is for images (N, C, H, W), but the inputs have shape {tuple(x.shape)}")
        return Tensors(x, y, size, seed, channels_last=channels_last)
    if isinstance(data, Dataset):
        raise TypeError("a Dataset has single examples: wrap it in a torch.utils.data.DataLoader with a batch size")
    if not hasattr(data, "__len__") or iter(data) is data:
        raise TypeError(
            "data must be a Data, a pair of tensors (x, y), or a loader with a length that can be iterated "
            f"again and again, got {type(data).__name__}"
        )
    if len(data) == 0:
        raise ValueError("a loader of data must have at least one batch, got an empty one")
    return Loader(data, seed, channels_last=channels_last)


def _parts(data: Any) -> tuple[Any, Any]:
    """Training and test data; None for data that are not there."""
    return data if isinstance(data, tuple) and len(data) == 2 and not _is_tensors(data) else (data, None)


def _is_tensors(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


@dataclass(frozen=True)
class Tensors:
    """Inputs and targets in memory, in batches of a size; shuffled by (seed, cycle, epoch), or not without a seed.

    With `padding`, images are cropped at random out of themselves with so many zeros on each side; with `flip`, half
    of them are mirrored: the same ones that `Batches` would choose.

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
    padding: int = 0
    flip: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) == 0:
            raise ValueError(f"there must be as many inputs as targets, got {len(self.x)} and {len(self.y)}")

    def __len__(self) -> int:
        return ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.scoring_from(0)

    def scoring_from(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches for scoring, from batch `start` on."""
        return self.epoch("scoring", 0, start)

    def epoch(self, cycle: int | str, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch from batch `start` on."""
        order = torch.arange(len(self.x))
        if self.seed is not None:
            order = torch.randperm(len(self.x), generator=generator_for(self.seed, "order", cycle, number))
        batches = order[start * self.size :].split(self.size)  # type: ignore[no-untyped-call]
        for step, chosen in enumerate(batches, start):
            share = share_of(len(chosen), self.share)
            own = chosen[share]
            x = self.x[own]
            if self.padding or self.flip:
                places = augmentation(self.seed or 0, (cycle, number, step), len(chosen), self.padding, self.flip)
                top, left, flipped = (place[share].to(x.device) for place in places)
                x = crop_and_flip(x, top, left, flipped, self.padding)
            yield x.contiguous(memory_format=torch.channels_last) if self.channels_last else x, self.y[own]

    def split(self, holdout: int) -> tuple[Tensors, Tensors]:
        """Training and held-out data, the same for every seed."""
        if not 0 <= holdout < len(self.x):
            raise ValueError(f"holdout must be at least 0 and less than the {len(self.x)} examples, got {holdout}")
        order = torch.randperm(len(self.x), generator=generator_for(0, "holdout"))
        kept, held = order[holdout:], order[:holdout]
        return (
            replace(self, x=self.x[kept], y=self.y[kept]),
            Tensors(self.x[held], self.y[held], 500, None, channels_last=self.channels_last),
        )


def _channels_last(leaf: Any) -> Any:
    is_images = isinstance(leaf, Tensor) and leaf.dim() == 4
    return leaf.contiguous(memory_format=torch.channels_last) if is_images else leaf


@dataclass(frozen=True)
class Loader:
    """A loader of the user's own. torch's draw from the global generator, which is seeded here for each batch."""

    batches: Any
    seed: int | None
    share: tuple[int, int] = (0, 1)
    """(rank, ranks): of each batch only this rank's share comes out."""
    channels_last: bool = False

    def __len__(self) -> int:
        return len(self.batches)

    def size(self) -> int | None:
        """How many examples a batch has, as far as that is plain to see without drawing one."""
        known = getattr(self.batches, "batch_size", None)
        if known is None and isinstance(self.batches, Sequence):
            known = batch_size(self.batches[0])
        return known if isinstance(known, int) else None

    def __iter__(self) -> Iterator[Any]:
        self._seed("epoch", "scoring", 0)
        return map(self._own, self.batches)

    def scoring_from(self, start: int) -> Iterator[Any]:
        """The batches for scoring from batch `start` on; those of a loader that shuffles in an order of their own."""
        self._seed("epoch", "scoring", start)
        return map(self._own, islice(endless(self.batches, start, self.seed or 0), len(self)))

    def _own(self, batch: Any) -> Any:
        """The rank's share of a batch: of every tensor in it that has as many rows as there are examples."""
        if self.channels_last:
            batch = tree_map(_channels_last, batch)
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
