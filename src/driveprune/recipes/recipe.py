"""What a recipe is: every setting of a training, complete and typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import cos, isfinite, pi
from typing import Any, Literal

import torch
from torch import nn

from driveprune.kinds import Count, Positive, checked
from driveprune.plan import counts_epochs

Knobs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a network, on what, and how each method is set there."""

    data: str
    model: str
    epochs: int
    """Epochs of the training that ends with the sparse network, early ones included."""
    batch: int
    optimizer: Literal["sgd", "adam"]
    rate: float
    """The learning rate at the start."""
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    cosine: bool = False
    """Whether the learning rate falls along a half cosine to zero at the end."""
    drops: tuple[tuple[float, float], ...] = ()
    """(epoch, fraction of the initial rate from then on), in order."""
    label_smoothing: float = 0.0
    padding: int = 4
    """Pixels of zero padding before the random crop."""
    flip: bool = True
    sparsities: tuple[float, ...] = (0.9, 0.95, 0.98, 0.993)
    knobs: Knobs = field(default_factory=dict)
    """Method -> its knobs in this recipe."""
    width: float = 1.0
    """Multiplies the channels of the model."""
    images: int | None = None
    """How many training images are used; None: all."""
    test_images: int | None = None

    def rate_at(self, epoch: float) -> float:
        """The learning rate during an epoch, counted from 0.

        >>> small = Recipe(data="digits", model="digits_net", epochs=10, batch=64, optimizer="sgd", rate=0.1,
        ...                drops=((5, 0.2),))
        >>> [round(small.rate_at(epoch), 3) for epoch in (0, 4, 5, 9)]
        [0.1, 0.1, 0.02, 0.02]
        """
        if self.cosine:
            return self.rate * 0.5 * (1 + cos(pi * min(epoch, self.epochs) / self.epochs))
        return self.rate * next((fraction for start, fraction in reversed(self.drops) if epoch >= start), 1.0)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser for a model; Adam in its fused form, whose step is four times as fast on a CPU."""
        if self.optimizer == "adam":
            fused = all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in model.parameters())
            return torch.optim.Adam(
                model.parameters(), lr=self.rate, weight_decay=self.weight_decay, fused=fused or None
            )
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                model.parameters(), lr=self.rate, momentum=self.momentum, nesterov=self.nesterov,
                weight_decay=self.weight_decay,
            )  # fmt: skip
        raise ValueError(f"optimizer must be sgd or adam, got {self.optimizer!r}")

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """`rate_at` as a scheduler that is stepped once an epoch."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: self.rate_at(epoch) / self.rate)

    def to_json(self) -> dict[str, Any]:
        """All settings, as JSON knows them."""
        return {**asdict(self), "drops": [list(drop) for drop in self.drops], "sparsities": list(self.sparsities)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_json` has written; an unknown or missing setting is an error."""
        if not isinstance(content, Mapping):
            raise TypeError(f"a recipe must be names and values, got {content!r}")
        known = {item.name for item in fields(cls)}
        if unknown := sorted(content.keys() - known):
            raise ValueError(f"a recipe has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}")
        if missing := sorted(known - content.keys()):
            raise ValueError(f"a recipe lacks the setting {missing[0]!r}")
        drops = tuple((float(epoch), float(fraction)) for epoch, fraction in content["drops"])
        recipe = cls(**{**content, "drops": drops, "sparsities": tuple(content["sparsities"])})
        recipe._check_kinds()
        return recipe

    def _check_kinds(self) -> None:
        """An error that names the first setting that is not of its kind."""
        numbers = (self.epochs, self.batch, self.rate, self.momentum, self.weight_decay, self.label_smoothing,
                   self.padding, self.width, *self.sparsities)  # fmt: skip
        counts = [each for each in (self.images, self.test_images) if each is not None]
        for value in (*numbers, *counts):
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                raise TypeError(f"a setting of a recipe must be a number, got {value!r}")
        for word in (self.data, self.model, self.optimizer):
            if not isinstance(word, str):
                raise TypeError(f"a setting of a recipe must be a word, got {word!r}")
        if not isinstance(self.knobs, Mapping):
            raise TypeError(f"the knobs of a recipe must be names and values, got {self.knobs!r}")


def scaled(
    recipe: Recipe,
    *,
    epochs: int | None = None,
    batch: int | None = None,
    width: float | None = None,
    images: int | None = None,
    test_images: int | None = None,
) -> Recipe:
    """A recipe for a smaller machine that keeps the proportions: drops, early epochs and IMP's cycles.

    >>> paper = Recipe(data="cifar10", model="vgg16", epochs=150, batch=128, optimizer="sgd", rate=0.01,
    ...                drops=((30, 0.2),), knobs={"drive": {"early_epochs": 5.0}})
    >>> small = scaled(paper, epochs=15)
    >>> small.drops, small.knobs
    (((3.0, 0.2),), {'drive': {'early_epochs': 0.5}})
    """
    epochs = recipe.epochs if epochs is None else checked("epochs", epochs, Count)
    given = {"batch": batch, "width": width, "images": images, "test_images": test_images}
    for name, value in given.items():
        if value is not None:
            checked(name, value, Positive if name == "width" else Count)
    factor = epochs / recipe.epochs
    knobs = {
        method: {name: value * factor if counts_epochs(name) else value for name, value in of.items()}
        for method, of in recipe.knobs.items()
    }
    return replace(
        recipe,
        epochs=epochs,
        drops=tuple((epoch * factor, fraction) for epoch, fraction in recipe.drops),
        knobs=knobs,
        batch=recipe.batch if batch is None else batch,
        width=recipe.width if width is None else width,
        images=recipe.images if images is None else images,
        test_images=recipe.test_images if test_images is None else test_images,
    )
