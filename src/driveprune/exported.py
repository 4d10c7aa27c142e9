"""Networks that torch.fx cannot trace, as torch.export sees them: one graph of the layers and functions of torch.

torch.export runs a network on an example, so its code may branch on shapes and options. What it finds are ATen
operations; they are put back into the layers that they came from, and into functions that have a name in torch, which
`driveprune.channels` and `driveprune.twin` know. What is found holds for the example's kind of input, in one mode.
"""

from __future__ import annotations

import copy
import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import guarding_hint_or_throw, is_concrete_int
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.numbers import int_oo

from driveprune import traced
from driveprune.frozen import watched
from driveprune.gradients import same_buffers, seeded
from driveprune.graph import Inputs
from driveprune.mask import unwrap

_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "upsample_bilinear2d": F.interpolate, "upsample_nearest2d": F.interpolate, "upsample_bicubic2d": F.interpolate,
}  # fmt: skip
_FUNCTIONS = set(
    """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm group_norm embedding
    dropout relu relu6 gelu silu mish elu selu celu leaky_relu softplus hardtanh hardswish hardsigmoid logsigmoid pad
    scaled_dot_product_attention adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d
    avg_pool3d max_pool1d max_pool2d max_pool3d pixel_shuffle pixel_unshuffle one_hot grouped_mm
    """.split()
)
_LAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,), "conv1d": (nn.Conv1d,), "conv2d": (nn.Conv2d,), "conv3d": (nn.Conv3d,),
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "layer_norm": (nn.LayerNorm,),
    "group_norm": (nn.GroupNorm,), "embedding": (nn.Embedding,),
}  # fmt: skip


def trace(model: nn.Module, inputs: Inputs, *, training: bool = False) -> fx.GraphModule:
    """A copy of a network as a graph, for inputs like an example; an error if torch.export cannot follow it.

    Args:
        model: the network.
        inputs: an example; what the code decides by other inputs than tensors is as it is for them.
        training: the graph must hold in training and in evaluation mode.

    """
    found = _trace(model, inputs, training)
    return traced.in_both_modes(found, _trace(model, inputs, False)) if training else found


def _trace(model: nn.Module, inputs: Inputs, training: bool) -> fx.GraphModule:
    plain = copy.deepcopy(unwrap(model)).train(training)
    named = _by_name(plain, inputs)
    with suppress(Exception), torch.no_grad(), same_buffers(plain), seeded(plain, 0):
        plain(**named)  # what a network prepares at its first call is no change at each call
    with watched(plain) as reads:
        program, rows = _program(plain, named)
    graph = _Lowering(plain, program, named).graph()
    for node in graph.nodes:
        if node.op == "placeholder" and node.target in rows:
            node.meta["rows"] = rows[node.target]
        elif node.op == "placeholder" and not isinstance(named[str(node.target)], Tensor):
            node.meta["fixed"] = named[str(node.target)]
    for module in plain.modules():  # what hooks did is in the graph
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    found = traced.module_of(plain, graph)
    found.meta["reads"] = reads
    return found


