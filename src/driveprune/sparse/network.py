"""Networks that compute with their kept weights alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from driveprune.frozen import OWN_NAMES
from driveprune.graph import Inputs, inputs_of
from driveprune.hold import hold
from driveprune.mask import Mask, check_fits, unwrap
from driveprune.sparse.capture import captured, places, weight_of
from driveprune.sparse.carry import Successor, carried
from driveprune.sparse.choice import choose, undisturbed
from driveprune.sparse.graphs import Graphs
from driveprune.sparse.layers import SparseLayer, Ways
from driveprune.sparse.made import RECORDS, Made, Origin, in_regions, made_of, remember
from driveprune.sparse.pattern import watch
from driveprune.sparse.reasons import SparseWarning, reasons, share

Layers = Literal["auto", "sparse"]


@overload
def sparsify(
    model: nn.Module, mask: Mapping[str, Tensor], example: Any, optimizer: None = None, *, layers: Layers = "auto"
) -> nn.Module: ...
@overload
def sparsify(
    model: nn.Module, mask: Mapping[str, Tensor], example: Any, optimizer: Optimizer, *, layers: Layers = "auto"
) -> tuple[nn.Module, Optimizer]: ...
def sparsify(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    example: Any,
    optimizer: Optimizer | None = None,
    *,
    layers: Layers = "auto",
) -> nn.Module | tuple[nn.Module, Optimizer]:
    """A network that computes the same function with the kept weights alone, in inference and in training.

    The parameters of masked convolutions and linear layers are their kept values, under their old names; any torch
    optimiser trains them. What the sparse kernels do not know runs in torch, with its removed weights held at zero.
    The network that is given, and its optimiser, stay as they are; the result is of its class. For still less work,
    compact it first:
    `small = compact(model, mask, example, keep="trainable")`, then `sparsify(small, small.mask, example)`.

    Args:
        model: a network in float32 on the CPU.
        mask: name -> True where the weight is kept.
        example: an input of the network, such as `x[:1]`; inputs of other sizes work, too. What is measured is its
            batch, if it has more than four inputs, else such batches and some of 32.
        optimizer: the optimiser of the network, to go on with: its copy for the sparse network is returned as well.
        layers: "auto": layers, and the network as a whole, in inference and in training apart, are computed by torch
            with their zeros filled in where that is faster, by a measurement. "sparse": never. `explain` says what
            came of it.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> mask = {"0.weight": torch.arange(12).view(3, 4) % 4 == 0}
    >>> fast = sparsify(net, mask, torch.ones(1, 4))
    >>> fast.get_parameter("0.weight").shape
    torch.Size([3])
    >>> bool(torch.equal(densify(fast)[0].weight, net[0].weight * mask["0.weight"]))
    True

    """
    if layers not in {"auto", "sparse"}:
        raise ValueError(f"layers must be 'auto' or 'sparse', got {layers!r}")
    plain = unwrap(model)
    check_fits(model, mask)
    _check_kind(plain)
    inputs = inputs_of(example)
    with torch.inference_mode(False), undisturbed():  # its parameters are to be trained
        copy_of = captured(plain, mask, inputs)
        net, found = copy_of.net, copy_of.found
        graphs = None if found is None else Graphs(found, net, inputs, choose=layers == "auto")
        if graphs is not None and not graphs.in_order:
            graphs, copy_of.warn = None, True
            copy_of.fallbacks.append("a graph of it would draw its random numbers in another order")
        if graphs is not None:
            net = in_regions(net, graphs)
            graphs.watch(net)
        at = places(plain, copy_of.layers)
        sparse = {weight_of(path) for path in at}
        rest = {name: kept for name, kept in mask.items() if name not in sparse}
        successors = _successors(plain, net, at)
        new = None if optimizer is None else carried(optimizer, successors)
        held = hold(net, new if _trains(new, net, rest) else None, rest) if rest else None
        made = Made(Origin(_skeleton(plain), held), Mask(mask, getattr(mask, "provenance", {})), Ways(), graphs)
        made.reasons, made.fallbacks = reasons(plain, mask, sparse), tuple(copy_of.fallbacks)
        _set_modes(net, plain)
        watch(net, mask, rest)
        remember(net, made)
        _choose_ways(net, made, inputs, list(copy_of.layers.values()), measure=layers == "auto")
    _warn_of_a_small_share(made, sparse)
    if copy_of.warn:
        said = "; ".join(made.fallbacks)
        warnings.warn(f"the network runs by its own code, layer by layer: {said}", SparseWarning, stacklevel=2)
    return net if new is None else (net, new)


@overload
def densify(model: nn.Module, optimizer: None = None) -> nn.Module: ...
@overload
def densify(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]: ...
def densify(model: nn.Module, optimizer: Optimizer | None = None) -> nn.Module | tuple[nn.Module, Optimizer]:
    """The ordinary network again, zeros filled in, with all that a sparse network has learnt; bit for bit.

    Args:
        model: a network made by `sparsify`.
        optimizer: its optimiser; a copy for the ordinary network is returned as well.

    """
    made = made_of(model)
    if made is None:
        raise TypeError(f"densify takes a network that sparsify made, got {type(model).__name__}")
    origin = made.origin
    memo: dict[int, Any] = {}
    for _, shell in (*origin.skeleton.named_parameters(), *_named_buffers(origin.skeleton)):
        empty = torch.empty_like(shell, device="cpu", requires_grad=False)
        is_parameter = isinstance(shell, nn.Parameter)
        memo[id(shell)] = nn.Parameter(empty, shell.requires_grad) if is_parameter else empty
    dense = copy.deepcopy(origin.skeleton, memo)
    successors = write_back(model, dense)
    _set_modes(dense, model)
    return dense if optimizer is None else (dense, carried(optimizer, successors))


@torch.no_grad()
def write_back(model: nn.Module, dense: nn.Module) -> dict[Tensor, Successor]:
    """Write all numbers of a sparse network into an ordinary one of the kind that it was made from.

    Returns:
        For each parameter of the sparse network its successor in the ordinary one.

    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(_named_buffers(model))}
    modules = model.named_modules(remove_duplicate=False)  # a shared layer by all of its names
    at = {path: module for path, module in modules if isinstance(module, SparseLayer)}
    found: dict[Tensor, Successor] = {}
    for name, tensor in (*dense.named_parameters(remove_duplicate=False), *_named_buffers(dense)):
        layer = at.get(name.rpartition(".")[0]) if name.rpartition(".")[2] == "weight" else None
        convert = _filler(layer, tensor)
        tensor.copy_(convert(own[name]))
        tensor.requires_grad_(own[name].requires_grad)
        found[own[name]] = Successor(tensor, convert)
    _carry_attributes(model, dense, {id(old): new.parameter for old, new in found.items()})
    return found


