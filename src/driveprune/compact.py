"""Dead channels away: an ordinary, smaller network that computes the same function.

A channel can go if nothing that comes from the input passes through it on its way to the output. If it never reaches
the output, that is all. If it does, it sends a constant (a bias, the shift of a normalisation), which is carried
forward: into the bias of the layers that read it, or, where zeros around the image keep it from being the same
everywhere, into one channel that stays for all constants of that layer.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from driveprune import exported, traced
from driveprune.alike import difference
from driveprune.atoms import Space, Use
from driveprune.channels import follow
from driveprune.frozen import Reads, as_followed, check_settable, lock, of_kind, of_rows
from driveprune.gradients import seeded
from driveprune.graph import CollapseWarning, Inputs, flow, inputs_of
from driveprune.mask import Mask, apply, check_fits, everything, unwrap
from driveprune.noise import dropout_of_ones
from driveprune.screen import Screen
from driveprune.zeros import other_than_zero

Keep = Literal["function", "trainable"]
Flags = npt.NDArray[np.bool_]

_SAME = 1e-12
"""Values of a constant that differ by less, relatively, differ by rounding only."""


@dataclass(frozen=True)
class Gains:
    """What compaction brought: each number before and after."""

    channels: tuple[int, int]
    weights: tuple[int, int]
    """Places for weights in the masked tensors, kept or not."""
    kept: tuple[int, int]
    macs: tuple[int | None, int | None]
    """Multiply-adds of the dense layers for the example; None where they cannot be counted."""
    activations: tuple[int, int]
    """Bytes of all values in float32 for the example."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table("", box=None, padding=(0, 2, 0, 0))
        for title in ("before", "after", ""):
            table.add_column(title, justify="right")
        for name, (before, after) in vars(self).items():
            if before is not None and after is not None:
                table.add_row(_TITLES[name], f"{before:,}", f"{after:,}", f"{before / max(1, after):.2f}× less")
        yield table

    def __str__(self) -> str:
        console = Screen(width=100, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


_TITLES = {
    "channels": "channels", "weights": "weights, dense", "kept": "weights kept", "macs": "multiply-adds, dense",
    "activations": "bytes of activations",
}  # fmt: skip


class Constant(nn.Module):
    """What is left of a network that no path leads through: the same output for every input."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """The constant, once for each example."""
        return self.value.expand(x.shape[0], *self.value.shape[1:])


class SameDropout(nn.Module):
    """Dropout that draws its noise for the big network and uses what falls on the small one.

    So that training goes on with the same random numbers.
    """

    def __init__(self, inner: nn.Module, kept: Mapping[int, Tensor], sizes: Mapping[int, int]) -> None:
        super().__init__()
        self.inner, self._sizes = inner, dict(sizes)
        for dim, index in kept.items():
            self.register_buffer(f"kept{dim}", index, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Its input, with the noise of the big network while it trains."""
        if not self.training:
            return x
        shape = [self._sizes.get(dim, size) for dim, size in enumerate(x.shape)]
        noise = dropout_of_ones(self.inner, shape, x)
        for dim in self._sizes:
            noise = noise.index_select(dim, self.get_buffer(f"kept{dim}"))
        return x * noise


class Compacted(fx.GraphModule):
    """A compacted network: an ordinary module with its own mask, and what was gained."""

    mask: Mask
    gains: Gains

    def __setattr__(self, name: str, value: Any) -> None:
        check_settable(self, name)
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compacted:
        """A copy keeps all of it."""
        twin = super().__deepcopy__(memo)
        for name in self.__dict__.keys() & {"mask", "gains", "_frozen"}:
            twin.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return cast(Compacted, twin)


def compact(model: nn.Module, mask: Mapping[str, Tensor], example: Any, *, keep: Keep = "function") -> nn.Module:
    """A smaller network that computes the same function; the one that is given stays as it is.

    The result is compared with the given network before it is returned. If they differ, or if the network does
    something that cannot be followed, a copy of it comes back that is not smaller, with a warning.

    Args:
        model: a network that torch.fx can trace, or torch.export for the example; its removed weights count as zero.
        mask: name -> True where the weight is kept.
        example: an input of the network, such as `x[:1]`; the result is for inputs of its size (but any batch).
        keep: "function": the same outputs in evaluation mode. "trainable": only what never matters goes, so that the
            small network trains on exactly as the big one would.

    Returns:
        An ordinary module whose parameters have the names of the big one's. Its `mask` is the smaller mask, its
        `gains` say what was gained.

    """
    if keep not in {"function", "trainable"}:
        raise ValueError(f"keep must be 'function' or 'trainable', got {keep!r}")
    inputs = inputs_of(example) if example is not None else Inputs((), {})
    if not any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves((inputs.args, inputs.kwargs))):
        raise ValueError("an example input is needed to follow the channels of the network, such as x[:1]")
    check_fits(model, mask)
    with seeded(model, 0):
        return _made_smaller(model, mask, inputs, keep)


