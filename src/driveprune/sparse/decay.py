"""Warns of optimisers that choose by the number of dimensions, which the kept values do not have."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from driveprune.sparse.reasons import SparseWarning

_values: Any = WeakTensorKeyDictionary()
"""The parameters of sparse layers."""
_seen: WeakSet[Optimizer] = WeakSet()


def known_as_values(parameter: Tensor) -> None:
    """Remember that a parameter has the kept values of a weight, all in one dimension."""
    _values[parameter] = True


def misses_decay(optimizer: Optimizer) -> bool:
    """Whether an optimiser has groups with and without weight decay, and all kept values are in those without."""
    decays = [bool(group.get("weight_decay")) for group in optimizer.param_groups]
    if all(decays) or not any(decays):
        return False
    of_values = [
        decay
        for decay, group in zip(decays, optimizer.param_groups, strict=True)
        for parameter in group["params"]
        if parameter in _values
    ]
    return bool(of_values) and not any(of_values)


def _look(optimizer: Optimizer, *_: Any) -> None:
    """Once for each optimiser, before its first step."""
    if torch.compiler.is_compiling() or optimizer in _seen:
        return
    _seen.add(optimizer)
    if misses_decay(optimizer):
        warnings.warn(
            "no weight of a sparse layer decays: the optimiser has them all in a group without weight decay. Kept "
            "values are parameters of one dimension, so a rule like p.dim() >= 2 does not see them. Make the "
            "optimiser for the ordinary network and hand it over: sparsify(model, mask, example, optimizer)",
            SparseWarning,
            stacklevel=2,
        )


register_optimizer_step_pre_hook(_look)