def _carry_attributes(model: nn.Module, dense: nn.Module, known: Mapping[int, Any]) -> None:
    """Give the modules of an ordinary network the attributes that those of a sparse one have by now."""
    others = dict(model.named_modules(remove_duplicate=False))
    pairs = [(others[path], own) for path, own in dense.named_modules(remove_duplicate=False) if path in others]
    memo = {**known, **{id(old): own for old, own in pairs}}
    for old, own in pairs:
        if isinstance(old, SparseLayer) or isinstance(own, fx.GraphModule):
            continue
        for name, value in vars(old).items():
            if name not in OWN_NAMES and (name in vars(own) or name not in RECORDS):
                own.__dict__[name] = copy.deepcopy(value, memo)


def _choose_ways(net: nn.Module, made: Made, inputs: Inputs, layers: list[SparseLayer], *, measure: bool) -> None:
    """Who computes the sparse layers, in one decision for all of them."""
    for layer in layers:
        layer.ways = made.ways
    if not layers:
        made.ways.inference = made.ways.training = "dense"
    elif measure:
        made.timings, made.notes = choose(net, made.ways, inputs, shared=(made.origin, made.mask))


def _warn_of_a_small_share(made: Made, sparse: set[str]) -> None:
    """A warning if most of the masked weights are in layers that torch computes, zeros and all."""
    found = share(made.mask, sparse)
    if made.mask and found < 0.5:
        warnings.warn(
            f"only {found:.0%} of the masked weights are in layers that the sparse kernels know; torch computes the "
            "others with their zeros. print(dp.explain(fast)) says which, and why",
            SparseWarning,
            stacklevel=3,
        )


def _check_kind(plain: nn.Module) -> None:
    for name, weight in plain.named_parameters():
        if weight.device.type != "cpu":
            raise ValueError(f"the sparse kernels run on the CPU, but {name} is on {weight.device}: model.cpu()")
        if weight.is_floating_point() and weight.dtype != torch.float32:
            raise ValueError(f"the sparse kernels compute in float32, but {name} is {weight.dtype}: model.float()")


def _successors(plain: nn.Module, net: nn.Module, at: Mapping[str, SparseLayer]) -> dict[Tensor, Successor]:
    """For each parameter of the ordinary network its successor in the sparse one."""
    new = dict(net.named_parameters(remove_duplicate=False))
    found: dict[Tensor, Successor] = {}
    for name, old in plain.named_parameters(remove_duplicate=False):
        layer = at.get(name.rpartition(".")[0]) if name.rpartition(".")[2] == "weight" else None
        found.setdefault(old, Successor(new[name], _keeper(layer)))  # a shared layer is known by its first name
    return found


def _trains(optimizer: Optimizer | None, net: nn.Module, names: Mapping[str, Tensor]) -> bool:
    """Whether an optimiser has one of these weights."""
    known = dict(net.named_parameters(remove_duplicate=False))
    groups = [] if optimizer is None else optimizer.param_groups
    trained = {weight for group in groups for weight in group["params"]}
    return any(known[name] in trained for name in names)


def _keeper(layer: SparseLayer | None) -> Any:
    """Takes the kept entries of a tensor of a layer's full shape."""
    if layer is None:
        return Tensor.clone
    places = layer.places()
    return lambda tensor: tensor.detach().reshape(-1)[places].clone()


def _filler(layer: SparseLayer | None, shell: Tensor) -> Any:
    """Fills zeros in again, in the memory format of the ordinary weight."""

    def filled(tensor: Tensor) -> Tensor:
        full = tensor.detach() if layer is None else layer.full(tensor.detach())
        return torch.empty_like(shell, dtype=full.dtype, requires_grad=False).copy_(full)

    return filled


def _skeleton(plain: nn.Module) -> nn.Module:
    """A copy of a network on no device: shapes, formats and ties, but no numbers."""
    memo: dict[int, Any] = {}
    for _, tensor in (*plain.named_parameters(), *_named_buffers(plain)):
        shell = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(shell, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shell
    found: nn.Module = copy.deepcopy(plain, memo)
    if isinstance(found, fx.GraphModule):
        for node in found.graph.nodes:
            node.type = None  # annotations that are text cannot be pickled
        found.recompile()
    return found


def _named_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(remove_duplicate=False))


def _set_modes(net: nn.Module, like: nn.Module) -> None:
    """Every module in the mode of its counterpart."""
    net.train(like.training)
    others = dict(like.named_modules())
    for name, module in net.named_modules():
        if name in others:
            module.training = others[name].training
