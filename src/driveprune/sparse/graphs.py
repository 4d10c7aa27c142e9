"""A traced network as graphs: the whole, with its regions in it, and each region's part as ordinary operations."""

from __future__ import annotations

import copy
import importlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.nn.modules.dropout import _DropoutNd

from driveprune import traced
from driveprune.compact import SameDropout
from driveprune.frozen import Reads, attribute, is_as_followed, kind_of
from driveprune.graph import Inputs
from driveprune.sparse.changes import Unchanged
from driveprune.sparse.choice import is_dense_faster
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.memory import Lease
from driveprune.sparse.region import Region, step_of


class Graphs:
    """What a network computes, as graphs; it holds none of the network's own modules but those in regions."""

    def __init__(self, found: fx.GraphModule, net: nn.Module, inputs: Inputs, *, choose: bool) -> None:
        known = dict(net.named_modules(remove_duplicate=False))
        placed = [node for node in found.graph.nodes if node.op == "placeholder"]
        self.fixed = {str(node.target): node.meta["fixed"] for node in placed if "fixed" in node.meta}
        """Inputs that decide what the network's code does, and what they were in the example."""
        self.kinds = {str(node.target): node.meta["kind"] for node in placed if "kind" in node.meta}
        """Other inputs that may be left out, and what kind they were of."""
        reads = found.meta.get("reads", {})
        self.reads: Reads = {(path, name): attribute(_part(net, path), name) for path, name in reads}
        self.unchanged: Unchanged | None = None
        self.extras: dict[str, nn.Module] = {}
        """Modules in the place of functions, such as a dropout; they follow the network's mode."""
        self.constants: dict[str, Tensor] = {}
        """Tensors of the network's code that are neither parameters nor buffers."""
        for node in found.graph.nodes:
            target = str(node.target)
            if node.op == "call_module" and target not in known:
                self.extras[target] = found.get_submodule(target)
            elif node.op == "get_attr" and "." not in target and not hasattr(net, target):
                self.constants[target] = getattr(found, target)
        self.ordinary = copy.deepcopy(found.graph)
        """The graph without regions."""
        modules = {**known, **self.extras}
        order = _noise(self.ordinary, {}, modules)
        self.graph, self.parts, self.regions = _with_regions(found, modules, inputs, choose=choose)
        if _noise(self.graph, self.parts, modules) != order:  # another order of random numbers is other noise
            again = fx.GraphModule(found, copy.deepcopy(self.ordinary))
            self.graph, self.parts, self.regions = _with_regions(again, modules, inputs, choose=choose, noise=False)
        self.in_order = _noise(self.graph, self.parts, modules) == order
        """Whether random numbers are drawn in the order of the network's own code."""
        self._prepare()

    def _prepare(self) -> None:
        self._names = [str(node.target) for node in self.graph.nodes if node.op == "placeholder"]
        self._code: Callable[..., Any] | None = None
        self._not_in_place: dict[nn.Module, nn.Module] = {}
        numbers = {name: number for number, name in enumerate(self._names)}
        self._deciding = [(numbers[name], name) for name in (*self.fixed, *self.kinds)]
        self._lease = Lease()  # those of the kernels end later: torch.fx has them in cycles

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files: graphs as plain data."""
        parts = {name: _as_data(part) for name, part in self.parts.items()}
        whole = {"graph": _as_data(self.graph), "ordinary": _as_data(self.ordinary), "parts": parts}
        rest = {name: getattr(self, name) for name in ("fixed", "kinds", "reads", "unchanged", "extras", "constants")}
        return {"regions": self.regions, **rest, **whole}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.regions, self.extras, self.constants = state["regions"], state["extras"], state["constants"]
        self.fixed, self.kinds, self.reads = state["fixed"], state["kinds"], state["reads"]
        self.unchanged = state["unchanged"]
        self.graph, self.ordinary = _from_data(state["graph"]), _from_data(state["ordinary"])
        self.parts = {name: _from_data(part) for name, part in state["parts"].items()}
        self._prepare()

    def watch(self, net: nn.Module) -> None:
        """Remember the network as it is: from now on, `why_not` tells what was changed."""
        nodes = [node for part in self.parts.values() for node in part.nodes if node.op == "call_module"]
        paths = {str(node.target) for node in nodes if str(node.target) not in self.extras}
        self.unchanged = Unchanged(net, self.reads, paths)

    def why_not(self) -> str | None:
        """What of the network is another one than that of the graphs, in words; None if they stand for it."""
        return self.unchanged.why_not() if self.unchanged is not None else None

    def decide_otherwise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """An input that decides what the network's code does, and is of another kind than in the example."""
        inputs = self._inputs(args, kwargs) if self._deciding else ()
        for number, name in self._deciding:
            given = inputs[number]
            if name in self.kinds and kind_of(given) != self.kinds[name]:
                return name
            if name in self.fixed and not is_as_followed(given, self.fixed[name]):
                return name
        return None

    def __call__(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the network would compute."""
        for path, module in self.extras.items():
            module.training = _part(net, path.rpartition(".")[0]).training
        return _plain(self.run(net, self.graph, self._inputs(args, kwargs)))

    def without_regions(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same by the network's layers, one by one, for a network that has no code of its own."""
        name = self.decide_otherwise(args, kwargs)
        if name is not None:
            raise ValueError(f"{name} decides what the network does; sparsify it with an example of this kind")
        if self._code is None:
            root = {name: _found(net, name) for name in {str(node.target) for node in _using(self.ordinary)}}
            self._code = type(fx.GraphModule({**root, **self.extras, **self.constants}, self.ordinary)).forward
        return _plain(self._code(net, *self._inputs(args, kwargs)))

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        names = self._names
        if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
            raise TypeError(f"the network takes {names}, got {len(args)} inputs and {sorted(kwargs)}")
        return args if len(args) == len(names) else traced.arguments(self.graph, Inputs(args, kwargs))

    def run(self, net: nn.Module, graph: fx.Graph, inputs: Sequence[Any]) -> Any:
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
            known[node] = self._value(net, node, values, named)
        raise AssertionError("a graph ends with its output")

    def _value(self, net: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if node.op == "call_module":
            region = self.regions.get(target)
            if region is not None and region.fits(*args):
                found = region(*args)
                return found[0] if len(found) == 1 else found
            if region is not None:
                return self.run(net, self.parts[target], args)
            return self._module(net, target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "get_attr":
            return self.constants[target] if target in self.constants else _found(net, target)
        return target(*args, **kwargs)

    def _module(self, net: nn.Module, path: str) -> nn.Module:
        """A module; if it writes over its input, a twin that does not: a graph may need the input later."""
        module = self.extras.get(path) or _part(net, path)
        if getattr(module, "inplace", None) is not True:
            return module
        twin = self._not_in_place.get(module)
        if twin is None:
            twin = self._not_in_place[module] = copy.copy(module)
            twin.inplace = False  # type: ignore[assignment]
        twin.training = module.training
        return twin


def _part(net: nn.Module, path: str) -> nn.Module:
    """What `get_submodule` finds, without its checks, which take longer than small layers."""
    found = net
    for name in path.split(".") if path else ():
        found = found._modules[name]  # type: ignore[assignment]
    return found


def _found(net: nn.Module, target: str) -> Any:
    """A module, a parameter, a buffer or another tensor by its path."""
    path, _, name = target.rpartition(".")
    return getattr(_part(net, path), name)


def _using(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that use something of the network's own."""
    return [node for node in graph.nodes if node.op in {"call_module", "get_attr"}]


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


@dataclass(frozen=True)
class _Place:
    """The value of an earlier node, in an argument of a graph that is plain data."""

    number: int


@dataclass(frozen=True)
class _Named:
    """A function by the module that has it and its name there."""

    module: str
    name: str

    def found(self) -> Any:
        """The function; modules are those of torch and of Python, see `_named`."""
        return getattr(importlib.import_module(self.module), self.name)


def _as_data(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """A graph as rows (name, operation, target, arguments by place and by name)."""
    numbers: dict[fx.Node, Any] = {node: _Place(number) for number, node in enumerate(graph.nodes)}
    return [
        (
            node.name,
            node.op,
            node.target if isinstance(node.target, str) else _named(node.target),
            _plain(fx.map_arg(node.args, numbers.__getitem__)),
            _plain(fx.map_arg(node.kwargs, numbers.__getitem__)),
        )
        for node in graph.nodes
    ]


def _from_data(rows: list[tuple[Any, ...]]) -> fx.Graph:
    """The graph of such rows."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def placed(value: Any) -> Any:
        return nodes[value.number] if isinstance(value, _Place) else value

    for name, operation, target, *arguments in rows:
        args, kwargs = (fx.node.map_aggregate(each, placed) for each in arguments)
        nodes.append(
            graph.create_node(operation, target.found() if isinstance(target, _Named) else target, args, kwargs, name)
        )
    return graph


def _named(function: Any) -> Any:
    """A function of torch by a name under which it is found again: many of them do not know theirs."""
    name = getattr(function, "__name__", "")
    for home in (torch, F, operator, math):
        if getattr(home, name, None) is function:
            return _Named(home.__name__, name)
    return function


_DRAWING = (_DropoutNd, SameDropout, nn.RReLU, nn.RNNBase, nn.MultiheadAttention, nn.Transformer)
_DRAWN = set(
    """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rand_like randn_like randint_like
    bernoulli multinomial normal poisson gumbel_softmax scaled_dot_product_attention
    uniform_ normal_ bernoulli_ exponential_ cauchy_ geometric_ log_normal_ random_
    """.split()
)


def _draws(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether an operation draws random numbers, or may."""
    if node.op == "call_module":
        return isinstance(modules.get(str(node.target)), _DRAWING)
    return node.op != "placeholder" and getattr(node.target, "__name__", node.target) in _DRAWN


def _noise(graph: fx.Graph, parts: Mapping[str, fx.Graph], modules: Mapping[str, nn.Module]) -> list[str]:
    """The operations that draw random numbers, in the order in which they run."""
    found: list[str] = []
    for node in graph.nodes:
        if str(node.target) in parts:
            found += _noise(parts[str(node.target)], {}, modules)
        elif _draws(node, modules):
            found.append(node.name)
    return found


class _Known(OperatorSupportBase):
    """Tells the partitioner which operations the kernels know."""

    def __init__(self, modules: Mapping[str, nn.Module], shapes: Mapping[str, torch.Size], noise: bool) -> None:
        self._modules, self._shapes, self._noise = modules, shapes, noise

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        """Whether a node can be a step of a region."""
        if not self._noise and _draws(node, self._modules):
            return False
        return step_of(node, self._modules, self._shapes) is not None


def _with_regions(
    found: fx.GraphModule, modules: Mapping[str, nn.Module], inputs: Inputs, *, choose: bool, noise: bool = True
) -> tuple[fx.Graph, dict[str, fx.Graph], dict[str, Region]]:
    """The graph with calls of regions in it, and the regions by name: as graphs, and as regions."""
    sparse = [module for module in modules.values() if isinstance(module, SparseLayer)]
    shapes = _shapes(found, inputs)
    if choose:
        _choose(found, modules, shapes)
    support = _Known(modules, shapes, noise)
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


def _choose(found: fx.GraphModule, modules: Mapping[str, nn.Module], shapes: Mapping[str, torch.Size]) -> None:
    """Measure each layer, and let torch compute those that it computes faster."""
    for node in found.graph.nodes:
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        shape = shapes.get(node.all_input_nodes[0].name) if isinstance(layer, SparseLayer) else None
        if isinstance(layer, SparseLayer) and shape is not None and len(shape) == layer.dims:
            layer.dense = is_dense_faster(layer, shape)
