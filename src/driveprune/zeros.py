"""Which values of a traced network are zero and stay zero, whatever the input and however it is trained.

Sources of anything else are the input, biases, normalisation layers (their shifts are trained), and every operation
that is not known to leave zeros alone. From there on flags follow the kept weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from driveprune.channels import POOLS, POOLS_BY_NAME
from driveprune.traced import by_channels

_SHAPES = set(
    """
    view reshape flatten transpose permute unsqueeze squeeze getitem contiguous mean sum cat concat concatenate
    """.split()
)
_AT_ZERO = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softsign, nn.Tanh,
    nn.Hardswish, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Identity, nn.PReLU, _DropoutNd,
)  # fmt: skip
"""Functions of single elements that are 0 at 0."""
_AT_ZERO_BY_NAME = set(
    """
    relu relu6 leaky_relu elu selu celu gelu silu mish softsign tanh hardswish tanhshrink softshrink hardshrink abs
    neg sqrt square dropout contiguous clone float double
    """.split()
)


@torch.no_grad()
def other_than_zero(found: fx.GraphModule, mask: Mapping[str, Tensor], known: Mapping[str, Any]) -> dict[str, Tensor]:
    """For each node the elements that are, or may become by training, other than zero.

    Args:
        found: the network.
        mask: name -> True where the weight is kept.
        known: what every node computes for an example.

    """
    run = _Flags(found, mask, known)
    run.run(*(known[node.name] for node in found.graph.nodes if node.op == "placeholder"))
    return {name: flags != 0 for name, flags in run.flags.items() if isinstance(flags, Tensor)}


class _Flags(fx.Interpreter):
    """Runs a graph on flags: 1 where a value may be other than zero."""

    def __init__(self, found: fx.GraphModule, mask: Mapping[str, Tensor], known: Mapping[str, Any]) -> None:
        super().__init__(found)
        self._mask, self._known, self._layers = by_channels(mask), known, dict(found.named_modules())
        self.flags: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self._known[n.name]
        flags = tree_map(_ones, value)
        if isinstance(value, Tensor) and value.is_floating_point():
            flags = torch.ones_like(value, dtype=torch.float64)
            if n.op == "call_module":
                flags = self._through_module(n, flags)
            elif n.op in ("call_function", "call_method"):
                flags = self._through_function(n, flags)
        self.flags[n.name] = flags
        return flags

    def _through_module(self, n: fx.Node, ones: Tensor) -> Tensor:
        module = self._layers[str(n.target)]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        x: Tensor = args[0]
        if isinstance(module, nn.Linear | _ConvNd) and module.bias is None:
            plain = copy.deepcopy(module).double().cpu()
            kept = self._mask.get(f"{n.target}.weight")
            plain.weight.copy_(torch.ones_like(plain.weight) if kept is None else kept)
            return _flags(plain(*args, **kwargs))
        if isinstance(module, _AT_ZERO) or type(module).__name__ == "SameDropout":
            return x
        return _flags(module(*args, **kwargs)) if isinstance(module, (nn.Flatten, *POOLS)) else ones

    def _through_function(self, n: fx.Node, ones: Tensor) -> Tensor:
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        tensors: list[Tensor] = [arg for arg in args if isinstance(arg, Tensor)]
        if name in _AT_ZERO_BY_NAME and len(tensors) == 1:
            return tensors[0].contiguous()
        if name in ("add", "sub") and len(tensors) == 2:
            return _flags(tensors[0] + tensors[1])
        if name == "mul" and tensors:
            return _flags(tensors[0] * tensors[-1]).expand_as(ones)
        if name in _SHAPES or name in POOLS_BY_NAME:
            call = getattr(super(), n.op)
            return _flags(call(n.target, args, kwargs))
        return ones


def _ones(leaf: Any) -> Any:
    return (
        torch.ones_like(leaf, dtype=torch.float64) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
    )


def _flags(value: Tensor) -> Tensor:
    return (value != 0).double()
