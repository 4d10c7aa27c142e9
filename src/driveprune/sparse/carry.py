"""An optimiser with all that it has gathered, for other parameters that stand for the same weights."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer


@dataclass(frozen=True)
class Successor:
    """The parameter that takes another one's place, and how tensors of the old one's shape become its own."""

    parameter: Tensor
    convert: Callable[[Tensor], Tensor]


def carried(optimizer: Optimizer, successors: Mapping[Tensor, Successor]) -> Optimizer:
    """A copy of an optimiser that trains the successors of its parameters, with the same momentum, moments and step.

    Learning-rate schedulers and hooks stay with the old one. What an optimiser keeps for rows and columns of a weight
    (Adafactor), or for all weights in a row (LBFGS), cannot be carried over: it starts anew.
    """
    memo: dict[int, Any] = {id(old): each.parameter for old, each in successors.items()}
    lost = _fill(memo, optimizer, successors)
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    memo |= {id(weight): weight for weight in trained if weight not in successors}
    found = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key != "step":  # what a scheduler has wrapped it in
            found.__dict__[key] = OrderedDict() if key.endswith("_hooks") else copy.deepcopy(value, memo)
    for weight in lost:
        found.state.pop(successors[weight].parameter, None)
    if isinstance(optimizer, LBFGS):
        found.state.clear()
        found.__dict__["_numel_cache"] = None
    if lost or (isinstance(optimizer, LBFGS) and optimizer.state):
        warnings.warn(
            f"{type(optimizer).__name__} starts anew: what it keeps is not for single weights",
            UserWarning,
            stacklevel=3,
        )
    return found


def _fill(memo: dict[int, Any], optimizer: Optimizer, successors: Mapping[Tensor, Successor]) -> list[Tensor]:
    """Put the converted state into the memo of a deepcopy; the weights whose state cannot be converted."""
    lost = []
    for weight, values in optimizer.state.items():
        if not isinstance(weight, Tensor) or weight not in successors:
            continue
        for value in values.values():
            if isinstance(value, Tensor) and value.shape == weight.shape and value.dim():
                memo[id(value)] = successors[weight].convert(value)
            elif (
                isinstance(value, Tensor) and value.numel() > 1 and weight.shape != successors[weight].parameter.shape
            ):
                lost.append(weight)
                break
    return lost