def _made_smaller(model: nn.Module, mask: Mapping[str, Tensor], inputs: Inputs, keep: Keep) -> nn.Module:
    big = copy.deepcopy(unwrap(model))
    apply(big, mask)
    found: fx.GraphModule | None = None
    try:
        found = _graph(big, inputs, training=keep == "trainable")
        small, small_mask = _compacted(found, mask, inputs, keep)
        why = difference(big, small, inputs, training=keep == "trainable")
    except NotFollowed as error:
        why = str(error)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError) as error:
        why = f"its channels cannot be followed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if why is not None:
        warnings.warn(f"the network is not made smaller: {why}", CompactWarning, stacklevel=3)
        small, small_mask = big, Mask(mask, getattr(mask, "provenance", {}))
    _set_modes(small, model)
    small.mask = small_mask  # type: ignore[assignment]
    graphs = (found, None if isinstance(small, Constant) else small if isinstance(small, Compacted) else found)
    small.gains = _gains(big, mask, small, small_mask, inputs, graphs)  # type: ignore[assignment]
    return small


class NotFollowed(ValueError):  # noqa: N818  (it is what the network is)
    """Neither torch.fx nor torch.export can follow a network."""


def _graph(model: nn.Module, inputs: Inputs, *, training: bool) -> fx.GraphModule:
    """The network as a graph: of torch.fx or, where that cannot trace it, of torch.export for the example."""
    try:
        found = traced.trace(model, training=training, fixed=traced.fixed_inputs(model, inputs))
        traced.note_kinds(found, model, inputs)
        return found
    except ValueError as error:
        first = str(error)
    try:
        return exported.trace(model, inputs, training=training)
    except Exception as error:  # whatever the user's own forward makes of torch.export
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotFollowed(
            f"{first}; torch.export cannot follow it, either: {said}{traced.place_of(error)}. It works as it is, "
            "with its zeros; to have it smaller, write that code without what it does by the values of tensors"
        ) from None


class CompactWarning(UserWarning):
    """A network could not be made smaller, and why."""


def _compacted(
    found: fx.GraphModule, mask: Mapping[str, Tensor], inputs: Inputs, keep: Keep
) -> tuple[nn.Module, Mask]:
    """The network of a graph, smaller, and its mask; what the graph does not use is not in it."""
    used = dict(found.named_parameters(remove_duplicate=False))
    small_mask = Mask({n: kept for n, kept in mask.items() if n in used}, getattr(mask, "provenance", {}))
    if not _is_connected(found, small_mask, inputs):
        warnings.warn("no path leads from input to output: the compacted network is a constant", CollapseWarning, 3)
        if keep == "function" and (constant := _constant(found, inputs)) is not None:
            return constant, Mask(provenance=small_mask.provenance)
    reads = found.meta.get("reads", {})
    while True:
        step = _Step(found, small_mask, inputs, keep)
        found, small_mask = step.smaller()
        if not step.removed:
            return _finished(Compacted(found, found.graph), reads), small_mask


def _finished(small: Compacted, reads: Reads) -> Compacted:
    """A compacted network that refuses what would have no effect on it: attributes, and inputs of another kind."""
    lock(small, reads)
    inputs = [node for node in small.graph.nodes if node.op == "placeholder"]
    with small.graph.inserting_after(inputs[-1]):
        for node in inputs:
            if "fixed" in node.meta:
                small.graph.call_function(as_followed, (node, str(node.target), node.meta["fixed"]))
            if "kind" in node.meta:
                small.graph.call_function(of_kind, (node, str(node.target), node.meta["kind"]))
            if "rows" in node.meta:
                small.graph.call_function(of_rows, (node, str(node.target), node.meta["rows"]))
    small.recompile()
    return small


