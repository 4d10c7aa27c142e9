"""SynFlow: many cuts without data, by how much of the flow through the network passes each weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from driveprune.gradients import evaluating
from driveprune.graph import example_of, total
from driveprune.mask import Loss, Scores, parameters, unwrap
from driveprune.plan import Plan, Prune, Train, early
from driveprune.schedule import exponential


def score(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    batches: Iterator[Any],
    *,
    loss: Loss,
    generator: torch.Generator,
) -> Scores:
    """Z = ∂A/∂|θ| ⊙ |θ| with A = Σ f(|θ|; 1): all-ones input, evaluation mode, float64.

    Absolute values are taken of the parameters, biases included, and not of buffers: normalisation layers use
    their running statistics as they are. A batch is looked at for the shape of the input only.

    Reference: Tanaka et al., Pruning neural networks without any data by iteratively conserving synaptic
    flow, 2020.
    """
    model = unwrap(model)
    inputs = example_of(model, next(batches), loss)
    args, kwargs = tree_map(_ones, (inputs.args, inputs.kwargs))
    flowing = {p: p.detach().double().abs().requires_grad_() for p in model.parameters()}
    state = {name: flowing[p] for name, p in _each(model, "_parameters")}
    state |= {name: b.double() if b.is_floating_point() else b for name, b in _each(model, "_buffers")}
    weights = parameters(model)
    chosen = [flowing[weights[name]] for name in mask]
    with evaluating(model), torch.enable_grad(), torch.autocast(chosen[0].device.type, enabled=False):
        output = functional_call(model, state, args, kwargs, tie_weights=False)
        found = torch.autograd.grad(total(output), chosen, allow_unused=True)
    return {
        name: torch.zeros_like(w) if g is None else (g.to_dense() * w.detach()).abs_()
        for name, w, g in zip(mask, chosen, found, strict=True)
    }


def _each(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Parameters or buffers of each module, once a module: tied ones have several names, shared modules have one."""
    for path, module in model.named_modules():
        for leaf, tensor in getattr(module, kind).items():
            if tensor is not None:
                yield f"{path}.{leaf}".lstrip("."), tensor


def _ones(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return torch.ones_like(leaf, dtype=torch.float64) if is_float else leaf


def plan(sparsity: float, steps: int, steps_per_epoch: int, *, early_epochs: float = 0.0, cuts: int = 100) -> Plan:
    """Cut along an exponential path, then train.

    Knobs:
        early_epochs: epochs of dense training before the first cut.
        cuts: number of cuts.
    """
    cut = Prune(score, exponential(sparsity, cuts), fresh=False)
    return [*early(early_epochs, steps_per_epoch), cut, Train(steps)]
