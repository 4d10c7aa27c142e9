"""Networks that compute with their kept weights alone."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from driveprune import traced
from driveprune.compact import SameDropout
from driveprune.graph import Inputs, inputs_of
from driveprune.hold import Held, hold
from driveprune.mask import Mask, apply, check_fits, unwrap
from driveprune.sparse.carry import Successor, carried
from driveprune.sparse.choice import BATCH, CLEARLY_SPARSE, is_dense_faster
from driveprune.sparse.layers import SparseLayer, sparse_layer
from driveprune.sparse.memory import Lease
from driveprune.sparse.region import Region, step_of

Layers = Literal["auto", "sparse"]

LEAST_TURNS, MORE_TURNS, ENOUGH_SECONDS = 5, 20, 0.5
"""Both are measured so often, and more often if that takes less than so long."""

NO_SLOWER = 0.97
"""The sparse kernels are used if they take less than this share of torch's time: a measurement is not exact."""


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
    The network that is given, and its optimiser, stay as they are. For still less work, compact it first:
    `small = compact(model, mask, example, keep="trainable")`, then `sparsify(small, small.mask, example)`.

    Args:
        model: a network in float32 on the CPU.
        mask: name -> True where the weight is kept.
        example: an input of the network, such as `x[:1]`; inputs of other sizes work, too.
        optimizer: the optimiser of the network, to go on with: its copy for the sparse network is returned as well.
        layers: "auto": layers that are faster with their zeros filled in, by a measurement, are computed so.
            "sparse": never.

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
    with torch.inference_mode(False):  # its parameters are to be trained
        replaced = _sparse_layers(plain, mask)
        net, found = _captured(plain, mask, replaced)
        if found is not None:
            net = SparseNetwork(net, found, inputs, layers)
        at = _places(plain, replaced)
        sparse = {_weight_of(path) for path in at}
        rest = {name: kept for name, kept in mask.items() if name not in sparse}
        successors = _successors(plain, net, at)
        new = None if optimizer is None else carried(optimizer, successors)
        held = hold(net, new if _trains(new, net, rest) else None, rest) if rest else None
        net.origin = Origin(_skeleton(plain), held)  # type: ignore[assignment]
        net.mask = Mask(mask, getattr(mask, "provenance", {}))  # type: ignore[assignment]
        _set_modes(net, plain)
        if layers == "auto" and isinstance(net, SparseNetwork):
            _take_the_faster(net, inputs)
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
    origin = getattr(model, "origin", None)
    if not isinstance(origin, Origin):
        raise TypeError(f"densify takes a network that sparsify made, got {type(model).__name__}")
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
    return found