def _set_modes(small: nn.Module, model: nn.Module) -> None:
    """Every module in the mode of its original."""
    small.train(model.training)
    originals = dict(unwrap(model).named_modules())
    for path, module in small.named_modules():
        name = path
        while name not in originals:
            name = name.rpartition(".")[0]  # a module of the graph follows the block that it is in
        module.training = originals[name].training


def _is_connected(found: fx.GraphModule, mask: Mapping[str, Tensor], inputs: Inputs) -> bool:
    outputs = [node for node in found.graph.nodes if node.op == "output"]
    elements = traced.elements(found, mask, inputs)
    sources = [before.name for node in outputs for before in node.all_input_nodes]
    known = [elements[name] for name in sources if name in elements]
    return len(known) < len(sources) or any(bool(each.live.any()) for each in known)


def _constant(found: fx.GraphModule, inputs: Inputs) -> Constant | None:
    """The constant output, if it is one tensor with the same entry for each example."""
    known = traced.values(found, inputs)
    output = next(known[node.name] for node in found.graph.nodes if node.op == "output")
    given = [leaf for leaf in inputs.args if isinstance(leaf, Tensor)]
    weight = next((each for each in found.parameters() if each.is_floating_point()), None)
    if weight is None or not isinstance(output, Tensor) or not given or not output.dim() or not given[0].dim():
        return None
    constant = Constant(output[:1].to(weight))
    return constant if difference(found, constant, inputs, training=False) is None else None


def _gains(
    big: nn.Module,
    big_mask: Mapping[str, Tensor],
    small: nn.Module,
    mask: Mapping[str, Tensor],
    inputs: Inputs,
    graphs: Sequence[nn.Module | None],
) -> Gains:
    pairs = [(big, big_mask), (small, mask)]
    macs = [_macs(net, kept, inputs) for net, kept in pairs]
    return Gains(
        channels=_pair(sum(_outputs(module) for module in net.modules()) for net, _ in pairs),
        weights=_pair(sum(each.numel() for each in kept.values()) for _, kept in pairs),
        kept=_pair(sum(int(each.count_nonzero()) for each in kept.values()) for _, kept in pairs),
        macs=(macs[0], macs[1]),
        activations=_pair(_activations(net, inputs) for net in graphs),
    )


def _macs(net: nn.Module, mask: Mapping[str, Tensor], inputs: Inputs) -> int | None:
    if not mask:
        return 0
    try:
        return flow(net, mask, inputs).macs(everything(mask))
    except Exception:  # the user's own code may refuse a float64 copy of itself
        return None


def _activations(graph: nn.Module | None, inputs: Inputs) -> int:
    """Bytes of all values of a network for the example; 0 for a constant, and if they cannot be followed."""
    try:
        return traced.activation_bytes(traced.values(graph, inputs)) if isinstance(graph, fx.GraphModule) else 0
    except Exception:
        return 0


def _pair(numbers: Any) -> tuple[int, int]:
    first, second = numbers
    return first, second


