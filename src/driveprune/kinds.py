"""What options must be: a signature says of what kind a value is and in which range, and one function checks it.

The kind is the annotation: `bool`, `int`, `float`, `str`, a `Literal`, a sequence of words, a union of these; a
`Range` in an `Annotated` says what numbers are possible. Where a signature says nothing, the default does.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import inf, isfinite
from numbers import Integral, Real
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor, nn


class OptionError(ValueError, TypeError):
    """An option has a value that it cannot have: one of another kind, or out of its range."""


@dataclass(frozen=True)
class Range:
    """The numbers that an option can be: from `low` to `high`, or above `low` if that is `open`."""

    low: float = -inf
    high: float = inf
    open: bool = False

    def has(self, value: float) -> bool:
        """Whether a number lies in it."""
        return (self.low < value if self.open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high < inf:
            return f" from {self.low:g} to {self.high:g}"
        return "" if self.low == -inf else f" above {self.low:g}" if self.open else f" of at least {self.low:g}"


LATER = "left out of the id of a run while it has its default: it came when there were runs already"
"""Marks a knob in an `Annotated`."""

Flag = bool
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Amount = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, open=True)]
Fraction = Annotated[float, Range(0, 1)]
Mode = Annotated[Literal["training", "evaluation"], LATER]
"""How a model is scored: as in training, or as in evaluation, with its running statistics."""
Window = Annotated[float, Range(0), LATER]
"""Epochs from the first cut to the last."""
PathName = Annotated[Literal["exponential", "cubic"], LATER]
"""Which of the paths in `driveprune.schedule`."""


def checked(name: str, value: Any, kind: Any) -> Any:
    """A value of an option as plain Python has it, or an error that says what it must be.

    >>> checked("cuts", np.int64(3), Count)
    3
    >>> checked("cuts", 2.5, Count)
    Traceback (most recent call last):
    driveprune.kinds.OptionError: cuts must be a whole number, got 2.5
    """
    kinds, bounds = _parts(kind)
    found = [plain for each in kinds if (plain := _plain(value, each)) is not _NOT]
    if not found:
        raise OptionError(f"{name} must be {' or '.join(dict.fromkeys(map(_words, kinds)))}, got {brief(value)}")
    plain = found[0]
    if (
        bounds is not None
        and isinstance(plain, int | float)
        and not isinstance(plain, bool)
        and not bounds.has(plain)
    ):
        kind = next(each for each in kinds if each in (int, float))
        raise OptionError(f"{name} must be {_words(kind)}{bounds}, got {value!r}")
    return plain


_NOT = object()


def _parts(kind: Any) -> tuple[list[Any], Range | None]:
    """The kinds that an annotation allows, and the range of its numbers."""
    if get_origin(kind) is Annotated:
        inner, *facts = get_args(kind)
        kinds, bounds = _parts(inner)
        return kinds, next((fact for fact in facts if isinstance(fact, Range)), bounds)
    if get_origin(kind) in (Union, UnionType):
        parts = [_parts(each) for each in get_args(kind)]
        return [one for kinds, _ in parts for one in kinds], next((b for _, b in parts if b is not None), None)
    return [kind], None


def _plain(value: Any, kind: Any) -> Any:
    """A value of a kind as plain Python has it; `_NOT` if it is not of that kind."""
    if get_origin(kind) is Literal:
        return value if isinstance(value, str) and value in get_args(kind) else _NOT
    if get_origin(kind) is not None and _is_sequence(kind):
        listed = not isinstance(value, str | bytes) and isinstance(value, Sequence)
        return value if listed and all(_fits(each, kind) for each in value) else _NOT
    check = _CHECKS.get(kind)
    return value if check is None else check(value)


def _is_sequence(kind: Any) -> bool:
    return isinstance(origin := get_origin(kind), type) and issubclass(origin, Sequence)


def _fits(value: Any, kind: Any) -> bool:
    element = next((each for each in get_args(kind) if each is not Ellipsis), Any)
    return _plain(value, element) is not _NOT


def _scalar(value: Any) -> Any:
    """The one number in a tensor or array without dimensions; anything else as it is."""
    return value.item() if isinstance(value, Tensor | np.ndarray) and value.ndim == 0 else value


def _flag(value: Any) -> Any:
    value = _scalar(value)
    return bool(value) if isinstance(value, bool | np.bool_) else _NOT


def _whole(value: Any) -> Any:
    value = _scalar(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool | np.bool_) else _NOT


def _number(value: Any) -> Any:
    value = _scalar(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    return float(value) if is_number and isfinite(value) else _NOT


def _word(value: Any) -> Any:
    return value if isinstance(value, str) else _NOT


def _list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else _NOT


def _nothing(value: Any) -> Any:
    return None if value is None else _NOT


_CHECKS: dict[Any, Callable[[Any], Any]] = {
    bool: _flag, int: _whole, float: _number, str: _word, list: _list, tuple: _list, NoneType: _nothing,
    None: _nothing,
}  # fmt: skip
_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list", tuple: "a list",
    NoneType: "None", None: "None",
}  # fmt: skip


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) is not None and _is_sequence(kind):
        return "a list"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def brief(value: Any) -> str:
    """A value in an error: short, and without the insides of a network or a tensor."""
    if isinstance(value, nn.Module | Tensor | Mapping) or len(text := repr(value)) > 80:
        return f"a {type(value).__name__}"
    return text


def check_path(path: Any, call: str) -> None:
    """An error if this is no path of a file; `call` is how the caller is called."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"path must be the name of a file, got {brief(path)} (the order is {call})")


def kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What each keyword-only argument of a function must be: its annotation, else the type of its default."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # annotations of the user's own that cannot be evaluated here
        hints = {}
    kinds = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            default = type(parameter.default)
            kinds[parameter.name] = hints.get(
                parameter.name, default if default in _CHECKS and default is not NoneType else Any
            )
    return kinds


def kinds_of_fields(kind: type) -> dict[str, Any]:
    """What each field of a dataclass must be."""
    return get_type_hints(kind, include_extras=True)


def others(value: Any, kind: Any) -> list[Any]:
    """Other values that an option of this kind could have, to see what they would change."""
    kinds, bounds = _parts(kind)
    found: list[Any] = []
    for each in kinds:
        if get_origin(each) is Literal:
            found += get_args(each)
        elif each is bool:
            found += [True, False]
        elif each in (int, float):
            number = value if isinstance(value, int | float) and not isinstance(value, bool) else 1
            found += [each(n) for n in (number + 1, 2 * number, number - 1, number / 2, 1) if each(n) == n]
        elif (each in (list, tuple) or _is_sequence(each)) and isinstance(value, Sequence):
            found += [tuple(value[:1]), tuple(value[:-1]), tuple(value[1:])]
    possible = [each for each in found if each != value and (bounds is None or bounds.has(each))]
    return list({repr(each): each for each in possible}.values())


def same(one: Any, other: Any) -> bool:
    """Whether two values are alike, functions too: made by the same code from the same values."""
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if isinstance(one, tuple | list) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if is_dataclass(one) and type(one) is type(other):
        return all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    if inspect.isfunction(one) and inspect.isfunction(other):
        return one.__code__ is other.__code__ and same(_insides(one), _insides(other))
    return one is other or (type(one) is type(other) and _equal(one, other))


def _insides(function: Any) -> tuple[Any, ...]:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return cells, function.__defaults__, function.__kwdefaults__


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # values that cannot be compared as a whole, such as tensors
        return False


def qualified(function: Any) -> str:
    """The name of a function, with the values that a partial one was given, for people and for provenance.

    >>> qualified(functools.partial(checked, kind=int))
    'driveprune.kinds.checked(kind=int)'
    """
    if isinstance(function, functools.partial):
        given = [*map(_value, function.args), *(f"{name}={_value(v)}" for name, v in function.keywords.items())]
        return f"{qualified(function.func)}({', '.join(given)})" if given else qualified(function.func)
    if isinstance(function, ModuleType):
        return function.__name__
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"{getattr(function, '__module__', None) or ''}.{function.__qualname__}".lstrip(".")


def _value(value: Any) -> str:
    if value is None or isinstance(value, str | int | float | tuple | list):
        return repr(value)
    return qualified(value).removeprefix("builtins.")
