"""The methods, one file each: `score()` says which weights matter, `plan()` says what happens when.

The name of the file is the name of the method, and the keyword-only arguments of its `plan` are its knobs. A
method of your own works wherever a name does: a module with a `plan` (or only a `score`), its dotted name, or a
score function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from driveprune.plan import Plan, Prune, Score, Train

Method = str | ModuleType | Score | Plan
PlanFunction = Callable[..., Plan]
"""(sparsity, steps, steps_per_epoch, *, knobs) -> plan."""


def names() -> list[str]:
    """The methods of this package.

    >>> names()
    ['drive', 'erk', 'force', 'gmp', 'grasp', 'imp', 'magnitude', 'random', 'snip', 'synflow']
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def knobs(method: Method) -> dict[str, Any]:
    """The knobs of a method with their defaults.

    >>> knobs("synflow")
    {'early_epochs': 0.0, 'cuts': 100}
    """
    parameters = inspect.signature(_plan_function(method)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def make_plan(
    method: Method, sparsity: float, steps: int, steps_per_epoch: int, given: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a method for a training of `steps` steps."""
    if isinstance(method, list):
        if given:
            raise ValueError(f"a plan of your own has no knobs, got {', '.join(given)}")
        return method
    known = knobs(method)
    for name in given or {}:
        if name not in known:
            raise ValueError(
                f"{describe(method)} has no knob {name!r}; it has {', '.join(known) if known else 'none'}"
            )
    return _plan_function(method)(sparsity, steps, steps_per_epoch, **(given or {}))


def describe(method: Method) -> str:
    """A method's name, for people and for provenance."""
    if isinstance(method, str):
        return method
    if isinstance(method, list):
        return "a plan of its own"
    if isinstance(method, functools.partial):
        return describe(method.func)
    name = getattr(method, "__qualname__", method.__name__ if isinstance(method, ModuleType) else repr(method))
    return name if isinstance(method, ModuleType) else f"{getattr(method, '__module__', '')}.{name}".lstrip(".")


def _plan_function(method: Method) -> PlanFunction:
    found = _load(method) if isinstance(method, str) else method
    if isinstance(found, ModuleType):
        if hasattr(found, "plan"):
            return found.plan  # type: ignore[no-any-return]
        if hasattr(found, "score"):
            return _one_cut(found.score)
        raise ValueError(f"the module {found.__name__} has neither a plan nor a score function")
    if callable(found):
        return _one_cut(found)
    raise TypeError(f"method must be a name, a module or a score function, got {method!r}")


def _one_cut(score: Score) -> PlanFunction:
    def plan(sparsity: float, steps: int, steps_per_epoch: int) -> Plan:
        return [Prune(score, (sparsity,)), Train(steps)]

    return plan


def _load(name: str) -> Any:
    if name in names():
        return importlib.import_module(f"{__name__}.{name}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError, ValueError):
        raise ValueError(
            f"unknown method {name!r}; there are {', '.join(names())}, or a module or function of your own"
        ) from None