def _outputs(module: nn.Module) -> int:
    """The channels that a layer puts out."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, _ConvNd) else 0


@dataclass
class _Step:
    """One pass: what can go now, and the network without it."""

    found: fx.GraphModule
    mask: Mask
    inputs: Inputs
    keep: Keep
    removed: int = 0
    space: Space = field(init=False)
    known: dict[str, Any] = field(init=False)
    elements: dict[str, traced.Element] = field(init=False)

    def __post_init__(self) -> None:
        self.known = traced.values(self.found, self.inputs)
        self.space = follow(self.found, self.known, traced.depends_on_input(self.found))
        self.elements = traced.elements(self.found, self.mask, self.inputs)

    def smaller(self) -> tuple[fx.GraphModule, Mask]:
        """The network and its mask without what can go."""
        gone = self._candidates()
        folds = self._folds(gone) if self.keep == "function" else []
        self._keep_groups_and_one(gone)
        folds = [fold for fold in folds if gone[fold.root]]
        axes = [axis for each in self.space.tensors.values() for axis in each if axis is not None]
        self.removed = sum(int(gone[self.space.roots(axis)].sum()) for axis in axes)
        if not self.removed:
            return self.found, self.mask
        for fold in folds:
            self._carry_forward(fold)
        return self._sliced(gone)

    def _candidates(self) -> Flags:
        """Which atoms nothing passes through that could matter, by root."""
        gone = np.ones(self.space.parents.size, bool)
        possible = other_than_zero(self.found, self.mask, self.known) if self.keep == "trainable" else None
        for name, axes in self.space.axes.items():
            element = self.elements.get(name)
            for dim, axis in enumerate(axes):
                if axis is not None:
                    if element is None:
                        gone[self.space.roots(axis)] = False
                        continue
                    live = element.live if possible is None else possible[name]
                    flags = _along(live & element.needed, dim)
                    gone[self.space.roots(axis)[flags]] = False
        gone[self.space.pinned_roots()] = False
        return gone

    # What a channel that goes leaves behind.

    def _folds(self, gone: Flags) -> list[_Fold]:
        """The constants to carry forward. Channels whose constant cannot be carried are taken off the list."""
        folds: list[_Fold] = []
        for use in self.space.uses:
            folds += [fold for fold in self._constants(use, gone) if self._can_be_carried(fold, gone)]
        folds = [fold for fold in folds if gone[fold.root]]
        padded: dict[str, list[_Fold]] = {}
        for fold in folds:
            if fold.use.padded:
                padded.setdefault(fold.use.node, []).append(fold)
        for each in padded.values():
            self._choose_one(each, gone)
        return folds

    def _constants(self, use: Use, gone: Flags) -> list[_Fold]:
        """What the channels that are to go send to a layer, where it is not zero and matters."""
        value, element = self.known[use.input], self.elements.get(use.input)
        needed = np.ones(use.axis.size, bool) if element is None else _along(element.needed, use.dim)
        rows = value.movedim(use.dim, 0).reshape(use.axis.size, -1)
        roots = self.space.roots(use.axis)
        found = []
        for place in np.flatnonzero(gone[roots] & needed):
            low, high = float(rows[place].min()), float(rows[place].max())
            if low != 0 or high != 0:
                same = high - low <= _SAME * max(abs(low), abs(high))
                found.append(_Fold(use, int(place), int(roots[place]), (low + high) / 2 if same else None))
        return found

    def _can_be_carried(self, fold: _Fold, gone: Flags) -> bool:
        """Whether a constant can be carried into a layer; if not, its channel stays."""
        path, nodes = fold.use.module, list(self.found.graph.nodes)
        calls = [node for node in nodes if node.op == "call_module" and node.target == path]
        read = any(node.op == "get_attr" and str(node.target).startswith(f"{path}.") for node in nodes)
        tied = any(self._is_tied(f"{path}.{leaf}") for leaf in ("weight", "bias"))
        sole = len(calls) == 1 and not read and not tied
        can = fold.value is not None and sole and (fold.use.bias or fold.use.padded)
        if not can:
            gone[fold.root] = False
        return can

    def _is_tied(self, name: str) -> bool:
        tensors = dict(self.found.named_parameters(remove_duplicate=False))
        return name in tensors and sum(other is tensors[name] for other in tensors.values()) > 1

    def _choose_one(self, folds: list[_Fold], gone: Flags) -> None:
        """One channel stays for all constants of a layer with zeros around its image."""
        staying = [fold for fold in folds if not gone[fold.root]]
        chosen = max(staying or folds, key=lambda fold: abs(fold.value or 0.0))
        gone[chosen.root] = False
        for fold in folds:
            fold.onto = chosen

    def _keep_groups_and_one(self, gone: Flags) -> None:
        """Groups go as a whole; of every dimension of every tensor at least one index stays."""
        while True:
            before = gone.sum()
            for inputs, outputs in self.space.groups:
                roots = self.space.roots(np.concatenate([inputs, outputs]))
                if not gone[roots].all():
                    gone[roots] = False
            for axes in self.space.tensors.values():
                for axis in axes:
                    if axis is not None and axis.size and gone[self.space.roots(axis)].all():
                        gone[self.space.roots(axis)[0]] = False
            if gone.sum() == before:
                return

    @torch.no_grad()
    def _carry_forward(self, fold: _Fold) -> None:
        layer = self.found.get_submodule(fold.use.module)
        weight, value = layer.get_parameter("weight"), fold.value
        assert value is not None
        column = weight[:, fold.place].double()
        if fold.onto is not None:
            other = fold.onto
            assert other.value is not None
            if other.root != fold.root:
                weight[:, other.place] += (column * (value / other.value)).to(weight)
            return
        if layer.bias is None:
            layer.register_parameter("bias", nn.Parameter(weight.new_zeros(weight.shape[0])))
            self.space.tensors[f"{fold.use.module}.bias"] = (self.space.tensors[f"{fold.use.module}.weight"][0],)
        layer.get_parameter("bias").add_(
            (column.flatten(1).sum(1) if column.dim() > 1 else column).mul(value).to(weight)
        )

    # The network without what goes.

    @torch.no_grad()
    def _sliced(self, gone: Flags) -> tuple[fx.GraphModule, Mask]:
        small, mask = copy.deepcopy(self.found), Mask(provenance=self.mask.provenance)
        tensors = {**dict(small.named_parameters(remove_duplicate=False)), **dict(small.named_buffers())}
        new: dict[Tensor, Tensor] = {}
        for name, tensor in tensors.items():
            axes = self.space.tensors.get(name, (None,) * tensor.dim())
            if tensor not in new:
                new[tensor] = self._cut(tensor, axes, gone)
            _put(small, name, new[tensor])
            if name in self.mask:
                kept = self._cut(self.mask[name], axes, gone)
                mask[name] = kept | (new[tensor] != 0) if self.keep == "function" else kept
        _resize_layers(small)
        self._redraw_dropout(small, gone)
        self._rewrite_sizes(small, gone)
        small.graph.lint()
        small.recompile()
        return small, mask

    def _cut(self, tensor: Tensor, axes: Any, gone: Flags) -> Tensor:
        for dim, axis in enumerate(axes):
            if axis is not None and (flags := gone[self.space.roots(axis)]).any():
                tensor = tensor.index_select(dim, torch.from_numpy(np.flatnonzero(~flags)).to(tensor.device))
        return tensor

    def _redraw_dropout(self, small: fx.GraphModule, gone: Flags) -> None:
        if self.keep == "function":
            return
        for node in small.graph.nodes:
            module = small.get_submodule(str(node.target)) if node.op == "call_module" else None
            axes = self.space.axes[node.name] if isinstance(module, _DropoutNd | SameDropout) else ()
            lost = {
                dim: torch.from_numpy(np.flatnonzero(~gone[self.space.roots(axis)]))
                for dim, axis in enumerate(axes)
                if axis is not None and gone[self.space.roots(axis)].any()
            }
            if lost and module is not None:
                sizes = {dim: axes[dim].size for dim in lost}  # type: ignore[union-attr]
                block, _, _ = str(node.target).rpartition(".")  # whose mode it follows
                name = f"{block}.{node.name}_same" if block else f"{node.name}_same"  # one for each call
                small.add_submodule(name, SameDropout(module, lost, sizes))
                node.target = name

    def _rewrite_sizes(self, small: fx.GraphModule, gone: Flags) -> None:
        """Numbers that the network's own code gives as sizes."""
        for node in small.graph.nodes:
            for place, axis in self.space.sizes.get(node.name, {}).items():
                size = int((~gone[self.space.roots(axis)]).sum())
                if isinstance(node.args[1], list | tuple):
                    shape = list(node.args[1])
                    shape[place] = size
                    node.update_arg(1, type(node.args[1])(shape))
                else:
                    node.update_arg(1 + place, size)


