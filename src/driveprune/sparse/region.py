"""Parts of a network that run on the sparse kernels from their inputs to their outputs.

A region is a list of steps over blocked tensors. A convolution takes the normalisation, the sum with another tensor
and the ReLU that follow it into one step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from driveprune.compact import SameDropout
from driveprune.compiled import threads
from driveprune.sparse import blocked
from driveprune.sparse.batch import BatchRegion
from driveprune.sparse.code import LANES
from driveprune.sparse.flat import FlatRegion
from driveprune.sparse.folded import Folded
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.step import Step, UnknownStepError
from driveprune.sparse.training import TrainingRegion
from driveprune.sparse.wide import Wide, split

Shapes = Mapping[str, torch.Size]
"""Node's name -> the shape of its value for the example, if it is a float32 tensor of 2 or 4 dimensions."""


_SUMS = (operator.add, torch.add)
_RELUS = (F.relu, torch.relu)


def step_of(node: fx.Node, modules: Mapping[str, nn.Module], shapes: Shapes) -> Step | None:
    """The operation of a node as a step, or None if the kernels do not know it."""
    if node.name not in shapes or not all(each.name in shapes for each in node.all_input_nodes):
        return None
    inputs = tuple(each.name for each in node.all_input_nodes)
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    found = _of_module(module, shapes[inputs[0]]) if module is not None and len(inputs) == 1 else None
    if module is None and node.op in {"call_function", "call_method"}:
        found = _of_function(node, shapes)
    if found is None or not inputs:
        return None
    return replace(found, inputs=found.inputs or inputs, output=node.name, dims=len(shapes[inputs[0]]))


def _of_module(module: nn.Module, shape: torch.Size) -> Step | None:
    if isinstance(module, SparseLayer):
        return Step("layer", (), "", module) if module.dims == len(shape) and not module.dense else None
    kind = type(module)
    if kind in {nn.BatchNorm1d, nn.BatchNorm2d}:
        return Step("norm", (), "", norm=module)
    if kind is nn.ReLU:
        return Step("relu", (), "", relu=True)
    if kind in {nn.Dropout, nn.Dropout2d, SameDropout}:
        return Step("dropout", (), "", module)
    if kind is nn.Identity:
        return Step("same", (), "")
    if kind is nn.Flatten:
        return _flattening(module.start_dim, module.end_dim, len(shape))  # type: ignore[arg-type]
    return _of_pool(module) if len(shape) == 4 else None


def _of_pool(module: nn.Module) -> Step | None:
    kind = type(module)
    if kind is nn.MaxPool2d and isinstance(module, nn.MaxPool2d):
        return _max_pool(
            module.kernel_size,
            module.stride,
            module.padding,
            module.dilation,
            module.ceil_mode,
            module.return_indices,
        )
    if kind in {nn.AvgPool2d, nn.AdaptiveAvgPool2d} or (kind is nn.AdaptiveMaxPool2d and not module.return_indices):
        return Step("pool", (), "", module)
    return None


