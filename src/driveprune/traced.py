"""The network as a graph of operations (torch.fx), and what is known of each: value, signal, influence on the output.

An element of a value is *live* if a path of kept weights leads from the input to it, and *needed* if one leads from
it to the output. Both come from one run of the twin network (`driveprune.twin`) over the graph. Weights of a
convolution count by channels: where one tap of a kernel is kept, the channels are joined, however small the image.
"""

from __future__ import annotations

import copy
import inspect
import operator
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from driveprune.double import Double
from driveprune.frozen import FrozenError, Reads, kind_of, watched
from driveprune.gradients import evaluating, same_buffers, seeded
from driveprune.graph import Inputs, fill, signal_of
from driveprune.mask import parameters, unwrap
from driveprune.twin import Twin

_OUT_OF_PLACE = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
                 operator.itruediv: operator.truediv}  # fmt: skip


@dataclass(frozen=True)
class Element:
    """Which elements of a node's value are live, and which are needed."""

    live: Tensor
    needed: Tensor


def trace(
    model: nn.Module,
    *,
    training: bool = False,
    leaves: tuple[type[nn.Module], ...] = (),
    fixed: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """A copy of a network as a graph; names of parameters and buffers are those of the unwrapped model.

    What the network's code read of its modules' attributes is in `found.meta["reads"]`.

    Args:
        model: the network; what its code does in another mode than that of the trace is not seen.
        training: the graph must hold in training and in evaluation mode; an error if the network's code differs in
            anything but dropout.
        leaves: modules that are one operation each, beside those of torch.
        fixed: inputs that are always these, by their names, such as what `fixed_inputs` finds.

    """
    found = _trace(model, training, leaves, fixed or {})
    if training:
        evaluated = _trace(model, False, leaves, fixed or {})
        _follow_modes(found, evaluated)
        found.meta["reads"] = {**evaluated.meta["reads"], **found.meta["reads"]}
    return found


def fixed_inputs(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """What an example decides for the code of a network, by name: inputs that are None, a flag or a text."""
    try:
        bound = inspect.signature(unwrap(model).forward).bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        raise ValueError(f"the example is no input of the network: {error}") from None
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if value is None or isinstance(value, bool | str)}


def note_kinds(found: fx.GraphModule, model: nn.Module, inputs: Inputs) -> None:
    """Write down what an example has for inputs that may be left out, in `node.meta["kind"]`."""
    bound = inspect.signature(unwrap(model).forward).bind(*inputs.args, **inputs.kwargs)
    bound.apply_defaults()
    for node in found.graph.nodes:
        if node.op == "placeholder" and node.args and "fixed" not in node.meta and node.target in bound.arguments:
            node.meta["kind"] = kind_of(bound.arguments[node.target])


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else `self.count.item()` would be a constant

    def __init__(self, leaves: tuple[type[nn.Module], ...] = (), fixed: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._leaves, self._fixed = leaves, fixed or {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self._leaves) or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> Any:
        """Stand-ins for the inputs, but for those that are fixed."""
        function, inputs = super().create_args_for_root(*args, **kwargs)
        return function, [self._or_fixed(each) for each in inputs]

    def _or_fixed(self, given: Any) -> Any:
        """A stand-in, or what it always is; the graph remembers it beside the input, which it does not use."""
        name = str(given.node.target) if isinstance(given, fx.Proxy) else ""
        if name not in self._fixed:
            return given
        given.node.meta["fixed"] = self._fixed[name]
        return self._fixed[name]


def _trace(
    model: nn.Module, training: bool, leaves: tuple[type[nn.Module], ...], fixed: Mapping[str, Any]
) -> fx.GraphModule:
    plain = copy.deepcopy(unwrap(model)).train(training)
    hooked = [name for name, module in plain.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    if hooked:
        raise ValueError(f"{hooked[0] or 'the network'} has forward hooks, which torch.fx does not see: remove them")
    try:
        graph, reads = _graph(plain, leaves, fixed)
        found = fx.GraphModule(plain, graph, type(plain).__name__)
    except FrozenError:
        raise
    except Exception as error:
        if "to buffer" in str(error):  # torch's words for an assignment of what is computed
            raise FrozenError("its code writes into a buffer at each call, which a graph would not do") from None
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch.fx cannot trace the network, so its channels cannot be followed: {said}{place_of(error)}"
        ) from None
    _functionalise(found)
    found.meta["reads"] = reads
    return found


def _graph(plain: nn.Module, leaves: tuple[type[nn.Module], ...], fixed: Mapping[str, Any]) -> tuple[fx.Graph, Reads]:
    """The graph, and what was read meanwhile; what a network prepares at its first call, it does not do at each."""
    try:
        with same_buffers(plain), watched(plain, leaves) as reads:
            return _Tracer(leaves, fixed).trace(plain), reads
    except FrozenError:
        with watched(plain, leaves) as reads:
            return _Tracer(leaves, fixed).trace(plain), reads


_OWN = (Path(torch.__file__).parent, Path(__file__).parent)


def place_of(error: BaseException) -> str:
    """The line of the network's code at which an error was raised, if it was raised in the network's code."""
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file() and not any(Path(frame.filename).is_relative_to(own) for own in _OWN)
    ]
    if not theirs:
        return ""
    at = theirs[-1]
    return f" (at {Path(at.filename).name}:{at.lineno}, in {at.name}: `{at.line}`)"


def _functionalise(found: fx.GraphModule) -> None:
    """Operations that write into their input write into a new tensor instead."""
    layers = dict(found.named_modules())
    for node in list(found.graph.nodes):
        module = layers.get(str(node.target)) if node.op == "call_module" else None
        name = getattr(node.target, "__name__", "")
        if module is not None and getattr(module, "inplace", None) is True:
            pass
        elif node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
        elif node.op == "call_function" and node.target in _OUT_OF_PLACE:
            node.target = _OUT_OF_PLACE[node.target]
        elif node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__"):
            node.target = node.target[:-1]
        elif node.op == "call_function" and name.endswith("_") and hasattr(torch, name[:-1]):
            node.target = getattr(torch, name[:-1])
        else:
            continue
        _check_written(found.graph, node)
        _use_instead(found, node)
    for module in layers.values():
        if getattr(module, "inplace", None) is True:
            module.inplace = False
    found.recompile()


_DROPOUTS: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout, F.dropout1d: nn.Dropout1d, F.dropout2d: nn.Dropout2d, F.dropout3d: nn.Dropout3d,
}  # fmt: skip


