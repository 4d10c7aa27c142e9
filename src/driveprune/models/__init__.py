"""The networks of the paper in their forms for small images, and a small one for the demo."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from driveprune.kinds import brief
from driveprune.models.alexnet import alexnet
from driveprune.models.digits import digits_net
from driveprune.models.resnet import resnet18
from driveprune.models.vgg import vgg16

__all__ = ["alexnet", "build", "check", "digits_net", "names", "resnet18", "takes", "vgg16"]


def names() -> list[str]:
    """The models of this package.

    >>> names()
    ['alexnet', 'digits_net', 'resnet18', 'vgg16']
    """
    return [name for name in __all__ if name not in {"build", "check", "names", "takes"}]


def build(name: str, *, classes: int, width: float = 1.0, inputs: int = 3, size: int = 32) -> nn.Module:
    """A network by its name, or by the dotted name of a function of your own, for images of a kind.

    A function is given those of `classes`, `width`, `inputs` (channels) and `size` (pixels) that it has.
    """
    factory = check(name, width)
    wanted: dict[str, Any] = {"classes": classes, "width": width, "inputs": inputs, "size": size}
    known = inspect.signature(factory).parameters
    model = factory(**{key: value for key, value in wanted.items() if key in known})
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{name} has no parameters to train")
    return model


def check(name: str, width: float = 1.0) -> Callable[..., Any]:
    """The function that makes a network; an error if there is none, or if it makes none of this width."""
    factory = _factory(name)
    if not callable(factory):
        raise TypeError(f"{name} must be a function that makes a network, got {brief(factory)}")
    if "width" not in inspect.signature(factory).parameters and width != 1.0:
        raise ValueError(f"{name} cannot be scaled: it has no argument width")
    return factory  # type: ignore[no-any-return]


def takes(name: str, argument: str) -> bool:
    """Whether the function that makes a network has an argument of this name.

    >>> takes("vgg16", "classes"), takes("vgg16", "colour")
    (True, False)
    """
    return argument in inspect.signature(_factory(name)).parameters


def _factory(name: str) -> Any:
    return globals()[name] if name in names() else _own(name)


def _own(name: str) -> Any:
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and not module.startswith(error.name):
            raise
        raise ValueError(
            f"unknown model {name!r}; there are {', '.join(names())}, or package.module.function of your own"
        ) from None
