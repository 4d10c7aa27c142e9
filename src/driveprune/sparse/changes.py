"""Is a network still what its graph was made of? People hook, set and replace parts of networks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.modules.module as _everywhere
from torch import nn

from driveprune.frozen import OWN_NAMES, Reads, attribute, same
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.reasons import HOOKS


class Unchanged:
    """What a graph stands for, to be compared with what is there now: hooks, modules and attributes."""

    def __init__(self, net: nn.Module, reads: Reads, in_regions: Iterable[str]) -> None:
        """Remember a network as it is.

        Args:
            net: the network.
            reads: attributes that its code read, as they were.
            in_regions: the paths of modules that regions of the graph stand for.

        """
        known = dict(net.named_modules(remove_duplicate=False))
        inner = [(path, module) for path, module in known.items() if module is not net]
        self._hooks = [(path, getattr(module, name)) for path, module in inner for name in HOOKS]
        self._hook_lists = [hooks for _, hooks in self._hooks]
        self._inner = [module for _, module in inner]
        self._children = [(path, module._modules, dict(module._modules)) for path, module in known.items()]
        self._reads = [(known[path], name, before) for (path, name), before in reads.items() if path in known]
        layers = [path for path in in_regions if not isinstance(known[path], SparseLayer)]
        self._numbers = [(path, known[path], *_numbers(known[path])) for path in layers]

    def why_not(self) -> str | None:
        """What is another one now, in words; None if nothing is."""
        if any(self._hook_lists):
            path = next(path for path, hooks in self._hooks if hooks)
            return f"{path} has a hook"
        if _everywhere._global_forward_hooks or _everywhere._global_forward_pre_hooks:
            return "there is a hook for all modules"
        for path, children, before in self._children:
            if children != before:
                key = next(k for k in (*children, *before) if children.get(k) is not before.get(k))
                return f"{_joined(path, key)} is another module now"
        for path, module, names, values in self._numbers:
            own = module.__dict__
            if tuple(map(own.get, names)) != values:
                name = next(n for n, value in zip(names, values, strict=True) if own.get(n) != value)
                return f"{_joined(path, name)} is {own.get(name)!r} now"
        if any("forward" in module.__dict__ for module in self._inner):
            return "a module has another forward"
        for module, name, before in self._reads:
            if not same(before, attribute(module, name)):
                return f"the attribute {name} of {type(module).__name__} was changed"
        return None


def _numbers(module: nn.Module) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names of a layer's attributes that are plain data, and their values."""
    own, plain = vars(module), (bool, int, float, str, tuple, type(None))
    taken = OWN_NAMES | {"p", "inplace"}  # regions follow these
    names = tuple(name for name, value in own.items() if isinstance(value, plain) and name not in taken)
    return names, tuple(own[name] for name in names)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
