"""SynFlow: many cuts without data, by how much of the flow through the network passes each weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from driveprune.collectives import from_first, is_sharded, local
from driveprune.double import Double
from driveprune.gradients import backward, evaluating
from driveprune.graph import example_of, total
from driveprune.kinds import Amount, Count, PathName, Window
from driveprune.mask import Loss, Scores, parameters, unwrap
from driveprune.plan import Plan, Prune, Train, check_spread, spread
from driveprune.schedule import named


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
    first = from_first(lambda: (inputs.args, inputs.kwargs))  # texts may be of other lengths on other ranks
    if any(is_sharded(p) for p in model.parameters()):
        return _sharded_score(model, mask, first)
    args, kwargs = tree_map(partial(_ones, like=next(model.parameters()), dtype=torch.float64), first)
    flowing = {p: p.detach().double().abs().requires_grad_() for p in model.parameters()}
    state = {name: flowing[p] for name, p in _each(model, "_parameters")}
    state |= {name: b.double() if b.is_floating_point() else b for name, b in _each(model, "_buffers")}
    weights = parameters(model)
    chosen = [flowing[weights[name]] for name in mask]
    with evaluating(model), torch.enable_grad(), torch.autocast(chosen[0].device.type, enabled=False), Double():
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


@torch.no_grad()
def _sharded_score(model: nn.Module, mask: Mapping[str, Tensor], inputs: Any) -> Scores:
    """The same in the parameters' own precision: a sharded model cannot be called with other parameters."""
    weights = parameters(model)
    like = local(next(iter(weights.values())))
    args, kwargs = tree_map(partial(_ones, like=like, dtype=like.dtype), inputs)
    values = {name: local(weight).clone() for name, weight in weights.items()}
    try:
        for weight in weights.values():
            local(weight).abs_()
        with evaluating(model), torch.enable_grad():
            found = backward(model, {name: weights[name] for name in mask}, total(model(*args, **kwargs)))
        return {name: (g * weights[name].detach()).abs_() for name, g in found.items()}
    finally:
        for name, weight in weights.items():
            local(weight).copy_(values[name])


def _ones(leaf: Any, like: Tensor, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return (
        torch.ones_like(leaf, dtype=dtype, device=like.device) if leaf.is_floating_point() else leaf.to(like.device)
    )


def plan(
    sparsity: float,
    steps: int,
    steps_per_epoch: int,
    *,
    early_epochs: Amount = 0.0,
    cuts: Count = 100,
    window: Window = 0.0,
    path: PathName = "exponential",
) -> Plan:
    """Cut along a path, then train.

    Knobs:
        early_epochs: epochs of dense training before the first cut.
        cuts: number of cuts.
        window: epochs from the first cut to the last, with training between them (0: all at one moment).
        path: "exponential" removes the same share at each cut; "cubic" much at first and little at the end.
    """
    check_spread(cuts, window, path)
    cut = Prune(score, named(path, sparsity, cuts), fresh=False)
    return [*spread(cut, early_epochs, window, steps_per_epoch, batches_per_cut=0), Train(steps)]
