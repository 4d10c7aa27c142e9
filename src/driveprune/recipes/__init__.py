"""Recipes: published settings as functions that return a complete `Recipe`.

One file is one set (paper, strong, small, demo), one function in it is one recipe; its name is the set's and the
function's, as in `paper-resnet18-cifar10`. A recipe of your own is a function anywhere: `package.module.function`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable

from driveprune.recipes.recipe import Recipe, scaled

__all__ = ["Recipe", "describe", "find", "get", "names", "scaled"]


def names() -> list[str]:
    """All recipes of this package.

    >>> "paper-vgg16-cifar10" in names()
    True
    """
    return list(_functions())


def get(name: str) -> Recipe:
    """A recipe by its name."""
    recipe = _function(name)()
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{name} must return a Recipe, got {type(recipe).__name__}")
    return recipe


def describe(name: str) -> str:
    """What a recipe is, in one line."""
    return (inspect.getdoc(_function(name)) or "").partition("\n")[0]


def find(data: str, model: str | None = None, kind: str | None = None) -> Recipe:
    """The recipe for a data set and a model (None: the first one), of a set: paper, strong, small or demo.

    Without a set, the paper's if there is one.

    >>> find("cifar10", "vgg16") == get("paper-vgg16-cifar10")
    True
    """
    for wanted in ("paper", "strong", "demo") if kind is None else (kind,):
        for name, function in _functions().items():
            recipe = function()
            if name.startswith(f"{wanted}-") and recipe.data == data and model in {None, recipe.model}:
                return recipe
    choices = [name for name, function in _functions().items() if function().data == data] or names()
    what = f"{f'{kind} ' if kind else ''}recipe for {data if model is None else f'{model} on {data}'}"
    raise ValueError(f"there is no {what}; there are {', '.join(choices)}")


def _functions() -> dict[str, Callable[[], Recipe]]:
    found: dict[str, Callable[[], Recipe]] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "recipe":
            members = inspect.getmembers(importlib.import_module(f"{__name__}.{module.name}"), inspect.isfunction)
            own = [(name, f) for name, f in members if f.__module__ == f"{__name__}.{module.name}" and name[0] != "_"]
            found |= {f"{module.name}-{name.replace('_', '-')}": function for name, function in own}
    return found


def _function(name: str) -> Callable[[], Recipe]:
    known = _functions()
    if name in known:
        return known[name]
    module, _, function = name.rpartition(".")
    try:
        found: Callable[[], Recipe] = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError, ValueError):
        raise ValueError(
            f"unknown recipe {name!r}; there are {', '.join(known)}, or a function of your own"
        ) from None
    return found
