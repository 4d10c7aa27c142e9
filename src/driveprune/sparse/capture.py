"""A network with sparse layers, and its graph: as far as both do what the network's own code does, by comparing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from driveprune import traced
from driveprune.alike import CANNOT_RUN, difference
from driveprune.compact import SameDropout
from driveprune.frozen import FrozenError
from driveprune.graph import Inputs
from driveprune.mask import apply
from driveprune.sparse.layers import SparseLayer, sparse_layer
from driveprune.sparse.reasons import HOOKS, reads_weights


@dataclass
class Captured:
    """A copy of a network with sparse layers."""

    net: nn.Module
    layers: dict[nn.Module, SparseLayer]
    """The ordinary network's layers, and what is in their places."""
    found: fx.GraphModule | None = None
    """The graph, if one was found that does the same as the network's own code."""
    fallbacks: list[str] = field(default_factory=list)
    """Why there is no graph, or a layer is not sparse that could be one, in words."""
    warn: bool = False
    """Whether that was found by comparing: the network's code does something that a graph or a layer would not."""


def captured(plain: nn.Module, mask: Mapping[str, Tensor], inputs: Inputs) -> Captured:
    """A copy of an ordinary network with sparse layers where that changes nothing."""
    dense = copied(plain, mask, {})
    replaced = _candidates(plain, mask)
    made = _with_graph(plain, mask, dense, inputs, replaced)
    if made.found is not None:
        return made
    return _layer_by_layer(plain, mask, dense, inputs, made)


def places(plain: nn.Module, replaced: Mapping[nn.Module, SparseLayer]) -> dict[str, SparseLayer]:
    """Sparse layers by their paths."""
    return {path: replaced[module] for path, module in plain.named_modules() if module in replaced}


def weight_of(path: str) -> str:
    """The name of a layer's weight."""
    return f"{path}.weight" if path else "weight"


def copied(plain: nn.Module, mask: Mapping[str, Tensor], replaced: Mapping[nn.Module, SparseLayer]) -> nn.Module:
    """A copy of the network with sparse layers in the places of others; no dense weight of those is copied."""
    memo: dict[int, Any] = {id(module): layer for module, layer in replaced.items()}
    net: nn.Module = copy.deepcopy(plain, memo)
    known = dict(net.named_parameters())
    apply(net, {name: kept for name, kept in mask.items() if name in known and known[name].shape == kept.shape})
    return net


def _candidates(plain: nn.Module, mask: Mapping[str, Tensor]) -> dict[nn.Module, SparseLayer]:
    """The layers that the kernels know, made sparse: those with a mask for a weight of their own."""
    owners: dict[Tensor, set[nn.Module]] = {}
    for module in plain.modules():
        for weight in module._parameters.values():
            if weight is not None:
                owners.setdefault(weight, set()).add(module)
    found: dict[nn.Module, SparseLayer] = {}
    inner = {layer for module in plain.modules() if reads_weights(module) for layer in module.children()}
    for path, module in plain.named_modules():
        kept = mask.get(weight_of(path))
        if kept is None or module in inner or any(getattr(module, each) for each in HOOKS):
            continue
        if all(owners[each] == {module} for each in module._parameters.values() if each is not None):
            layer = sparse_layer(module, kept)
            if layer is not None:
                found[module] = layer
    return found


def _with_graph(
    plain: nn.Module,
    mask: Mapping[str, Tensor],
    dense: nn.Module,
    inputs: Inputs,
    replaced: dict[nn.Module, SparseLayer],
) -> Captured:
    """The network and its graph; layers whose weights the code uses by themselves, too, are left out."""
    made = Captured(copied(plain, mask, replaced), replaced)
    try:
        fixed = traced.fixed_inputs(made.net, inputs)
        found = traced.trace(made.net, training=True, leaves=(SparseLayer, SameDropout), fixed=fixed)
        traced.note_kinds(found, made.net, inputs)
    except ValueError as error:  # the network's own code calls the layers, one by one
        made.fallbacks, made.warn = [str(error)], isinstance(error, FrozenError)
        return made
    if any(node.op == "placeholder" and str(node.target).startswith("*") for node in found.graph.nodes):
        made.fallbacks = ["it takes any number of inputs"]
        return made
    read = {str(node.target) for node in found.graph.nodes if node.op == "get_attr"}
    used = [layer for path, layer in places(plain, replaced).items() if weight_of(path) in read]
    if used:
        left = {module: layer for module, layer in replaced.items() if layer not in used}
        return _with_graph(plain, mask, dense, inputs, left)
    why = _difference(dense, found, mask, inputs)
    if why is None:
        made.found = found
    elif why != CANNOT_RUN:
        made.fallbacks, made.warn = [f"a graph of it would do something else: {why}"], True
    else:
        made.fallbacks = ["it does not run on inputs like the example, so that nothing could be compared"]
    return made


def _layer_by_layer(
    plain: nn.Module, mask: Mapping[str, Tensor], dense: nn.Module, inputs: Inputs, made: Captured
) -> Captured:
    """The network's own code with sparse layers in it, those that change nothing."""

    def changes(layers: Sequence[nn.Module]) -> bool:
        some = {module: made.layers[module] for module in layers}
        return _difference(dense, copied(plain, mask, some), mask, inputs) not in (None, CANNOT_RUN)

    harmless = _harmless(list(made.layers), changes)
    if len(harmless) == len(made.layers):
        return made
    names = [weight_of(path) for path, module in plain.named_modules() if module in set(made.layers) - set(harmless)]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    left = {module: made.layers[module] for module in harmless}
    why = f"the network's code uses {listed} beside calling the layer, which stays dense"
    if not harmless and changes([]):
        why = "with the same seeds it differs from itself, so that nothing could be compared: all layers stay dense"
    return Captured(copied(plain, mask, left), left, None, [*made.fallbacks, why], warn=True)


def _harmless(layers: Sequence[nn.Module], changes: Callable[[Sequence[nn.Module]], bool]) -> list[nn.Module]:
    """As many layers as can be sparse without changing what the network does."""
    if not layers or not changes(layers):
        return list(layers)
    if len(layers) == 1:
        return []
    half = len(layers) // 2
    found = _harmless(layers[:half], changes) + _harmless(layers[half:], changes)
    return found if len(found) == len(layers) or not changes(found) else []


def _difference(dense: nn.Module, net: nn.Module, mask: Mapping[str, Tensor], inputs: Inputs) -> str | None:
    """What a network with sparse layers does otherwise than the ordinary one; torch computes for both."""
    with _by_torch(net):
        return difference(dense, net, inputs, training=True, kept=mask, precisions=(None,))


@contextmanager
def _by_torch(net: nn.Module) -> Iterator[None]:
    """Sparse layers computed with zeros filled in for a while: nothing to compile."""
    layers = [module for module in net.modules() if isinstance(module, SparseLayer)]
    for layer in layers:
        layer.dense = True
    try:
        yield
    finally:
        for layer in layers:
            layer.dense = False