def _follow_modes(found: fx.GraphModule, evaluating: fx.GraphModule) -> None:
    """`F.dropout(x, p, self.training)` becomes a module, which follows the mode; any other change is an error."""
    nodes = list(found.graph.nodes)
    others = list(evaluating.graph.nodes)
    for node, other in zip(nodes, others, strict=len(nodes) == len(others)):
        flags = [each.kwargs.get("training", each.args[2] if len(each.args) > 2 else None) for each in (node, other)]
        if node.op == "call_function" and node.target in _DROPOUTS and flags == [True, False]:
            p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
            block = next(reversed(node.meta.get("nn_module_stack") or {}), "")  # whose mode it follows
            path = f"{block}.{node.name}_module" if block else f"{node.name}_module"
            for net, old in ((found, node), (evaluating, other)):
                _replace(net, old, path, _DROPOUTS[node.target](p))
    if found.code != evaluating.code:
        raise ValueError(
            "the network's code does something else in training than in evaluation: it cannot be compacted"
        )


def _replace(net: fx.GraphModule, node: fx.Node, name: str, module: nn.Module) -> None:
    """Put a module in the place of a function of one tensor."""
    net.add_submodule(name, module)
    with net.graph.inserting_before(node):
        node.replace_all_uses_with(net.graph.call_module(name, (node.args[0],)))
    net.graph.erase_node(node)
    net.recompile()


def module_of(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A network of a graph that something else has found, in which nothing is written in place."""
    found = fx.GraphModule(root, graph, type(root).__name__)
    _functionalise(found)
    return found


def in_both_modes(training: fx.GraphModule, evaluating: fx.GraphModule) -> fx.GraphModule:
    """The graph that holds in both modes, of one for each; an error if they differ in anything but dropout."""
    _follow_modes(training, evaluating)
    return training


_VIEWS = set(
    """
    view view_as reshape flatten unflatten squeeze unsqueeze transpose permute movedim swapaxes narrow select expand
    expand_as chunk split unbind detach getitem t T mT data getattr contiguous diagonal unfold
    """.split()
)


def _check_written(graph: fx.Graph, node: fx.Node) -> None:
    """An error if others see what a node writes: a part of the network, an input, or a tensor that is used later."""
    written = node.args[0] if node.args else None
    source = written
    while isinstance(source, fx.Node) and _is_view(source):
        source = source.args[0] if source.args else None
    if not isinstance(written, fx.Node) or not isinstance(source, fx.Node):
        return
    if source.op in {"get_attr", "placeholder"}:
        what = "its input" if source.op == "placeholder" else source.target
        raise FrozenError(f"its code writes into {what}, which a graph would not do")
    order = {each: place for place, each in enumerate(graph.nodes)}
    views = {source}
    for each in graph.nodes:
        if _is_view(each) and each.args and each.args[0] in views and order[each] < order[node]:
            views.add(each)
    later = [user for view in views - {written} for user in view.users if order[user] > order[node]]
    if later:
        raise FrozenError("its code writes into a part of a tensor, which a graph would not see in the whole")


def _is_view(node: fx.Node) -> bool:
    """Whether what a node computes may be its input's memory."""
    return node.op in {"call_function", "call_method"} and getattr(node.target, "__name__", node.target) in _VIEWS


def _use_instead(found: fx.GraphModule, node: fx.Node) -> None:
    """Whoever used the tensor that was written into, after that, uses the new one."""
    written = node.args[0] if node.args else None
    if isinstance(written, fx.Node):
        order = {each: place for place, each in enumerate(found.graph.nodes)}
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)


