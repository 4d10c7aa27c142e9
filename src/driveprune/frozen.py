"""What a graph of a network would freeze: whatever the network's code draws, writes or reads anew at each call.

torch.fx and torch.export run the code of a network once, with stand-ins for its inputs. Random numbers that are drawn
meanwhile become constants of the graph, buffers and attributes that are written are written once and never again, and
attributes that are read keep the values that they had.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Reads = dict[tuple[str, str], Any]
"""(path of a module, name of its attribute) -> what the attribute was, see `snapshot`."""

OWN_NAMES = frozenset(vars(nn.Module()))
"""What every module has: its parameters, its hooks, its mode."""
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class FrozenError(ValueError):
    """A graph would freeze something that the network's code does anew at each call."""


@contextmanager
def watched(net: nn.Module, leaves: tuple[type[nn.Module], ...] = ()) -> Iterator[Reads]:
    """Watch the code of a network while a graph is made of it; an error if something would be frozen.

    What its modules' attributes are when they are read goes into the dictionary that it gives: these are frozen
    rightly, for as long as nobody changes them. Modules of the classes `leaves` are not run while the graph is made.
    """
    reads: Reads = {}
    random_before, tensors = _random_states(), _versions(net)
    attributes = {path: _attributes(module) for path, module in net.named_modules()}
    swapped = _record(net, reads, leaves)
    try:
        yield reads
    finally:
        for module, own in swapped:
            object.__setattr__(module, "__class__", own)
    drawn = next((name for name, state in _random_states().items() if random_before[name] != state), None)
    if drawn is not None:
        raise FrozenError(f"its code draws random numbers of {drawn}, which a graph would draw once and for all")
    for (path, name), value in reads.items():
        if isinstance(value, _GENERATORS):
            raise FrozenError(f"its code uses {_joined(path, name)}, a generator of random numbers")
    written = next((name for name, version in _versions(net).items() if tensors.get(name) != version), None)
    if written is not None:
        raise FrozenError(f"its code writes into {written} at each call, which a graph would do once")
    for path, module in net.named_modules():
        changed = _changed(attributes.get(path, {}), _attributes(module))
        if changed is not None:
            raise FrozenError(f"its code sets {_joined(path, changed)} at each call, which a graph would do once")


def snapshot(value: Any) -> Any:
    """A value as it is now, to be compared with what it is later, by `is_still`.

    >>> sizes = [1, 2]
    >>> before = snapshot(sizes)
    >>> is_still(before, sizes)
    True
    >>> sizes.append(3)
    >>> is_still(before, sizes)
    False
    """
    if isinstance(value, dict):
        return {key: snapshot(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value), [snapshot(each) for each in value]
    if isinstance(value, Tensor):
        return value, _version(value)
    known = isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType)
    if not known and type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        return value, dict(vars(value))
    return value


def is_still(before: Any, value: Any) -> bool:
    """Whether a value is what it was when `snapshot` looked at it."""
    return _same(before, snapshot(value))


def _same(before: Any, after: Any) -> bool:
    try:
        return before is after or bool(before == after)
    except (RuntimeError, ValueError, TypeError):  # other tensors or arrays, which say for each entry if it is equal
        return False


def _record(net: nn.Module, reads: Reads, leaves: tuple[type[nn.Module], ...]) -> list[tuple[nn.Module, type]]:
    """Let modules whose code is not torch's write down which attributes are read; the modules and their classes."""
    swapped = []
    for path, module in net.named_modules():
        own = type(module)
        if not own.__module__.startswith("torch.") and not isinstance(module, leaves):
            object.__setattr__(module, "__class__", _recording(own, path, reads))
            swapped.append((module, own))
    return swapped


def _recording(own: Any, path: str, reads: Reads) -> type:
    """A class like another one, whose instance writes down what is read of it."""

    def read(self: Any, name: str) -> Any:
        value = own.__getattribute__(self, name)
        if name not in OWN_NAMES and name[:2] != "__" and (path, name) not in reads and _is_plain(self, own, name):
            reads[path, name] = snapshot(value) if not isinstance(value, _GENERATORS) else value
        return value

    content = {"__getattribute__": read, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return types.new_class(own.__name__, (own,), {}, lambda space: space.update(content))


def _is_plain(module: Any, own: type, name: str) -> bool:
    """Whether an attribute is data: no method, no property."""
    if name in object.__getattribute__(module, "__dict__"):
        return True
    found = next((vars(kind)[name] for kind in own.__mro__ if name in vars(kind)), None)
    return found is not None and not hasattr(found, "__get__")


def _random_states() -> dict[str, Any]:
    """Where the generators of all are."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tobytes(), *rest),
    }


def _versions(net: nn.Module) -> dict[str, tuple[int, int]]:
    """For each parameter and buffer, which tensor it is, and how often it was written into."""
    tensors = (*net.named_parameters(), *net.named_buffers())
    return {name: (id(tensor), _version(tensor)) for name, tensor in tensors}


def _version(tensor: Tensor) -> int:
    """How often a tensor was written into, as far as torch counts it."""
    return -1 if tensor.is_inference() else tensor._version


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module has of its own, as they are now."""
    return {name: snapshot(value) for name, value in vars(module).items() if name not in OWN_NAMES}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """An attribute that is another one now."""
    names = (*after, *before)
    return next((n for n in names if n not in before or n not in after or not _same(before[n], after[n])), None)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Part(nn.Module):
    """A part of a network that became a graph: what the network's code read of it cannot be changed any more."""

    def __setattr__(self, name: str, value: Any) -> None:
        check_settable(self, name)
        super().__setattr__(name, value)


def check_settable(module: nn.Module, name: str) -> None:
    """An error for an attribute that a graph has read: another value would have no effect."""
    if name in module.__dict__.get("_frozen", ()):
        raise AttributeError(
            f"{name} was read when this network was made, so another value would have no effect: set it on the "
            "network that it was made from, and make it again"
        )


def lock(net: nn.Module, reads: Reads) -> None:
    """Make it an error to set what the code of the network behind a graph has read."""
    for path, module in net.named_modules():
        names = {name for where, name in reads if where == path}
        if names and (path == "" or type(module) is nn.Module):
            module.__dict__["_frozen"] = names
            if path:
                object.__setattr__(module, "__class__", Part)


def as_followed(value: Any, name: str, wanted: Any) -> None:
    """An operation of graphs: an error for an input that decides what the code does, and decides otherwise now."""
    if not is_as_followed(value, wanted):
        raise ValueError(
            f"{name} was {wanted!r} in the example that this network was made with, and is "
            f"{'a tensor' if isinstance(value, Tensor) else repr(value)} now: make it with an example of this kind"
        )


def of_rows(value: Tensor, name: str, wanted: int) -> None:
    """An operation of graphs: an error for an input of another length, where the code decides by it."""
    if len(value) != wanted:
        raise ValueError(
            f"{name} has {len(value)} rows, but the code of this network decides by their number, and was followed "
            f"for {wanted}: make it with an example of this size"
        )


def is_as_followed(value: Any, wanted: Any) -> bool:
    """Whether an input decides what one did that was None, a flag or a text."""
    return value is wanted or (type(value) is type(wanted) and bool(value == wanted))