def _by_name(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The example's inputs by the names that the network has for them."""
    signature = inspect.signature(model.forward)
    found: dict[str, Any] = {}
    given = signature.bind(*inputs.args, **inputs.kwargs)
    last = max((list(signature.parameters).index(name) for name in given.arguments), default=-1)
    left_out = {
        name: each.default
        for place, (name, each) in enumerate(signature.parameters.items())
        if place < last and name not in given.arguments and each.default is not inspect.Parameter.empty
    }
    arguments = {**left_out, **given.arguments}
    for name, value in ((name, arguments[name]) for name in signature.parameters if name in arguments):
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL and value:
            raise ValueError("it takes any number of inputs")
        found |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    for name, value in found.items():
        if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise ValueError(f"its input {name} is a {type(value).__name__} of tensors")
    return found


def _program(plain: nn.Module, named: Mapping[str, Any]) -> tuple[fx.GraphModule, dict[str, int]]:
    """What torch.export finds, for any number of examples if it can be; if not, how many rows inputs must have.

    One example would be taken for all.
    """
    unlisted = named.keys() - inspect.signature(plain.forward).parameters.keys()
    if unlisted:
        raise ValueError(f"it does not list its input {min(unlisted)}")
    shapes = {name: {0: torch.export.Dim.AUTO} if _has_batch(value) else None for name, value in named.items()}
    twice = tree_map(lambda leaf: torch.cat([leaf, leaf]) if _has_batch(leaf) else leaf, dict(named))
    first: Exception | None = None
    for given in (twice, dict(named)):
        try:
            with _quiet():
                found = torch.export.export(plain, (), given, dynamic_shapes=shapes, strict=False)
                if _rows(found) and given is twice:
                    continue  # the code decides by the number of examples: let it be that of the example
                return found.module(check_guards=False), _rows(found)
        except Exception as error:  # whatever the user's forward raises when it is given other numbers
            first = error
    assert first is not None
    raise first


def _rows(found: torch.export.ExportedProgram) -> dict[str, int]:
    """Inputs that must have as many rows as in the example, by name."""
    values = {node.name: node.meta.get("val") for node in found.graph.nodes if node.op == "placeholder"}
    given = {name: values.get(name) for name in found.graph_signature.user_inputs if isinstance(name, str)}
    shapes = {name: each.shape for name, each in given.items() if isinstance(each, Tensor) and each.dim()}
    limited = {str(number) for number, span in found.range_constraints.items() if span.upper != int_oo}
    return {
        name: int(guarding_hint_or_throw(shape[0]))
        for name, shape in shapes.items()
        if is_concrete_int(shape[0]) or str(shape[0]) in limited
    }


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch.export says to its own users."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Lowering:
    """Writes a graph of ATen operations anew, in layers and functions of torch."""

    def __init__(self, plain: nn.Module, program: fx.GraphModule, named: Mapping[str, Any]) -> None:
        self.plain, self.program, self.named = plain, program, named
        parameters = inspect.signature(plain.forward).parameters.values()
        self.defaults = {
            each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty
        }
        self.new = fx.Graph()
        self.env: dict[fx.Node, Any] = {}

    def graph(self) -> fx.Graph:
        """The new graph; operations whose results nobody uses are not in it."""
        old = self.program.graph
        given = [node for node in old.nodes if node.op == "placeholder"]
        optional = False
        for name, value in self.named.items():
            node = next((each for each in given if str(each.target) == name), None)
            is_tensor = isinstance(value, Tensor)
            default = () if is_tensor and not optional else (self.defaults.get(name),)
            optional = bool(default)  # after an input that may be left out, all may be
            placed = self.new.placeholder(name, None, *default)
            if node is not None:
                self.env[node] = placed
        for node in old.nodes:
            if node not in self.env:
                self.env[node] = self._written(node)
        self.new.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        self.new.lint()
        return self.new

    def _written(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if node.op == "output":
            return self.new.output(self._output(node))
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            return self._operation(node, *self._values((node.args, node.kwargs)))
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._inlined(node)
        return self.new.node_copy(node, lambda each: self.env[each]) if node.op == "call_function" else None

    def _values(self, given: Any) -> Any:
        return fx.node.map_arg(given, lambda each: self.env[each])

    def _attribute(self, name: str) -> fx.Node | None:
        """A parameter or buffer of the network; constants of its code become buffers."""
        value = operator.attrgetter(name)(self.program)
        if not isinstance(value, Tensor):
            return None
        if _tensor_of(self.plain, name) is None:
            name = name.replace(".", "_")
            self.plain.register_buffer(name, value.detach().clone(), persistent=False)
        return self.new.get_attr(name)

    def _inlined(self, node: fx.Node) -> Any:
        """A part of the code that is without gradients: its inputs are detached."""
        if "set_grad" not in str(node.target):
            raise ValueError(f"it uses {node.target}")
        enabled, part, *given = node.args
        inner: Any = operator.attrgetter(str(part.target))(self.program)  # type: ignore[union-attr]
        places = iter(given)
        for each in inner.graph.nodes:
            if each.op == "placeholder":
                value = self._values(next(places))
                self.env[each] = value if enabled else self._detached(value)
            elif each.op == "output":
                return self._values(each.args[0])
            else:
                self.env[each] = self._written(each)
        return None

    def _detached(self, value: Any) -> Any:
        is_float = isinstance(value, fx.Node) and value.op == "get_attr"
        return self.new.call_method("detach", (value,)) if is_float or _is_made(value) else value

    def _output(self, node: fx.Node) -> Any:
        """The output as the network gives it: tuples, dictionaries and classes that are made of names and values."""
        leaves = iter(self._values(tuple(node.args[0])))  # type: ignore[arg-type]
        spec = self.program.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
        return self._structure(spec, leaves)

    def _structure(self, spec: Any, leaves: Any) -> Any:
        if spec.is_leaf():
            return next(leaves)
        parts = [self._structure(child, leaves) for child in spec.children()]
        if spec.type in (tuple, list):
            return spec.type(parts)
        if spec.type is dict:
            return dict(zip(spec.context, parts, strict=True))
        if issubclass(spec.type, dict) and isinstance(spec.context, list):  # transformers' outputs
            return self.new.call_function(spec.type, (), dict(zip(spec.context, parts, strict=True)))
        raise ValueError(f"it gives a {spec.type.__name__} (of a language model: set use_cache=False)")

    # Operations.

    def _operation(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        name = target._schema.name.rpartition("::")[2]
        if name in _CHECKS or self._counts_batches(name, args):
            return None
        if name in _LAYERS and (found := self._layer(name, args)) is not None:
            return found
        if name in ("slice", "select", "index"):
            return self._part(name, node, args)
        kwargs = {key: value for key, value in kwargs.items() if value is not None and key != "cudnn_enable"}
        if name == "sym_size":
            return self.new.call_method("size", args)
        if name in ("to", "_to_copy"):
            kind = next((each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)), None)
            return args[0] if kind is None else self.new.call_method("to", (args[0], kind))
        if name == "embedding":
            return self.new.call_function(F.embedding, (args[1], args[0]))
        if name == "batch_norm":
            x, weight, bias, mean, variance, training, momentum, eps, *_ = args
            return self.new.call_function(F.batch_norm, (x, mean, variance, weight, bias, training, momentum, eps))
        if name.startswith("upsample_"):
            return self._resized(name, args)
        return self._call(name, target, args, kwargs)

    def _call(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """The operation under the name that it has in torch."""
        if name in _OPERATORS and len(args) == 2 and not kwargs:
            return self.new.call_function(_OPERATORS[name], args)
        if name in _FUNCTIONS:
            return self.new.call_function(getattr(F, name), args, kwargs)
        if hasattr(Tensor, name) and args and isinstance(args[0], fx.Node):
            return self.new.call_method(name, args, kwargs)
        known = getattr(torch, name, None)
        return self.new.call_function(known if callable(known) else target, args, kwargs)

    def _counts_batches(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether it is the counter of a normalisation, which that layer does itself."""
        into = args[0] if args else None
        return name == "add_" and isinstance(into, fx.Node) and str(into.target).endswith("num_batches_tracked")

    def _layer(self, name: str, args: tuple[Any, ...]) -> fx.Node | None:
        """The call of the layer that an operation came from, if it is one that does nothing else."""
        place = 0 if name == "embedding" else 2 if name in ("layer_norm", "group_norm") else 1
        weight = args[place] if len(args) > place else None
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            return None
        path, _, leaf = str(weight.target).rpartition(".")
        layer = dict(self.plain.named_modules(remove_duplicate=False)).get(path)
        kind = next((each for each in _LAYERS[name] if isinstance(layer, each)), None)
        if layer is None or kind is None or leaf != "weight" or not _is_its_call(name, layer, path, args):
            return None
        if type(layer) is not kind:  # a kind of its own: what else it does is in the graph
            plain = copy.copy(layer)
            plain.__class__ = kind
            self.plain.set_submodule(path, plain)
        return self.new.call_module(path, (args[1 if name == "embedding" else 0],))

    def _part(self, name: str, node: fx.Node, args: tuple[Any, ...]) -> Any:
        """Slices and indices as Python writes them."""
        rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
        if name == "index":
            index = tuple(slice(None) if each is None else each for each in args[1])
            return self.new.call_function(operator.getitem, (args[0], index))
        dim = (args[1] if len(args) > 1 else 0) % rank
        if name == "select":
            piece = args[2]
        else:
            start, end, step = _filled(args[2:], (None, None, 1))
            piece = slice(start or None, None if isinstance(end, int) and end >= 1 << 62 else end, step)
            if piece == slice(None, None, 1):
                return args[0]
            piece = slice(piece.start, piece.stop, None if step == 1 else step)
        return self.new.call_function(operator.getitem, (args[0], (*[slice(None)] * dim, piece)))

    def _resized(self, name: str, args: tuple[Any, ...]) -> fx.Node:
        mode = name.removeprefix("upsample_").removesuffix("2d")
        corners, scale = (None, args[2]) if mode == "nearest" else (args[2], args[3])
        size, scale = (args[1], None) if args[1] is not None else (None, scale)
        return self.new.call_function(F.interpolate, (args[0], size, scale, mode, corners))


def _is_its_call(name: str, layer: Any, path: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation is what the plain layer does: with its own bias, its own numbers."""

    def own(place: int, leaf: str) -> bool:
        given, has = args[place] if len(args) > place else None, getattr(layer, leaf, None) is not None
        return str(given.target) == f"{path}.{leaf}" if isinstance(given, fx.Node) else not has

    if name == "linear":
        return own(2, "bias")
    if name.startswith("conv"):
        n = int(name[4])
        stride, padding, dilation, groups = _filled(args[3:], ([1] * n, [0] * n, [1] * n, 1))
        asked = [list(each) if isinstance(each, list | tuple) else each for each in (stride, padding, dilation)]
        its = [list(layer.stride), list(layer.padding), list(layer.dilation)]
        return own(2, "bias") and asked == its and groups == layer.groups and layer.padding_mode == "zeros"
    if name == "batch_norm":
        same = args[7] == layer.eps and args[6] == layer.momentum
        return own(2, "bias") and own(3, "running_mean") and own(4, "running_var") and same
    if name == "layer_norm":
        return (
            own(3, "bias")
            and list(args[1]) == list(layer.normalized_shape)
            and _filled(args[4:], (1e-5,))[0] == layer.eps
        )
    if name == "group_norm":
        return own(3, "bias") and args[1] == layer.num_groups and _filled(args[4:], (1e-5,))[0] == layer.eps
    return layer.max_norm is None


def _filled(given: tuple[Any, ...], defaults: tuple[Any, ...]) -> list[Any]:
    """Arguments, with the defaults of those that are not given."""
    return [*given[: len(defaults)], *defaults[len(given) :]]


def _tensor_of(module: nn.Module, name: str) -> Tensor | None:
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def _is_made(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op in ("call_function", "call_method", "call_module")
