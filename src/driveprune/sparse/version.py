"""Versions of tensors: what was made of weights is made again when they have changed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Steps:
    """Steps of all optimisers: fused ones, and those that write to `.data`, do not tell torch what they change."""

    count = 0

    @classmethod
    def add(cls, *_: Any) -> None:
        """One more."""
        if not torch.compiler.is_compiling():
            cls.count += 1


register_optimizer_step_post_hook(_Steps.add)


class Version:
    """What tensors were when they were read. Their memory is kept, so that no other tensor takes their addresses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._marks = _marks(tensors)
        self._held = [(tensor, tensor.detach()) for tensor in tensors]

    def __reduce__(self) -> tuple[Any, ...]:
        return Version, ((),)  # addresses say nothing about a copy

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, and unchanged."""
        return self._marks == _marks(tensors)


class VersionOfOne:
    """The version of one tensor: asked before each call of a layer."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._held = tensor, tensor.detach()
        try:
            self._mark: tuple[int, ...] = _Steps.count, tensor.data_ptr(), tensor._version
        except RuntimeError:  # a tensor made in inference mode
            self._mark = ()

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, and unchanged."""
        if not self._mark or self._tensor is not tensor:
            return False
        return self._mark == (_Steps.count, tensor.data_ptr(), tensor._version)


_writes = attrgetter("_version")


def _marks(tensors: Sequence[Tensor]) -> list[object]:
    """Which ones they are, where, and how often they were written to: asked before each inference, so it is fast."""
    try:
        return [_Steps.count, *(list(map(mark, tensors)) for mark in (id, Tensor.data_ptr, _writes))]
    except RuntimeError:  # of tensors made in inference mode, nobody knows
        return [object()]