def _max_pool(
    kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Step | None:  # fmt: skip
    if ceil_mode or return_indices or _pair(dilation) != (1, 1):
        return None
    numbers = _pair(kernel), _pair(kernel if stride is None or stride == [] else stride), _pair(padding)
    return Step("max_pool", (), "", numbers=numbers)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _flattening(first: int, last: int, dims: int) -> Step | None:
    if first != 1 or last not in {-1, dims - 1}:
        return None
    return Step("flatten" if dims == 4 else "same", (), "")


def _of_function(node: fx.Node, shapes: Shapes) -> Step | None:
    target, args, kwargs = node.target, node.args, node.kwargs
    name = target if node.op == "call_method" else None
    shape = shapes[node.all_input_nodes[0].name] if node.all_input_nodes else torch.Size()
    out = shapes[node.name]
    if target in _SUMS or name == "add":
        return _sum(node, shapes) if not kwargs else None
    if target is torch.cat and kwargs.get("dim", args[1] if len(args) > 1 else 0) in {1, 1 - len(out)}:
        tensors: Any = args[0] if args else ()
        if all(isinstance(each, fx.Node) for each in tensors):
            return Step("cat", tuple(each.name for each in tensors), "")
        return None
    if len(node.all_input_nodes) != 1:
        return None
    if target in _RELUS or name == "relu":
        return Step("relu", (), "", relu=True)
    if target is torch.flatten or name == "flatten":
        first, last = _bound(args, kwargs, start_dim=0, end_dim=-1)
        return _flattening(first, last, len(shape))
    if len(shape) != 4:
        return None
    if target is F.max_pool2d:
        names = {"kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
        return _max_pool(*_bound(args, kwargs, **names, return_indices=False))
    if target is F.adaptive_avg_pool2d:
        size = args[1] if len(args) > 1 else kwargs["output_size"]
        return Step("pool", (), "", nn.AdaptiveAvgPool2d(size))  # type: ignore[arg-type]
    return None


def _bound(args: Any, kwargs: Mapping[str, Any], **defaults: Any) -> tuple[Any, ...]:
    """The arguments after the first one, by name or by place."""
    given = dict(zip(defaults, args[1:], strict=False))
    return tuple({**defaults, **given, **kwargs}.values())


def _sum(node: fx.Node, shapes: Shapes) -> Step | None:
    if len(node.args) != 2 or not all(isinstance(each, fx.Node) for each in node.args):
        return None
    names = tuple(each.name for each in node.args if isinstance(each, fx.Node))
    return Step("add", names, "") if shapes[names[0]] == shapes[names[1]] else None


def fused(steps: list[Step], outputs: set[str]) -> list[Step]:
    """Layers with what follows them in one step."""
    uses = {name: sum(list(step.inputs).count(name) for step in steps) for step in steps for name in step.inputs}
    done: list[Step] = []

    def open_end(name: str) -> Step | None:
        """The step that made a value which nobody else needs."""
        step = next((each for each in done if each.output == name), None)
        return step if step is not None and uses.get(name) == 1 and name not in outputs else None

    for step in steps:
        longer = _longer(step, open_end)
        if longer is not None:
            before, after = longer
            done.remove(before)
            done.append(after)
        else:
            done.append(step)
    return done


def _longer(step: Step, open_end: Callable[[str], Step | None]) -> tuple[Step, Step] | None:
    """A step that can be done together with the one before it, and both in one."""
    candidates = step.inputs if step.kind == "add" else step.inputs[:1]
    for name in reversed(candidates):
        before = open_end(name)
        if before is None or before.relu or before.kind not in {"layer", "norm"}:
            continue
        if step.kind == "norm" and before.kind == "layer" and before.norm is None and before.plus is None:
            return before, replace(before, output=step.output, norm=step.norm)
        if step.kind == "relu":
            return before, replace(before, output=step.output, relu=True)
        if step.kind == "add" and before.plus is None and step.inputs[0] != step.inputs[1]:
            other = step.inputs[1] if name == step.inputs[0] else step.inputs[0]
            return before, replace(before, output=step.output, plus=other)
    return None


def _goes_with_pool(step: Step, training: bool) -> bool:
    """Whether a halving pool after a step can be done with it."""
    if step.plus is not None:
        return False
    return step.norm is not None and step.relu if training else step.kind == "layer"


def with_pools(steps: list[Step], outputs: tuple[str, ...], *, training: bool) -> list[Step]:
    """Halving pools in one step with what comes before: a normalisation with ReLU in training, else a layer."""
    needed = [*outputs, *(name for step in steps for name in (*step.inputs, step.plus))]
    found: list[Step] = []
    for step in steps:
        before = next((each for each in found if each.output == step.inputs[0]), None)
        halves = step.kind == "max_pool" and step.numbers == blocked.HALVES and needed.count(step.inputs[0]) == 1
        if halves and before is not None and _goes_with_pool(before, training):
            found[found.index(before)] = replace(before, output=step.output, halves=True)
        else:
            found.append(step)
    return found


def _constants_known(steps: list[Step], outputs: tuple[str, ...]) -> list[Step]:
    """Layers without weights are marked whose input others use, too: what these send back is all of its gradient."""

    def is_empty(step: Step) -> bool:
        return isinstance(step.module, SparseLayer) and not step.module.weight.numel()

    others = {name for step in steps if not is_empty(step) for name in step.inputs}
    sending = {*outputs, *others, *(step.plus for step in steps)}
    return [replace(step, constant=is_empty(step) and step.inputs[0] in sending) for step in steps]


FEW = LANES // 2
"""So many images are faster one at a time than side by side."""

SIZES_KNOWN = 6
"""The tables of so many sizes of inputs are kept."""


class Region:
    """A part of a network, done in blocked tensors, or image by image where nothing is learnt and there are few."""

    def __init__(self, steps: list[Step], inputs: tuple[str, ...], outputs: tuple[str, ...], shapes: Shapes) -> None:
        self.steps, self.inputs, self.outputs = _constants_known(fused(steps, set(outputs)), outputs), inputs, outputs
        self._dims = {name: len(shapes[name]) for name in (*inputs, *outputs)}
        self._folded = {step.output: Folded(step.module, step.norm) for step in self.steps if step.kind == "layer"}
        self._known: dict[tuple[Any, ...], FlatRegion | BatchRegion | TrainingRegion | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file needs; all else is made again."""
        return {name: self.__dict__[name] for name in ("steps", "inputs", "outputs", "_dims")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._folded = {step.output: Folded(step.module, step.norm) for step in self.steps if step.kind == "layer"}
        self._known = {}

    def fits(self, *tensors: Any) -> bool:
        """Whether inputs are batches of the same number of images, each of as many dimensions as the example's."""
        count = None
        for name, each in zip(self.inputs, tensors, strict=True):
            if not isinstance(each, Tensor) or each.dim() != self._dims[name]:
                return False
            if count not in {None, each.shape[0]}:
                return False
            count = each.shape[0]
        return bool(count)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs for the inputs, as ordinary tensors."""
        count = len(tensors[0])
        learns = torch.is_grad_enabled() or self._in_training()
        whole = None if learns else self._in_one_call(tensors)
        if whole is not None:
            return tuple(_shaped(each, self._dims[name]) for each, name in zip(whole, self.outputs, strict=True))
        with torch.autocast("cpu", enabled=False):
            course = self._course(tensors) if learns else None
            if course is not None:
                found = zip(self.outputs, course(*tensors), strict=True)
                return tuple(blocked.unpack(each, count, self._dims[name]) for name, each in found)
            known = {name: blocked.pack(tensor) for name, tensor in zip(self.inputs, tensors, strict=True)}
            for step in self._learning_steps if learns else self.steps:
                folded = None if learns else self._folded.get(step.output)
                known[step.output] = done(step, known, count) if folded is None else _inferred(step, folded, known)
            return tuple(blocked.unpack(known[name], count, self._dims[name]) for name in self.outputs)

    @cached_property
    def _learning_steps(self) -> list[Step]:
        return with_pools(self.steps, self.outputs, training=True)

    def _course(self, tensors: tuple[Tensor, ...]) -> TrainingRegion | None:
        """The way there and back in two calls, if all steps are known there and every parameter learns."""
        norms, dropouts = self._modal
        own = all(norm.training or norm._buffers["running_mean"] is None for norm in norms)
        if not own or any(module.training for module in dropouts) or not self._all_learn():
            return None
        shapes = tuple(tuple(tensor.shape[1:]) + (1,) * (4 - tensor.dim()) for tensor in tensors)
        wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors)
        key = ("training", *shapes, threads(), len(tensors[0]), wanted)
        found: TrainingRegion | None = self._kept(
            key, lambda: self._trained(dict(zip(self.inputs, shapes, strict=True)), len(tensors[0]), wanted)
        )
        return found

    def _all_learn(self) -> bool:
        """Whether all parameters are as the kernels know them, and want a gradient if anything does."""
        parameters = [each for module in self._modules for each in module._parameters.values() if each is not None]
        return all(each.requires_grad and each.dtype == torch.float32 and each.is_cpu for each in parameters)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        return [each for step in self.steps for each in (step.module, step.norm) if each is not None]

    def _trained(self, shapes: dict[str, Any], count: int, wanted: tuple[bool, ...]) -> TrainingRegion | None:
        try:
            return TrainingRegion(self._learning_steps, shapes, self.outputs, count, wanted)
        except UnknownStepError:
            return None

    def _in_training(self) -> bool:
        """Whether something in it behaves differently in training, and is in that mode."""
        norms, dropouts = self._modal
        for norm in norms:
            if norm.training or norm._buffers["running_mean"] is None:
                return True
        return any(module.training for module in dropouts)

    @cached_property
    def _modal(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Normalisations and dropouts."""
        norms = [step.norm for step in self.steps if step.norm is not None]
        return norms, [step.module for step in self.steps if step.kind == "dropout" and step.module is not None]

    def _in_one_call(self, tensors: tuple[Tensor, ...]) -> list[Tensor] | None:
        """The outputs, image by image or all at once, if all steps are known there."""
        count = len(tensors[0])
        shapes = tuple(tuple(tensor.shape[1:]) + (1,) * (4 - tensor.dim()) for tensor in tensors)
        key = (*shapes, threads(), max(count, FEW))  # few images are done one by one
        region = self._kept(key, lambda: self._made(dict(zip(self.inputs, shapes, strict=True)), count))
        if isinstance(region, FlatRegion):
            if count == 1:
                return region(*tensors)
            images = [region(*(tensor[number : number + 1] for tensor in tensors)) for number in range(count)]
            return [torch.cat(each) for each in zip(*images, strict=True)]
        return None if region is None else region(*tensors)

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What was made for a key, or is now."""
        known = self._known
        if key not in known:  # a new dictionary: other threads may be reading the old one
            made = make()
            self._known = known = {**dict([*known.items()][1 - SIZES_KNOWN :]), key: made}
        return known[key]

    def _made(self, shapes: dict[str, Any], count: int) -> FlatRegion | BatchRegion | None:
        try:
            if count <= FEW:
                return FlatRegion(self.steps, shapes, self.outputs)
            parts = split(self.steps, shapes, self.outputs)
            if parts is None:
                return BatchRegion(with_pools(self.steps, self.outputs, training=False), shapes, self.outputs, count)
            first, rest, between = parts
            wide = Wide(first, shapes, between)
            steps = with_pools(rest, self.outputs, training=False)
            return BatchRegion(steps, {between: wide.shape}, self.outputs, count, wide)
        except UnknownStepError:
            return None


def _shaped(x: Tensor, dims: int) -> Tensor:
    return x if dims == 4 else x.flatten(1)


def _inferred(step: Step, folded: Folded, known: Mapping[str, Tensor]) -> Tensor:
    """A layer with all that follows it at once."""
    assert isinstance(step.module, SparseLayer)
    values, bias = folded.weights()
    plus = None if step.plus is None else known[step.plus].contiguous()
    x, kernel = known[step.inputs[0]].contiguous(), step.module.kernel
    if plus is None or plus.shape[2:4] == kernel.layer.size(x.shape[2], x.shape[3]):
        return kernel.output(x, values, bias, plus=plus, relu=step.relu)
    out = kernel.output(x, values, bias) + plus  # which torch stretches to one size
    return out.relu() if step.relu else out


def done(step: Step, known: dict[str, Tensor], count: int) -> Tensor:
    """What a step computes, in a way that autograd can go back.

    Who needs the input of a layer later gets it from the layer.
    """
    x = known[step.inputs[0]]
    match step.kind:
        case "layer":
            assert isinstance(step.module, SparseLayer)
            alone = step.norm is None and step.plus is None
            layer = step.module
            out, passed = blocked.convolve_and_pass(
                x.detach() if step.constant else x, layer.weight, layer.bias, layer.kernel, relu=step.relu and alone
            )
            if x.requires_grad and not step.constant:
                known[step.inputs[0]] = passed
            return out if alone else _finished(out, step, known, count)
        case "norm" | "relu":
            return _finished(x, step, known, count)
        case "add":
            return x + known[step.inputs[1]]
        case "cat":
            return torch.cat([known[name] for name in step.inputs], 1)
        case "max_pool":
            return blocked.max_pool(x, *step.numbers)
        case "pool":
            assert step.module is not None
            if isinstance(step.module, nn.AdaptiveAvgPool2d) and step.module.output_size in {1, (1, 1)}:
                return x.mean((2, 3), keepdim=True)
            return blocked.as_images(x, step.module)
        case "flatten":
            return blocked.flatten(x)
        case "dropout":
            assert step.module is not None
            return blocked.dropout(x, step.module, count, step.dims) if step.module.training else x
    return x


def _finished(x: Tensor, step: Step, known: Mapping[str, Tensor], count: int) -> Tensor:
    """Normalisation, sum and ReLU after a layer."""
    plus = None if step.plus is None else known[step.plus]
    if step.norm is not None and (plus is None or plus.shape == x.shape):
        return blocked.normalise(x, step.norm, count, plus=plus, relu=step.relu, halves=step.halves)
    if step.norm is not None:
        x = blocked.normalise(x, step.norm, count)
    x = x if plus is None else x + plus
    return x.relu() if step.relu else x
