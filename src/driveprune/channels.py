"""Which channel is which: the index spaces of a traced network.

Operations say which atoms (see atoms.py) are the same: a sum joins the atoms of its operands, a convolution joins
those of its input with those of its weight, concatenation puts them side by side. Along dimensions that an operation
is not known to treat index by index nothing can be removed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.pooling import (
    _AdaptiveAvgPoolNd,
    _AdaptiveMaxPoolNd,
    _AvgPoolNd,
    _LPPoolNd,
    _MaxPoolNd,
)

from driveprune.atoms import Axes, Axis, Space, Use

_ALIKE = set(
    """
    relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign sigmoid tanh hardtanh hardswish hardsigmoid
    logsigmoid tanhshrink softshrink hardshrink threshold clamp clamp_min clamp_max clip abs neg sqrt rsqrt square
    reciprocal exp log log1p sin cos erf contiguous clone detach float double to type dropout alpha_dropout pow
    """.split()
)
"""Functions of one tensor that treat each element by itself."""
_BINARY = {"add", "sub", "mul", "div", "truediv", "true_divide", "maximum", "minimum", "iadd", "pow"}
POOLS_BY_NAME = set(
    """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate pad
    """.split()
)
"""Functions that treat each channel by itself, whatever they do along the other dimensions."""
_ALIKE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink,
    nn.Hardshrink, nn.Threshold, nn.Identity, _DropoutNd,
)  # fmt: skip
POOLS = (
    _MaxPoolNd, _AvgPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _LPPoolNd, nn.Upsample, nn.ZeroPad1d,
    nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ReflectionPad1d,
    nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d,
)  # fmt: skip


def follow(found: fx.GraphModule, known: Mapping[str, Any], signals: set[str]) -> Space:
    """The index spaces of a traced network.

    Args:
        found: the network.
        known: what every node computes for an example.
        signals: the nodes that depend on the input.

    """
    walk = _Walk(found, known, signals)
    for node in found.graph.nodes:
        walk.visit(node)
    return walk.space


class _Walk:
    """Goes through a graph node by node, in the order in which it is computed."""

    def __init__(self, found: fx.GraphModule, known: Mapping[str, Any], signals: set[str]) -> None:
        self.found, self.known, self.signals, self.space = found, known, signals, Space()
        self._tensors = {**dict(found.named_parameters(remove_duplicate=False)), **dict(found.named_buffers())}
        self._axes_of: dict[Tensor, Axes] = {}

    def visit(self, node: fx.Node) -> None:
        """Give a node's value its axes, and join what it joins."""
        value = self.known.get(node.name)
        axes: Axes | None = None
        if node.op == "placeholder":
            axes = (None,) * value.dim() if isinstance(value, Tensor) else ()
        elif node.op == "get_attr" and str(node.target) in self._tensors:
            axes = self.tensor(str(node.target))
        elif node.op == "output":
            self._pin_inputs(node)
            axes = ()
        elif not isinstance(value, Tensor):
            axes = self._no_tensor(node)
        elif node.name in self.signals:
            axes = self._module(node) if node.op == "call_module" else self._function(node)
        if axes is None:
            self._pin_inputs(node)
            if node.name in self.signals and not _is_followed(self.found, node):
                self._pin_all_before(node)
            axes = (None,) * value.dim() if isinstance(value, Tensor) else ()
        self.space.axes[node.name] = axes

    def tensor(self, name: str) -> Axes:
        """The axes of a parameter or buffer; tied ones have the same."""
        tensor = self._tensors[name]
        if tensor not in self._axes_of:
            self._axes_of[tensor] = tuple(self.space.new(size) for size in tensor.shape)
        self.space.tensors[name] = self._axes_of[tensor]
        return self._axes_of[tensor]

    def _pin_inputs(self, node: fx.Node) -> None:
        """An operation of which nothing is known: nothing of what it takes can be removed."""
        for before in node.all_input_nodes:
            self.space.pin(*self.space.axes.get(before.name, ()))
        if node.op == "call_module":
            module = self.found.get_submodule(str(node.target))
            inner = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
            for name, _ in inner:
                self.space.pin(*self.tensor(f"{node.target}.{name}"))

    def _pin_all_before(self, node: fx.Node) -> None:
        """An operation through which signals cannot be followed: all that it was made of may matter to it."""
        before, seen = [*node.all_input_nodes], set[fx.Node]()
        while before:
            one = before.pop()
            if one not in seen:
                seen.add(one)
                self.space.pin(*self.space.axes.get(one.name, ()))
                before += one.all_input_nodes

    def axes(self, node: Any) -> Axes:
        """The axes of an argument; those of a number are none."""
        return self.space.axes.get(node.name, ()) if isinstance(node, fx.Node) else ()

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a node's value."""
        return tuple(self.known[node.name].shape)

    # Modules.

    def _module(self, node: fx.Node) -> Axes | None:
        module, path = self.found.get_submodule(str(node.target)), str(node.target)
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            return None
        x = node.args[0]
        match module:
            case nn.Linear():
                return self._linear(
                    node, x, f"{path}.weight", f"{path}.bias" if module.bias is not None else "", path
                )
            case _ConvTransposeNd():
                return self._transposed(node, x, module, path)
            case _ConvNd():
                return self._convolution(node, x, module, path)
            case _InstanceNorm() if not self._is_batched(module, x):
                return None
            case _BatchNorm() | _InstanceNorm():
                return self._per_channel(x, path, ("weight", "bias", "running_mean", "running_var"))
            case nn.PReLU():
                return self.axes(x) if module.num_parameters == 1 else self._per_channel(x, path, ("weight",))
            case nn.Flatten() | nn.Unflatten():
                return self._reshaped(x, self.shape(node))
        if isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):  # its noise is not a factor
            return None
        if isinstance(module, _ALIKE_MODULES):
            return self.axes(x)
        return self._pooled(x) if isinstance(module, POOLS) and self._is_batched(module, x) else None

    def _is_batched(self, module: nn.Module, x: fx.Node) -> bool:
        """Whether a layer for images (or rows, or volumes) gets a batch of them, with channels in dimension 1."""
        rank = next((int(letter) for letter in type(module).__name__ if letter in "123"), len(self.axes(x)) - 2)
        return len(self.axes(x)) == rank + 2

    def _linear(self, node: fx.Node, x: fx.Node, weight: str, bias: str, path: str) -> Axes:
        outputs, inputs = self.tensor(weight)
        self._sum_over(node, x, path, len(self.axes(x)) - 1, inputs, bias=True, padded=False)
        if bias:
            self.space.join(outputs, self.tensor(bias)[0])
        return (*self.axes(x)[:-1], outputs)

    def _convolution(self, node: fx.Node, x: fx.Node, module: _ConvNd, path: str) -> Axes | None:
        weight = self.tensor(f"{path}.weight")
        outputs, dim = weight[0], len(self.axes(x)) - (len(weight) - 1)
        if module.bias is not None:
            self.space.join(outputs, self.tensor(f"{path}.bias")[0])
        self.space.pin(*weight[2:])
        if module.groups == 1:
            flat = module.padding_mode != "zeros" or module.padding in ("valid", 0) or set(module.padding) == {0}
            self._sum_over(node, x, path, dim, weight[1], bias=flat, padded=not flat)
        else:
            self._grouped(node, x, module, path, dim)
        return (*self.axes(x)[:dim], outputs, *[None] * (len(weight) - 2))

    def _grouped(self, node: fx.Node, x: fx.Node, module: _ConvNd, path: str, dim: int) -> None:
        inputs, outputs = self.axes(x)[dim], self.tensor(f"{path}.weight")[0]
        assert outputs is not None
        self.space.pin(self.tensor(f"{path}.weight")[1])
        if inputs is None:
            self.space.pin(outputs)
        elif module.groups == module.in_channels:  # one channel a group: it goes on as it is
            self.space.join(np.repeat(inputs, module.out_channels // module.groups), outputs)
        else:
            self.space.uses.append(Use(node.name, x.name, path, inputs, dim, bias=False, padded=False))
            pieces = zip(np.split(inputs, module.groups), np.split(outputs, module.groups), strict=True)
            self.space.groups += list(pieces)

    def _transposed(self, node: fx.Node, x: fx.Node, module: _ConvTransposeNd, path: str) -> Axes | None:
        if module.groups != 1:
            return None
        weight = self.tensor(f"{path}.weight")
        dim = len(self.axes(x)) - (len(weight) - 1)
        if module.bias is not None:
            self.space.join(weight[1], self.tensor(f"{path}.bias")[0])
        self.space.pin(*weight[2:])
        self._sum_over(node, x, path, dim, weight[0], bias=False, padded=False)
        return (*self.axes(x)[:dim], weight[1], *[None] * (len(weight) - 2))

    def _sum_over(
        self, node: fx.Node, x: fx.Node, path: str, dim: int, inputs: Axis, *, bias: bool, padded: bool
    ) -> None:
        joined = self.space.join(inputs, self.axes(x)[dim])
        if joined is not None:
            self.space.uses.append(Use(node.name, x.name, path, joined, dim, bias, padded))

    def _per_channel(self, x: fx.Node, path: str, names: Sequence[str]) -> Axes:
        axes = self.axes(x)
        for name in names:
            if f"{path}.{name}" in self._tensors:
                self.space.join(axes[1], self.tensor(f"{path}.{name}")[0])
        return axes

    def _pooled(self, x: fx.Node) -> Axes:
        """Dimensions 0 and 1 as they are; along the others nothing is known."""
        axes = self.axes(x)
        self.space.pin(*axes[2:])
        return (*axes[:2], *[None] * (len(axes) - 2))

    # Functions and methods.

    def _function(self, node: fx.Node) -> Axes | None:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        first = node.args[0] if node.args else None
        if name in _BINARY and self._operands(node):
            return self._together(node)
        if name in ("cat", "concat", "concatenate"):
            return self._side_by_side(node)
        if not isinstance(first, fx.Node) or not isinstance(self.known.get(first.name), Tensor):
            return None
        if name in _ALIKE and self.shape(first) == self.shape(node):
            return self.axes(first) if node.all_input_nodes == [first] else None
        if name in POOLS_BY_NAME:
            return self._pooled_if_apart(node, first)
        handlers: dict[str, Callable[[fx.Node, fx.Node], Axes | None]] = {
            "flatten": lambda node, x: self._reshaped(x, self.shape(node)),
            "unsqueeze": lambda node, x: self._reshaped(x, self.shape(node)),
            "squeeze": lambda node, x: self._reshaped(x, self.shape(node)),
            "view": self._viewed, "reshape": self._viewed, "transpose": self._transpose, "permute": self._permute,
            "mean": self._reduced, "sum": self._reduced, "amax": self._reduced, "amin": self._reduced,
            "getitem": self._part, "linear": self._functional_linear, "matmul": self._matmul,
        }  # fmt: skip
        return handlers[name](node, first) if name in handlers else None

    def _operands(self, node: fx.Node) -> bool:
        """Whether an operation has two operands, tensors or numbers, and nothing else of weight."""
        return len(node.args) == 2 and set(node.kwargs) <= {"alpha"}

    def _together(self, node: fx.Node) -> Axes:
        """Two tensors element by element, with broadcasting."""
        shape = self.shape(node)
        operands = [each for each in node.args if isinstance(each, fx.Node) and self.axes(each)]
        found: list[Axis] = []
        for place, size in enumerate(shape):
            offsets = [(each, place - (len(shape) - len(self.axes(each)))) for each in operands]
            whole = [
                self.axes(each)[at] for each, at in offsets if at >= 0 and (self.shape(each)[at] == size or size == 1)
            ]
            axis = whole[0]
            for other in whole[1:]:
                axis = self.space.join(axis, other) if axis is not other else axis
            found.append(axis)
        return tuple(found)

    def _side_by_side(self, node: fx.Node) -> Axes | None:
        parts = node.args[0] if node.args else node.kwargs.get("tensors")
        if not isinstance(parts, list | tuple) or not all(isinstance(part, fx.Node) for part in parts):
            return None
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        if not isinstance(given, int):
            return None
        dim = given % len(self.shape(node))
        axes = []
        for place in range(len(self.shape(node))):
            each = [self.axes(part)[place] for part in parts]
            axes.append(self._chained(parts, each, dim) if place == dim else self._joined(each))
        return tuple(axes)

    def _joined(self, axes: Sequence[Axis]) -> Axis:
        found = axes[0]
        for other in axes[1:]:
            found = self.space.join(found, other) if found is not other else found
        return found

    def _chained(self, parts: Sequence[Any], axes: Sequence[Axis], dim: int) -> Axis:
        """Axes one after the other; what has no atoms gets some that stay."""
        if all(axis is None for axis in axes):
            return None
        return np.concatenate(
            [
                self._staying(self.shape(part)[dim]) if axis is None else axis
                for part, axis in zip(parts, axes, strict=True)
            ]
        )

    def _staying(self, count: int) -> npt.NDArray[np.int64]:
        atoms = self.space.new(count)
        self.space.pin(atoms)
        return atoms

    def _pooled_if_apart(self, node: fx.Node, x: fx.Node) -> Axes | None:
        """Pooling and the like, if dimensions 0 and 1 are really left alone."""
        name = getattr(node.target, "__name__", "")
        rank = next((int(letter) for letter in name if letter in "123"), None)
        if rank is not None and len(self.shape(x)) != rank + 2:
            return None
        if name == "pad":
            sides = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
            if not isinstance(sides, list | tuple) or len(sides) > 2 * (len(self.shape(x)) - 2):
                return None
        if self.shape(node)[:2] != self.shape(x)[:2] or len(self.shape(node)) != len(self.shape(x)):
            return None
        return self._pooled(x)

    def _viewed(self, node: fx.Node, x: fx.Node) -> Axes | None:
        given = node.args[1:] if len(node.args) != 2 or isinstance(node.args[1], int | fx.Node) else node.args[1]
        if node.kwargs or not isinstance(given, list | tuple) or len(given) != len(self.shape(node)):
            return None
        axes = self._reshaped(x, self.shape(node))
        numbers = {
            place: axis
            for place, (size, axis) in enumerate(zip(given, axes, strict=True))
            if axis is not None and isinstance(size, int) and size != -1
        }
        self.space.sizes[node.name] = numbers
        return axes

    def _reshaped(self, x: fx.Node, shape: Sequence[int]) -> Axes:
        """Axes after a change of shape: kept where a dimension stays, repeated where it is merged with others."""
        found: list[Axis] = []
        for before, after in _matched(self.shape(x), shape):
            axes = [(self.axes(x)[place], self.shape(x)[place]) for place in before]
            tracked = [place for place, (axis, size) in enumerate(axes) if axis is not None and size > 1]
            large = [place for place in after if shape[place] > 1]
            if len(tracked) == 1 and len(large) == 1:
                axis = axes[tracked[0]][0]
                assert axis is not None
                inner, outer = (
                    prod(size for _, size in part) for part in (axes[tracked[0] + 1 :], axes[: tracked[0]])
                )
                merged: Axis = np.tile(np.repeat(axis, inner), outer)
            else:
                self.space.pin(*(axis for axis, _ in axes))
                merged = None
            found += [merged if place in large else None for place in after]
        return tuple(found)

    def _transpose(self, node: fx.Node, x: fx.Node) -> Axes | None:
        dims = [*node.args[1:], *node.kwargs.values()]
        if len(dims) != 2 or not all(isinstance(dim, int) for dim in dims):
            return None
        axes = list(self.axes(x))
        a, b = dims
        axes[a], axes[b] = axes[b], axes[a]  # type: ignore[index]
        return tuple(axes)

    def _permute(self, node: fx.Node, x: fx.Node) -> Axes | None:
        dims = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], list | tuple) else node.args[1:]
        if node.kwargs or not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
            return None
        return tuple(self.axes(x)[dim] for dim in dims)  # type: ignore[index]

    def _reduced(self, node: fx.Node, x: fx.Node) -> Axes | None:
        """A mean over some dimensions: those of the channels must not be among them."""
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        keep = bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))
        if given is None or not set(node.kwargs) <= {"dim", "keepdim"}:
            return None
        dims = {int(dim) % len(self.axes(x)) for dim in (given if isinstance(given, list | tuple) else [given])}  # type: ignore[arg-type]
        self.space.pin(*(self.axes(x)[dim] for dim in dims))
        return tuple(
            None if place in dims else axis for place, axis in enumerate(self.axes(x)) if keep or place not in dims
        )

    def _part(self, node: fx.Node, x: fx.Node) -> Axes | None:
        """A part of a tensor, if it is whole along the dimensions of the channels."""
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not all(isinstance(part, slice | int) or part is Ellipsis for part in index):
            return None
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * (len(self.axes(x)) - len(index) + 1), *index[at + 1 :])
        found: list[Axis] = []
        whole = slice(None)
        for axis, part in zip(self.axes(x), [*index, *[whole] * (len(self.axes(x)) - len(index))], strict=True):
            if part != whole:
                self.space.pin(axis)
            if not isinstance(part, int):
                found.append(axis if part == whole else None)
        return tuple(found)

    def _functional_linear(self, node: fx.Node, x: fx.Node) -> Axes | None:
        if node.kwargs.keys() - {"weight", "bias"}:
            return None
        weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        if not self._is_parameter(weight) or not (bias is None or self._is_parameter(bias)):
            return None
        return self._linear(node, x, str(weight.target), "" if bias is None else str(bias.target), "")  # type: ignore[union-attr]

    def _matmul(self, node: fx.Node, x: fx.Node) -> Axes | None:
        weight = node.args[1]
        if not self._is_parameter(weight) or len(self.axes(weight)) != 2:
            return None
        inputs, outputs = self.axes(weight)
        self._sum_over(node, x, "", len(self.axes(x)) - 1, inputs, bias=False, padded=False)
        return (*self.axes(x)[:-1], outputs)

    def _is_parameter(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node.op == "get_attr" and str(node.target) in self._tensors

    def _no_tensor(self, node: fx.Node) -> Axes | None:
        """Sizes may be asked for, if nothing but a change of shape is made of those that may change."""
        x = node.args[0] if node.args else None
        if not isinstance(x, fx.Node):
            return None
        if isinstance(self.known.get(x.name), Tensor):
            if node.target == "size" and len(node.args) == 2 and isinstance(node.args[1], int):
                self._asked(node, self.axes(x)[node.args[1]])
                return ()
            if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
                for user in node.users:
                    place = user.args[1] if user.target is operator.getitem else None
                    if isinstance(place, int):
                        self._asked(user, self.axes(x)[place])
                    else:
                        self.space.pin(*self.axes(x))
                return ()
            return () if node.target in ("dim", "ndimension") or node.args[1:] == ("dtype",) else None
        return ()

    def _asked(self, size: fx.Node, axis: Axis) -> None:
        """A size may be used in a change of shape of the tensor that has it, and in nothing else."""
        x = size.args[0].args[0] if size.target is operator.getitem else size.args[0]  # type: ignore[union-attr]
        if any(user.target not in ("view", "reshape") or user.args[0] is not x for user in size.users):
            self.space.pin(axis)


def _is_followed(found: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the twin network (`driveprune.twin`) knows how signals pass an operation."""
    if node.op == "call_module":
        return isinstance(found.get_submodule(str(node.target)), _FOLLOWED_MODULES)
    if isinstance(node.target, type):  # what holds the outputs
        return all(user.op == "output" for user in node.users)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op not in {"call_function", "call_method"} or name in _FOLLOWED


_FOLLOWED_MODULES = (
    *_ALIKE_MODULES, *POOLS, nn.Linear, _ConvNd, _BatchNorm, _InstanceNorm, nn.PReLU, nn.Flatten, nn.Unflatten,
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.Softmax, nn.LogSoftmax, nn.Embedding,
    nn.MultiheadAttention, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle,
)  # fmt: skip
_FOLLOWED = _ALIKE | _BINARY | POOLS_BY_NAME | set(
    """
    cat concat concatenate stack flatten unsqueeze squeeze view reshape transpose permute mean sum amax amin getitem
    linear matmul bmm softmax log_softmax layer_norm rms_norm group_norm normalize chunk split unbind repeat expand
    contiguous roll flip movedim swapaxes expand_as view_as type_as size dim getattr scaled_dot_product_attention
    multi_head_attention_forward embedding batch_norm instance_norm conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d pixel_shuffle pixel_unshuffle channel_shuffle mul add sub div
    """.split()
)  # fmt: skip


def _matched(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of two shapes of the same number of elements, in groups of the same product.

    >>> _matched((2, 3, 4), (2, 12))
    [([0], [0]), ([1, 2], [1])]
    """
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        a, b = before[i], after[j]
        while a != b:
            if a < b:
                i += 1
                a, left = a * before[i], [*left, i]
            else:
                j += 1
                b, right = b * after[j], [*right, j]
        found.append((left, right))
        i, j = i + 1, j + 1
    if i < len(before):
        found.append((list(range(i, len(before))), []))
    if j < len(after):
        found.append(([], list(range(j, len(after)))))
    return found
