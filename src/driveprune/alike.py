"""Do two networks compute the same? Asked of a compacted network before anybody gets it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from driveprune.graph import Inputs


def difference(big: nn.Module, small: nn.Module, inputs: Inputs, *, training: bool) -> str | None:
    """How the outputs of two networks differ on inputs like an example, if they do by more than rounding."""
    for mode in (False, True) if training else (False,):
        for dtype in (torch.float64, None):
            found = _compare(big, small, inputs, mode, dtype)
            if found != "cannot run":
                break
        if found is not None:
            return found
    return None


def _compare(
    big: nn.Module, small: nn.Module, inputs: Inputs, training: bool, dtype: torch.dtype | None
) -> str | None:
    tolerance = _tolerance(big)
    nets = [copy.deepcopy(net).cpu().train(training) for net in (big, small)]
    nets = [net if dtype is None else net.to(dtype) for net in nets]
    compared = 0
    for given in _variants(inputs, next((p.dtype for p in nets[0].parameters()), torch.float32)):
        try:
            wanted = _outputs_of(nets[0], given)
        except Exception:  # not an input of this network, or not of this kind of numbers
            continue
        for ours, theirs in zip(_outputs_of(nets[1], given), wanted, strict=True):
            if ours.shape != theirs.shape or not _near(ours, theirs, tolerance):
                return "what is left of it computes something else"
        compared += 1
    return None if compared else "cannot run"


def _tolerance(net: nn.Module) -> float:
    """How far outputs may be apart, relatively: constants were rounded to the network's own kind of numbers."""
    coarsest = max((torch.finfo(p.dtype).eps for p in net.parameters() if p.is_floating_point()), default=1e-16)
    return min(0.1, max(1e-9, 50 * coarsest))


def _near(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    if not theirs.numel():
        return True
    return float((ours - theirs).abs().max()) <= tolerance * max(1e-30, float(theirs.abs().max()))


@torch.no_grad()
def _outputs_of(net: nn.Module, given: Inputs) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = net(*given.args, **given.kwargs)
    return [leaf.double() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _variants(inputs: Inputs, dtype: torch.dtype) -> Iterator[Inputs]:
    """The example, random numbers in its place, and twice as many of them."""
    generator = torch.Generator().manual_seed(0)

    def plain(leaf: Any) -> Any:
        kind = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().cpu().to(dtype) if kind else leaf.cpu() if isinstance(leaf, Tensor) else leaf

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return plain(leaf)
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(dtype)

    def twice(leaf: Any) -> Any:
        return torch.cat([drawn(leaf), drawn(leaf)]) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    for change in (plain, drawn, twice):
        yield Inputs(*tree_map(change, (inputs.args, inputs.kwargs)))
