"""What a graph of a network would freeze: whatever the network's code draws, writes or reads anew at each call.

torch.fx and torch.export run the code of a network once, with stand-ins for its inputs. Random numbers that are drawn
meanwhile become constants of the graph, buffers and attributes that are written are written once and never again, and
attributes that are read keep the values that they had.
"""

from __future__ import annotations

import random
import types
from collections import deque
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
_OF_MODULES = frozenset(dir(nn.Module))
_NOTHING, _OF_CLASS = "nothing", "of the class"
_CONSTANT = "_tensor_constant"
"""How torch.fx calls tensors that code makes of numbers alone."""
_DEPTH = 5
"""How deep snapshots look into options within options."""
_LONG = 1000
"""Longer lists are compared by their length, for that is asked at each call."""
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
    now = _versions(net)
    written = next((name for name in {**tensors, **now} if tensors.get(name) != now.get(name)), None)
    if written is not None:
        raise FrozenError(f"its code writes into {written} at each call, which a graph would do once")
    for path, module in net.named_modules():
        changed = _changed(attributes.get(path, {}), _attributes(module))
        if changed is not None:
            raise FrozenError(f"its code changes {_joined(path, changed)} at each call, which a graph would do once")


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
    return _snapshot(value, _DEPTH)


def _snapshot(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return value, _version(value)
    if isinstance(value, _GENERATORS):
        return value, _state_of(value)
    if isinstance(value, dict | list | tuple | set | deque):
        if len(value) > _LONG or not depth:
            return value, len(value)
        if isinstance(value, dict):
            return {key: _snapshot(each, depth - 1) for key, each in value.items()}
        return type(value), [_snapshot(each, depth - 1) for each in value]
    known = isinstance(value, nn.Module | types.ModuleType | types.FunctionType | types.MethodType)
    if known or not depth or type(value).__module__ in ("builtins", "torch", "numpy"):
        return _own_numbers(value) if isinstance(value, type) and depth else value
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    inside = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return value, {name: _snapshot(each, depth - 1) for name, each in inside.items()}


def _own_numbers(kind: type) -> Any:
    """A class that serves as a record of options."""
    return kind, {name: each for name, each in vars(kind).items() if isinstance(each, bool | int | float | str)}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()
    return repr(state)


def is_still(before: Any, value: Any) -> bool:
    """Whether a value is what it was when `snapshot` looked at it."""
    return same(before, snapshot(value))


def same(before: Any, after: Any) -> bool:
    """Whether two snapshots are equal."""
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
        mine = object.__getattribute__(self, "__dict__")
        known = name in OWN_NAMES or (name in _OF_MODULES and name not in mine)
        if not known and (path, name) not in reads:
            reads[path, name] = _of(self, own, name)
        return own.__getattribute__(self, name)

    content = {"__getattribute__": read, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return types.new_class(own.__name__, (own,), {}, lambda space: space.update(content))


def attribute(module: nn.Module, name: str) -> Any:
    """What a module has under a name, as it is now."""
    return _of(module, type(module), name)


def _of(module: Any, own: Any, name: str) -> Any:
    """An attribute as data; of methods, properties and parts of the network only that they are there."""
    mine: dict[str, Any] = object.__getattribute__(module, "__dict__")
    if name in mine:
        return snapshot(mine[name])
    for known in ("_parameters", "_buffers", "_modules"):
        if name in mine[known]:
            return (known, mine[known][name] is None)
    found = next((vars(kind)[name] for kind in own.__mro__ if name in vars(kind)), _NOTHING)
    return _OF_CLASS if hasattr(found, "__get__") else snapshot(found)


def _random_states() -> dict[str, Any]:
    """Where the generators of all are."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tobytes(), *rest),
    }


def _versions(net: nn.Module) -> dict[str, tuple[int, int, bytes]]:
    """For each parameter and buffer, which tensor it is, how often it was written into, and small ones' bytes."""
    tensors = dict((*net.named_parameters(), *net.named_buffers()))
    buffers = {name for name, each in net.named_buffers() if isinstance(each, Tensor) and each.numel() <= _LONG}
    return {
        name: (id(each), _version(each), _bytes(each) if name in buffers else b"")
        for name, each in tensors.items()
        if isinstance(each, Tensor)  # what stands for one in a graph is a change
    }


def _bytes(buffer: Tensor) -> bytes:
    plain = buffer.detach().cpu()
    return torch.view_as_real(plain).numpy().tobytes() if plain.is_complex() else plain.float().numpy().tobytes()


def _version(tensor: Tensor) -> int:
    """How often a tensor was written into, as far as torch counts it."""
    return -1 if tensor.is_inference() else tensor._version


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module has of its own, as they are now."""
    own = vars(module).items()
    return {n: snapshot(value) for n, value in own if n not in OWN_NAMES and not n.startswith(_CONSTANT)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """An attribute that is another one now."""
    names = (*after, *before)
    return next((n for n in names if n not in before or n not in after or not same(before[n], after[n])), None)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Part(nn.Module):
    """A part of a network that became a graph: what the network's code read of it cannot be changed any more."""

    def __setattr__(self, name: str, value: Any) -> None:
        check_settable(self, name)
        super().__setattr__(name, value)

    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        """An error: a graph calls layers, not the blocks that they were in."""
        raise RuntimeError("this block is only the place of layers that a graph calls: hook these, or the network")

    register_forward_pre_hook = register_forward_hook
    register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook


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
        if path and type(module) is not nn.Module:
            continue
        present = {*module._parameters, *module._buffers, *module._modules}
        module.__dict__["_frozen"] = {name for where, name in reads if where == path} - present
        if path:
            object.__setattr__(module, "__class__", Part)


def kind_of(value: Any) -> str:
    """What code may ask of an input that it may be given or not."""
    if isinstance(value, Tensor):
        return "a tensor"
    return "a number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def of_kind(value: Any, name: str, wanted: str) -> None:
    """An operation of graphs: an error for an input that is of another kind than in the example."""
    if kind_of(value) != wanted:
        raise ValueError(
            f"{name} was {wanted} in the example that this network was made with, and is {kind_of(value)} now: make "
            "it with an example of this kind"
        )


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
