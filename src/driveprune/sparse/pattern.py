"""Which mask a state belongs to: a hash of each layer's pattern beside its values, compared before it is loaded.

For a masked parameter NAME, `state_dict` has `NAME_pattern`, 64 bytes. The same kept values at other places are
another network, and nothing in their names or their number would tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from driveprune.hold import keep_zero
from driveprune.mask import owners

_ENDING = "_pattern"
_ROUNDING = 0.02
"""Patterns that differ by no more are one, rounded."""


def watch(net: nn.Module, mask: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Put patterns into the states of a network and of its parts, and compare them when one is loaded.

    Copies of the network hold zero what is `held`: of what `hold` does, they would know nothing.
    """
    modules = {id(module): (prefix, module) for prefix, module in reversed(list(owners(net)))}
    names = {
        parameter: prefix + leaf
        for prefix, module in modules.values()
        for leaf, parameter in module._parameters.items()
        if parameter is not None and prefix + leaf in mask
    }
    for _, module in modules.values():
        for leaf, parameter in module._parameters.items():
            if parameter is None or parameter not in names:
                continue
            name = names[parameter]
            module.register_state_dict_post_hook(_Pattern(leaf, pattern(mask[name])))  # type: ignore[no-untyped-call]
            if name in held:
                zeros = _Zeros(leaf, parameter, mask[name])
                module.register_load_state_dict_post_hook(zeros)  # type: ignore[no-untyped-call]
    for module in net.modules():
        if next(_patterns(module), None) is not None:
            module.register_load_state_dict_pre_hook(_check)  # type: ignore[no-untyped-call]


def pattern(kept: Tensor) -> Tensor:
    """The hash of a mask: of its shape, and of what is kept, in the order of logical indices.

    As a direction: states are averaged, scaled and rounded by people, all their tensors alike.
    """
    packed = np.packbits(kept.detach().cpu().contiguous().numpy())
    digest = hashlib.sha512(repr(tuple(kept.shape)).encode() + packed.tobytes()).digest()
    return torch.from_numpy(np.frombuffer(digest, "<i4") / np.float32(2**31)).float()


class _Pattern:
    """Adds a parameter's pattern to the state of its module."""

    def __init__(self, leaf: str, value: Tensor) -> None:
        self.leaf, self.value = leaf, value

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + self.leaf + _ENDING] = self.value.clone()


def _patterns(module: nn.Module) -> Iterator[tuple[str, _Pattern]]:
    """All patterns in a module, with the paths of those that have them."""
    for path, part in module.named_modules(remove_duplicate=False):
        for hook in part._state_dict_hooks.values():
            if isinstance(hook, _Pattern):
                yield f"{path}." if path else "", hook


def _check(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module is loaded: an error if a pattern is another one, in it or in one of its parts."""
    for path, each in _patterns(module):
        name = prefix + path + each.leaf
        if name not in state:
            continue
        found = state.get(name + _ENDING)
        if found is None:
            raise RuntimeError(
                f"the state has no {name}{_ENDING}, which says to what mask {name} belongs: it is an ordinary "
                "network's, to be loaded into the model before sparsify, or one of an older version. If you know "
                "that it was saved with the mask of this network, load "
                "{**fast.state_dict(), **state}. Nothing was loaded"
            )
        if not _same(found, each.value):
            raise RuntimeError(
                f"the state belongs to another mask: {name} keeps other places here. Make the network by "
                "sparsify(model, mask, example) with the mask that the state was saved with, then load it; or go "
                "over the ordinary network: densify there, dp.save, dp.load. Nothing was loaded"
            )
    for path, each in _patterns(module):
        if not path:
            state.pop(prefix + each.leaf + _ENDING, None)  # torch would not know it


def _same(found: Any, value: Tensor) -> bool:
    """Whether what a state has is this pattern, up to a factor."""
    if not isinstance(found, Tensor) or found.shape != value.shape:
        return False
    other, largest = found.detach().cpu().double(), value.abs().argmax()
    return bool(torch.allclose(other / other[largest], value.double() / value[largest], rtol=0, atol=_ROUNDING))


class _Zeros:
    """Asleep in the module that has a held parameter; awake in its copies, where it keeps removed weights at zero."""

    def __init__(self, leaf: str, parameter: nn.Parameter, kept: Tensor, *, awake: bool = False) -> None:
        self._leaf, self._parameter, self._kept = leaf, parameter, kept
        self._loaded = keep_zero(parameter, kept) if awake else None

    def __call__(self, module: nn.Module, _: Any) -> None:
        """After a state was loaded."""
        parameter = module._parameters.get(self._leaf)
        if parameter is not None:
            self._parameter = parameter  # another one, if it was loaded with assign=True
            if self._loaded is not None:
                self._loaded(parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        return _awake, (self._leaf, self._parameter, self._kept)


def _awake(leaf: str, parameter: nn.Parameter, kept: Tensor) -> _Zeros:
    return _Zeros(leaf, parameter, kept, awake=True)
