"""GraSP: one cut at initialisation that preserves the flow of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from driveprune.gradients import hessian_gradients, in_mode
from driveprune.kinds import Amount, Count, Mode, Positive
from driveprune.mask import Loss, Scores, parameters, unwrap
from driveprune.plan import Plan, Prune, Train, early


def score(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    batches: Iterator[Any],
    *,
    loss: Loss,
    generator: torch.Generator,
    batches_per_cut: int = 1,
    temperature: float = 200.0,
    mode: Mode = "training",
) -> Scores:
    """θ ⊙ H·g: weights whose removal would lower the gradient norm most are kept.

    The model's output is divided by a temperature, as in the authors' code.

    Reference: Wang, Zhang and Grosse, Picking Winning Tickets Before Training by Preserving Gradient Flow, 2020.
    """
    weights = parameters(model)
    divided: list[Any] = []
    cooling = unwrap(model).register_forward_hook(partial(_divide, temperature, divided))
    try:
        with in_mode(model, mode):
            found = hessian_gradients(model, mask, batches, loss=loss, count=batches_per_cut)
    finally:
        cooling.remove()
    if temperature != 1 and not divided:
        raise ValueError(
            "grasp divides the model's output by its temperature, but the loss does not call the model itself: "
            "set the knob temperature=1"
        )
    return {name: weights[name].detach().to(h.dtype) * h for name, h in found.items()}


def _divide(temperature: float, divided: list[Any], model: nn.Module, _: Any, output: Any) -> Any:
    divided.append(model)
    if temperature == 1:
        return output
    if not isinstance(output, Tensor):
        raise ValueError(
            f"grasp divides the model's output by its temperature, but the output is a {type(output).__name__}: "
            "set the knob temperature=1"
        )
    return output / temperature


def plan(
    sparsity: float,
    steps: int,
    steps_per_epoch: int,
    *,
    early_epochs: Amount = 0.0,
    batches_per_cut: Count = 1,
    temperature: Positive = 200.0,
    mode: Mode = "training",
) -> Plan:
    """Cut once, then train.

    Knobs:
        early_epochs: epochs of dense training before the cut.
        batches_per_cut: batches that act as one large batch.
        temperature: divides the model's output while scoring.
        mode: "training" scores the model as it is trained; "evaluation" with its running statistics.
    """
    rank = partial(score, batches_per_cut=batches_per_cut, temperature=temperature, mode=mode)
    return [*early(early_epochs, steps_per_epoch), Prune(rank, (sparsity,)), Train(steps)]
