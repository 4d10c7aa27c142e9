"""Which variant of a method stands for it: the one with the recipe's knobs, whatever else was run beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isclose
from typing import Any

from driveprune import recipes
from driveprune.recipes import Recipe
from driveprune.report.paper import default_knobs

Knobs = Mapping[str, Any]


def recipe_of(spec: Mapping[str, Any]) -> tuple[str, Recipe] | None:
    """The recipe of this package that runs were made by, scaled as they are, with its name; None if by none of them.

    A spec does not say which it was: all settings are compared, but for data and model, which may be exchanged. One
    for the same data and model that differs in some setting is better than none.
    """
    wanted, found = spec["recipe"], []
    for name, recipe in _scaled(wanted["epochs"], wanted["width"], wanted["images"], wanted["test_images"]):
        plain = recipe.to_json()
        odd = {key for key in wanted if key not in {"knobs", "sparsities"} and plain[key] != wanted[key]}
        if odd.isdisjoint({"data", "model"}) or odd <= {"data", "model"}:
            found.append((len(odd), name, recipe))
    return min(found, key=lambda each: each[0])[1:] if found else None


@cache
def _scaled(epochs: int, width: float, images: int | None, test_images: int | None) -> list[tuple[str, Recipe]]:
    size = {"epochs": epochs, "width": width, "images": images, "test_images": test_images}
    try:
        return [(name, recipes.scaled(recipes.get(name), **size)) for name in recipes.names()]  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError):  # no number of epochs that a run can have
        return []


@dataclass(frozen=True)
class Wanted:
    """The knobs of a method as a recipe has them."""

    whose: str
    knobs: Knobs
    """All of them, defaults included."""
    own: tuple[str, ...] = ()
    """Those that the recipe itself says."""

    def odd(self, knobs: Knobs) -> list[str]:
        """The knobs that are not as the recipe has them."""
        return [name for name, value in self.knobs.items() if not _same(knobs.get(name), value)]


def wanted_knobs(spec: Mapping[str, Any], method: str) -> Wanted:
    """The knobs of a method in the recipe of some runs; its default ones if no recipe is known that made them."""
    recipe, defaults = recipe_of(spec), default_knobs(method) or {}
    if recipe is None:
        return Wanted("the defaults", defaults)
    name, own = recipe[0], recipe[1].knobs.get(method, {})
    return Wanted(f"recipe {name}", json.loads(json.dumps({**defaults, **own})), tuple(own))


def _same(one: Any, other: Any) -> bool:
    numbers = isinstance(one, float) and isinstance(other, float)
    return isclose(one, other, rel_tol=1e-9) if numbers else bool(one == other)


def described(spec: Mapping[str, Any]) -> str:
    """A variant by its knobs, and whether they are the recipe's.

    >>> from driveprune.recipes import get
    >>> demo = get("demo-digits")
    >>> described({"recipe": demo.to_json(), "method": "snip", "knobs": default_knobs("snip")})
    'snip (as in recipe demo-digits)'
    """
    wanted = wanted_knobs(spec, spec["method"])
    odd = wanted.odd(spec["knobs"])
    shown = dict.fromkeys([*wanted.own, *odd])
    said = ", ".join(f"{name} {_said(spec['knobs'].get(name))}" for name in shown)
    return f"{spec['method']} ({'not ' if odd else ''}as in {wanted.whose}{f': {said}' if said else ''})"


def _said(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