@dataclass
class Origin:
    """What a sparse network was made from: enough to make the ordinary one again."""

    skeleton: nn.Module
    """The ordinary network without any numbers in it."""
    held: Held | None
    """The hold on removed weights of layers that are not sparse ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return Origin(self.skeleton, None)


class SparseNetwork(nn.Module):
    """A network whose sparse layers run together, in regions; made by `sparsify`."""

    origin: Origin
    mask: Mask

    def __init__(self, layered: nn.Module, found: fx.GraphModule, inputs: Inputs, layers: Layers) -> None:
        super().__init__()
        self._modules.update(layered._modules)
        self._parameters.update(layered._parameters)
        self._buffers.update(layered._buffers)
        self._non_persistent_buffers_set.update(layered._non_persistent_buffers_set)
        known = dict(self.named_modules(remove_duplicate=False))
        for node in found.graph.nodes:
            if node.op == "call_module" and node.target not in known:  # a dropout that was a function
                self.add_module(str(node.target), found.get_submodule(str(node.target)))
            elif node.op == "get_attr":
                self._take_constant(found, str(node.target))
        self._in_place = [module for module in self.modules() if getattr(module, "inplace", None) is True]
        """What may write over its input if torch computes everything, not in the order of the regions."""
        self._set_in_place(False)
        self.dense = False
        """Whether torch computes everything, with zeros filled in, because that is faster."""
        self._lease = Lease()  # those of the kernels end later: torch.fx has them in cycles
        found.recompile()
        self._ordinary = type(found).forward
        self.graph, self.parts, self.regions = _with_regions(found, self, inputs, layers)
        self._names = [str(node.target) for node in self.graph.nodes if node.op == "placeholder"]

    def _take_constant(self, found: fx.GraphModule, name: str) -> None:
        """A tensor of the network that is neither a parameter nor a buffer."""
        if "." not in name and not hasattr(self, name):
            setattr(self, name, getattr(found, name))

    def fill_in(self) -> None:
        """Let torch compute everything from now on, with zeros filled in, as in the ordinary network's own code."""
        self.dense = True
        self._set_in_place(True)
        for module in self.modules():
            if isinstance(module, SparseLayer):
                module.dense = module.channels_last = True

    def _set_in_place(self, wanted: bool) -> None:
        for module in self._in_place:
            module.inplace = wanted  # type: ignore[assignment]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the ordinary network would compute."""
        names, inputs = self._names, args
        if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
            raise TypeError(f"the network takes {names}, got {len(args)} inputs and {sorted(kwargs)}")
        if len(args) < len(names):
            inputs = tuple(traced.arguments(self.graph, Inputs(args, kwargs)))
        return _plain(self._ordinary(self, *inputs) if self.dense else self._run(self.graph, inputs))

    def _run(self, graph: fx.Graph, inputs: Sequence[Any]) -> Any:
        """What a graph computes from its inputs. A value is given up after its last use, as in ordinary code."""
        given = iter(inputs)
        known: dict[fx.Node, Any] = {}
        uses: dict[fx.Node, int] = {}
        for node in graph.nodes:
            uses[node] = len(node.users)
            if node.op == "placeholder":
                known[node] = next(given)
                continue
            values = tuple([_resolved(each, known) for each in node.args])
            named = {name: _resolved(each, known) for name, each in node.kwargs.items()} if node.kwargs else {}
            if node.op == "output":
                return values[0]
            for each in node.all_input_nodes:
                uses[each] -= 1
                if not uses[each]:
                    del known[each]
            known[node] = self._value(node, values, named)
        raise AssertionError("a graph ends with its output")

    def _value(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if node.op == "call_module":
            region = self.regions.get(target)
            if region is not None and region.fits(*args):
                found = region(*args)
                return found[0] if len(found) == 1 else found
            if region is not None:
                return self._run(self.parts[target], args)
            return _part(self, target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "get_attr":
            path, _, name = str(target).rpartition(".")
            return getattr(_part(self, path), name)
        return target(*args, **kwargs)


def _part(net: nn.Module, path: str) -> nn.Module:
    """What `get_submodule` finds, without its checks, which take longer than small layers."""
    found = net
    for name in path.split(".") if path else ():
        found = found._modules[name]  # type: ignore[assignment]
    return found


def _resolved(argument: Any, known: Mapping[fx.Node, Any]) -> Any:
    """An argument of a node with values in the places of nodes."""
    if isinstance(argument, fx.Node):
        return known[argument]
    simple = argument is None or isinstance(argument, int | float | str)
    return argument if simple else fx.map_arg(argument, known.__getitem__)


def _plain(value: Any) -> Any:
    """Lists and dictionaries as a network's own code returns them, instead of those of a graph."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, tuple):
        parts = [_plain(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _check_kind(plain: nn.Module) -> None:
    for name, weight in plain.named_parameters():
        if weight.device.type != "cpu":
            raise ValueError(f"the sparse kernels run on the CPU, but {name} is on {weight.device}: model.cpu()")
        if weight.is_floating_point() and weight.dtype != torch.float32:
            raise ValueError(f"the sparse kernels compute in float32, but {name} is {weight.dtype}: model.float()")


def _sparse_layers(plain: nn.Module, mask: Mapping[str, Tensor]) -> dict[nn.Module, SparseLayer]:
    """The layers that the kernels know, made sparse: those with a mask for a weight of their own."""
    owners: dict[Tensor, set[nn.Module]] = {}
    for module in plain.modules():
        for weight in module._parameters.values():
            if weight is not None:
                owners.setdefault(weight, set()).add(module)
    found: dict[nn.Module, SparseLayer] = {}
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    inner = {layer for module in plain.modules() if _reads_weights(module) for layer in module.children()}
    for path, module in plain.named_modules():
        kept = mask.get(_weight_of(path))
        if kept is None or module in inner or any(getattr(module, each) for each in hooks):
            continue
        if all(owners[each] == {module} for each in module._parameters.values() if each is not None):
            layer = sparse_layer(module, kept)
            if layer is not None:
                found[module] = layer
    return found


def _weight_of(path: str) -> str:
    return f"{path}.weight" if path else "weight"


def _reads_weights(module: nn.Module) -> bool:
    """Whether a module of torch may read its layers' weights itself, as those of transformers do."""
    containers = nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict
    return type(module).__module__.startswith("torch.nn.") and type(module) not in containers


def _places(plain: nn.Module, replaced: Mapping[nn.Module, SparseLayer]) -> dict[str, SparseLayer]:
    """Sparse layers by their paths."""
    return {path: replaced[module] for path, module in plain.named_modules() if module in replaced}


def _captured(
    plain: nn.Module, mask: Mapping[str, Tensor], replaced: dict[nn.Module, SparseLayer]
) -> tuple[nn.Module, fx.GraphModule | None]:
    """A copy with sparse layers, and its graph; layers whose weights are used by themselves, too, are left out."""
    net = _copied(plain, mask, replaced)
    try:
        found = traced.trace(net, training=True, leaves=(SparseLayer, SameDropout))
    except ValueError:  # the user's own code calls the layers, one by one
        return net, None
    if any(node.op == "placeholder" and str(node.target).startswith("*") for node in found.graph.nodes):
        return net, None  # any number of inputs
    read = {str(node.target) for node in found.graph.nodes if node.op == "get_attr"}
    used = [layer for path, layer in _places(plain, replaced).items() if _weight_of(path) in read]
    if not used:
        return net, found
    for module in [module for module, layer in replaced.items() if layer in used]:
        del replaced[module]
    return _captured(plain, mask, replaced)


def _copied(plain: nn.Module, mask: Mapping[str, Tensor], replaced: Mapping[nn.Module, SparseLayer]) -> nn.Module:
    """A copy of the network with sparse layers in the places of others; no dense weight of those is copied."""
    memo: dict[int, Any] = {id(module): layer for module, layer in replaced.items()}
    copied: nn.Module = copy.deepcopy(plain, memo)
    known = dict(copied.named_parameters())
    apply(copied, {name: kept for name, kept in mask.items() if name in known and known[name].shape == kept.shape})
    return copied


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
    return copy.deepcopy(plain, memo)


def _named_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(remove_duplicate=False))


def _set_modes(net: nn.Module, like: nn.Module) -> None:
    """Every module in the mode of its counterpart."""
    net.train(like.training)
    others = dict(like.named_modules())
    for name, module in net.named_modules():
        if name in others:
            module.training = others[name].training


class _Known(OperatorSupportBase):
    """Tells the partitioner which operations the kernels know."""

    def __init__(self, modules: Mapping[str, nn.Module], shapes: Mapping[str, torch.Size]) -> None:
        self._modules, self._shapes = modules, shapes

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        """Whether a node can be a step of a region."""
        return step_of(node, self._modules, self._shapes) is not None


def _with_regions(
    found: fx.GraphModule, net: nn.Module, inputs: Inputs, layers: Layers
) -> tuple[fx.Graph, dict[str, fx.Graph], dict[str, Region]]:
    """The graph with calls of regions in it, and the regions by name: as graphs, and as regions."""
    modules = dict(net.named_modules(remove_duplicate=False))
    sparse = [module for module in modules.values() if isinstance(module, SparseLayer)]
    shapes = _shapes(found, inputs)
    if layers == "auto":
        _choose(found, modules, shapes)
    support = _Known(modules, shapes)
    partitioner = CapabilityBasedPartitioner(found, support, allows_single_node_partition=True)
    proposed = partitioner.propose_partitions()
    for each in proposed:
        for node in [node for node in each.nodes if not support.is_node_supported(modules, node)]:
            each.remove_node(node)  # the partitioner takes indexing with what is indexed
    partitions = [
        each
        for each in proposed
        if any(modules.get(str(node.target)) in sparse for node in each.nodes if node.op == "call_module")
    ]
    prefix = "region_"
    while any(name.startswith(prefix) for name in modules):
        prefix = f"sparse_{prefix}"
    whole = partitioner.fuse_partitions(partitions, prefix=prefix)
    names = [str(node.target) for node in whole.graph.nodes if str(node.target).startswith(prefix)]
    parts: dict[str, Any] = {name: whole.get_submodule(name).graph for name in names}
    return whole.graph, parts, {name: _region(part, modules, shapes) for name, part in parts.items()}


def _region(part: fx.Graph, modules: Mapping[str, nn.Module], shapes: Mapping[str, torch.Size]) -> Region:
    """A region from a part of the graph."""
    nodes = list(part.nodes)
    known = {node.name: shapes[node.name] for node in nodes if node.name in shapes}
    steps = [step_of(node, modules, known) for node in nodes if node.op not in {"placeholder", "output"}]
    outputs = nodes[-1].args[0]
    ends = outputs if isinstance(outputs, tuple | list) else (outputs,)
    inputs = tuple(node.name for node in nodes if node.op == "placeholder")
    return Region([step for step in steps if step is not None], inputs, tuple(node.name for node in ends), known)


def _shapes(found: fx.GraphModule, inputs: Inputs) -> dict[str, torch.Size]:
    """The shapes of all values that a region could have, for the example."""
    layers = [module for module in found.modules() if isinstance(module, SparseLayer)]
    for layer in layers:
        layer.dense = True  # for this once: nothing to compile
    known = traced.recorded(found, inputs)
    depends = traced.depends_on_input(found)  # others have no batch
    for layer in layers:
        layer.dense = False
    return {
        name: value.shape
        for name, value in known.items()
        if name in depends
        and isinstance(value, Tensor)
        and value.dtype == torch.float32
        and value.dim() in {2, 4}
        and value.numel()
    }


def _take_the_faster(net: SparseNetwork, inputs: Inputs) -> None:
    """Let torch compute the whole network if the sparse kernels do not pay, by a measurement of both."""
    layers = [module for module in net.modules() if isinstance(module, SparseLayer)]
    kept = sum(layer.weight.numel() for layer in layers)
    if kept < CLEARLY_SPARSE * sum(math.prod(layer.shape) for layer in layers):
        return
    twin = copy.deepcopy(net)
    for size in (BATCH,) if net.training else (1, BATCH):
        given = Inputs(*tree_map(partial(_repeated, size=size), (inputs.args, inputs.kwargs)))
        filled = copy.deepcopy(net)
        filled.fill_in()
        try:
            sparse, dense = _seconds_in_turn((twin, filled), given)
        except RuntimeError:  # the network's own code does not know the other memory format
            return
        if sparse > NO_SLOWER * dense:
            net.fill_in()
            return


def _repeated(leaf: Any, size: int) -> Any:
    """An example as a batch of a size."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    return leaf[:1].expand(size, *leaf.shape[1:]).contiguous()


def _seconds_in_turn(nets: Sequence[nn.Module], inputs: Inputs) -> list[float]:
    """The least time of a pass of each network, in training with the way back; disturbed alike, in turn."""
    times: list[list[float]] = [[] for _ in nets]
    with torch.random.fork_rng(devices=[]):
        for turn in range(LEAST_TURNS + MORE_TURNS):
            if turn >= LEAST_TURNS and sum(map(sum, times)) > ENOUGH_SECONDS:
                break
            for net, mine in zip(nets, times, strict=True):
                mine.append(_pass_seconds(net, inputs))
    return [min(mine[1:]) for mine in times]


def _pass_seconds(net: nn.Module, inputs: Inputs) -> float:
    start = time.perf_counter()
    with torch.set_grad_enabled(net.training):
        leaves = [leaf for leaf in tree_leaves(net(*inputs.args, **inputs.kwargs)) if isinstance(leaf, Tensor)]
        if net.training:
            sum(leaf.sum() for leaf in leaves if leaf.requires_grad).backward()  # type: ignore[union-attr]
    return time.perf_counter() - start


def _choose(found: fx.GraphModule, modules: Mapping[str, nn.Module], shapes: Mapping[str, torch.Size]) -> None:
    """Measure each layer, and let torch compute those that it computes faster."""
    for node in found.graph.nodes:
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        shape = shapes.get(node.all_input_nodes[0].name) if isinstance(layer, SparseLayer) else None
        if isinstance(layer, SparseLayer) and shape is not None and len(shape) == layer.dims:
            layer.dense = is_dense_faster(layer, shape)