@dataclass
class _Fold:
    """A constant that a channel sends to a layer."""

    use: Use
    place: int
    """Which index of the layer's input it is."""
    root: int
    value: float | None
    """The constant; None if it is not the same everywhere."""
    onto: _Fold | None = None
    """The channel that stays for it."""


def _along(flags: Tensor, dim: int) -> Flags:
    """For each index along a dimension, whether any flag is set."""
    found: Flags = flags.movedim(dim, 0).reshape(flags.shape[dim], -1).any(1).numpy()
    return found


def _put(small: fx.GraphModule, name: str, tensor: Tensor) -> None:
    """Set a parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    module = small.get_submodule(path)
    if leaf in module._parameters:
        old = module._parameters[leaf]
        if not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=old is not None and old.requires_grad)
        module._parameters[leaf] = tensor
    else:
        module._buffers[leaf] = tensor


def _resize_layers(small: fx.GraphModule) -> None:
    """The numbers that layers keep of their own shapes."""
    for module in small.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, _ConvTransposeNd):
            module.in_channels, module.out_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        elif isinstance(module, _ConvNd):
            if module.groups > 1:
                module.groups = module.groups * module.weight.shape[0] // module.out_channels
            module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        elif isinstance(module, _NormBase):
            sizes = [each for each in (weight, module.running_mean) if each is not None]
            module.num_features = len(sizes[0]) if sizes else module.num_features
        elif isinstance(module, nn.PReLU):
            module.num_parameters = module.weight.numel()