def arguments(graph: fx.Graph, inputs: Inputs) -> list[Any]:
    """An example input as the list of arguments that the graph takes."""
    names = [node for node in graph.nodes if node.op == "placeholder"]
    given = list(inputs.args)
    for node in names[len(given) :]:
        name = str(node.target)
        if name in inputs.kwargs:
            given.append(inputs.kwargs[name])
        elif node.args:
            given.append(node.args[0])  # its default
        else:
            raise ValueError(f"the example lacks the network's input {name!r}")
    return given


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value
        return value


@torch.no_grad()
def values(found: fx.GraphModule, inputs: Inputs) -> dict[str, Any]:
    """What every node computes for an example, in evaluation mode, in float64, by the node's name."""
    exact = copy.deepcopy(found).double()
    recorder = _Recorder(exact)

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    with evaluating(exact), seeded(exact, 0), Double():
        recorder.run(*tree_map(double, arguments(found.graph, inputs)))
    return {node.name: value for node, value in recorder.values.items()}


@torch.no_grad()
def recorded(found: fx.GraphModule, inputs: Inputs) -> dict[str, Any]:
    """What every node computes for an example, in evaluation mode, as it is, by the node's name."""
    recorder = _Recorder(found)
    with evaluating(found), seeded(found, 0):
        recorder.run(*arguments(found.graph, inputs))
    return {node.name: value for node, value in recorder.values.items()}


def elements(found: fx.GraphModule, mask: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Element]:
    """Live and needed elements of every node whose value is a floating tensor that depends on the input."""
    with torch.inference_mode(False), torch.enable_grad(), seeded(found, 0):
        twin = copy.deepcopy(found).cpu().double()
        weights = parameters(twin)
        fill(weights, by_channels(mask))
        names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        recorder = _Recorder(twin)
        given = tree_map(signal_of, arguments(found.graph, inputs))
        mode = Twin(names, {name: weight.numel() for name, weight in weights.items()}, mixing=True)
        with evaluating(twin), mode, torch.autocast("cpu", enabled=False):
            recorder.run(*given)
        output = next(value for node, value in recorder.values.items() if node.op == "output")
        signal = sum((leaf.sum() for leaf in tree_leaves(output) if _differentiable(leaf)), torch.zeros(()))
        known = {node.name: value for node, value in recorder.values.items() if _differentiable(value)}
        found_gradients: tuple[Tensor | None, ...] = (None,) * len(known)
        if signal.requires_grad:
            found_gradients = torch.autograd.grad(signal, list(known.values()), allow_unused=True)
    return {
        name: Element(value.detach() != 0, torch.zeros_like(value, dtype=torch.bool) if slope is None else slope != 0)
        for (name, value), slope in zip(known.items(), found_gradients, strict=True)
    }


def by_channels(mask: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A mask in which a kernel of a convolution is kept as a whole if one tap of it is."""
    return {
        name: kept.flatten(2).any(2).view(*kept.shape[:2], *[1] * (kept.dim() - 2)).expand_as(kept)
        if kept.dim() > 2
        else kept
        for name, kept in mask.items()
    }


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def depends_on_input(found: fx.GraphModule) -> set[str]:
    """The names of the nodes that are computed from an input."""
    names: set[str] = set()
    for node in found.graph.nodes:
        if node.op == "placeholder" or any(before.name in names for before in node.all_input_nodes):
            names.add(node.name)
    return names


def activation_bytes(found: Mapping[str, Any]) -> int:
    """The memory of all values of a run in float32 (each tensor once)."""
    tensors = {id(leaf): leaf for value in found.values() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
    return sum(4 * leaf.numel() if leaf.is_floating_point() else leaf.nbytes for leaf in tensors.values())
