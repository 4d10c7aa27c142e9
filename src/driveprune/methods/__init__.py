"""The methods, one file each: `score()` says which weights matter, `plan()` says what happens when.

The name of the file is the name of the method, and the keyword-only arguments of its `plan` are its knobs. A
method of your own works wherever a name does: a module with a `plan` (or only a `score`), its dotted name, or a
score function.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

from driveprune.kinds import LATER, OptionError, brief, checked, kinds_of, others, qualified, same
from driveprune.plan import Plan, Prune, Score, Train, check_length, counts_epochs

Method = str | ModuleType | Score | Plan
PlanFunction = Callable[..., Plan]
"""(sparsity, steps, steps_per_epoch, *, knobs) -> plan."""


def names() -> list[str]:
    """The methods of this package.

    >>> names()
    ['drive', 'driveflow', 'erk', 'force', 'gmp', 'grasp', 'imp', 'magnitude', 'random', 'snip', 'synflow']
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def knobs(method: Method) -> dict[str, Any]:
    """The knobs of a method with their defaults.

    >>> knobs("synflow")
    {'early_epochs': 0.0, 'cuts': 100, 'window': 0.0, 'path': 'exponential'}
    """
    parameters = inspect.signature(_plan_function(method)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def kinds(method: Method) -> dict[str, Any]:
    """What each knob of a method must be, by the annotations of its plan."""
    return kinds_of(_plan_function(method))


def check_knobs(method: Method, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The knobs that are given, as plain Python has them, or an error that names the first impossible one."""
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"knobs must be names and values, such as {{'cuts': 10}}, got {brief(given)}")
    if isinstance(method, list):
        if given:
            raise ValueError(f"a plan of your own has no knobs, got {', '.join(map(str, given))}")
        return {}
    known = kinds(method)
    for name in given or {}:
        if name not in known:
            raise ValueError(
                f"{describe(method)} has no knob {name!r}; it has {', '.join(known) if known else 'none'}"
            )
    return {name: checked(name, value, known[name]) for name, value in (given or {}).items()}


def make_plan(
    method: Method, sparsity: float, steps: int, steps_per_epoch: int, given: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a method for a training of `steps` steps."""
    values = check_knobs(method, given)
    if isinstance(method, list):
        return check_own(method)
    plan = _plan_function(method)(sparsity, steps, steps_per_epoch, **values)
    if steps:
        epochs = {name: value for name, value in {**knobs(method), **values}.items() if counts_epochs(name)}
        check_length(plan, steps, steps_per_epoch, epochs)
    return plan


def check_own(plan: Plan) -> Plan:
    """A plan of the user's own, or an error that says what does not belong into one."""
    for phase in plan:
        if not isinstance(phase, get_args(get_args(Plan)[0])):
            raise OptionError(
                "a plan is a list of driveprune.Train, Prune, Rewind, Shuffle and Reinit, and one of its phases is "
                f"{brief(phase)}"
            )
    if not plan:
        raise OptionError("a plan of your own needs at least one phase, got an empty list")
    return plan


def acting(method: Method, make: Callable[[dict[str, Any]], object], given: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs that decide what `make` makes of them: with another value it would make something else."""
    if isinstance(method, list):
        return {}
    values, known = {**knobs(method), **given}, kinds(method)
    made, defaults = make(values), knobs(method)
    tried = {name: [*others(value, known[name]), defaults[name]] for name, value in values.items()}
    return {name: value for name, value in values.items() if _matters(name, values, tried[name], made, make)}


def _matters(
    name: str, values: Mapping[str, Any], tried: list[Any], made: object, make: Callable[[dict[str, Any]], object]
) -> bool:
    tried = [other for other in tried if not same(other, values[name])]
    for other in tried:
        try:
            if not same(made, make({**values, name: other})):
                return True
        except ValueError:  # impossible beside the other knobs
            continue
    return not tried


def came_later(method: Method, name: str) -> bool:
    """Whether a knob is newer than the first runs of its method, whose ids do not know it."""
    kind = kinds(method)[name]
    return get_origin(kind) is Annotated and LATER in get_args(kind)


def describe(method: Method) -> str:
    """A method's name, for people and for provenance."""
    if isinstance(method, str):
        return method
    return "a plan of its own" if isinstance(method, list) else _bare(qualified(method))


def _bare(name: str) -> str:
    """A name without the values of a partial function."""
    return name.partition("(")[0]


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
    raise TypeError(f"method must be a name, a module, a score function or a plan, got {method!r}")


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
