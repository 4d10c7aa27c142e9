"""The network as paths from input to output: effective sparsity, cut networks, multiply-adds.

A weight matters if a path of kept weights leads from the input through it to the output. To find out, a twin of
the network is run once: kept weights are positive random numbers, biases are zero, activations and
normalisation let everything through, differences become sums. In such a network no signal is cancelled or
clipped, so a weight lies on a path exactly if its gradient times its value is positive. The twin follows the
user's own forward code, in float64, on a copy.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from driveprune.gradients import evaluating
from driveprune.mask import Loss, Mask, all_weights, empty_layers, kept_weights, parameters, sparsity, unwrap

_LARGEST = 1 << 28  # weights: above, a float64 copy only for a warning is too much to ask for


class CollapseWarning(UserWarning):
    """The mask leaves a layer without weights, or the network without a path from input to output."""


@dataclass(frozen=True)
class Inputs:
    """What the model's forward is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Flow:
    """What a run of the twin network shows."""

    effective: Mask
    """The kept weights that lie on a path from input to output."""
    connected: bool
    """Whether any path is left."""
    positions: dict[str, int]
    """How often each weight of a layer is multiplied for this input."""

    def macs(self, mask: Mapping[str, Tensor]) -> int:
        """Multiply-adds of the kept weights for this input."""
        return sum(self.positions.get(name, 0) * int(kept.count_nonzero()) for name, kept in mask.items())


class _Captured(Exception):  # noqa: N818  (no error: it stops the forward pass)
    pass


def example_of(model: nn.Module, batch: Any, loss: Loss) -> Inputs:
    """What the loss gives to the model for a batch, cut down to the first example where that is plain to see."""
    model = unwrap(model)
    seen: list[Inputs] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Inputs(args, kwargs))
        raise _Captured

    hook = model.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        loss(model, batch)
    except _Captured:
        sizes = {len(leaf) if leaf.dim() else 0 for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        time_first = any(getattr(module, "batch_first", None) is False for module in model.modules())
        return _first(seen[0], sizes.pop()) if len(sizes) == 1 and not time_first else seen[0]
    finally:
        hook.remove()
    raise ValueError("the loss does not call the model itself, so its input is not known")


def _first(inputs: Inputs, size: int) -> Inputs:
    """The first example of inputs whose tensors have `size` examples."""

    def cut(leaf: Any) -> Any:
        return leaf[:1] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf

    return Inputs(*tree_map(cut, (inputs.args, inputs.kwargs)))


def inputs_of(example: Any) -> Inputs:
    """An example input as the user gives it: a tensor, a tuple of arguments or a dictionary of them."""
    if isinstance(example, Inputs):
        return example
    if isinstance(example, Mapping):
        return Inputs((), dict(example))
    return Inputs(tuple(example), {}) if isinstance(example, tuple | list) else Inputs((example,), {})


def effective_sparsity(model: nn.Module, mask: Mapping[str, Tensor], example: Any) -> float:
    """The sparsity when weights on no path from input to output count as removed, too.

    `example` is an input of the model, such as `x[:1]`; of floating tensors only the shape counts.

    >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    >>> mask = {"0.weight": torch.tensor([[True], [False]]), "1.weight": torch.tensor([[False, True]])}
    >>> effective_sparsity(net, mask, torch.ones(1, 1))
    1.0
    """
    return sparsity(flow(model, mask, example).effective)


def flow(model: nn.Module, mask: Mapping[str, Tensor], example: Any) -> Flow:
    """Run the twin network once and read off paths and multiply-adds."""
    twin = copy.deepcopy(unwrap(model)).cpu().double()
    for module in twin.modules():  # hooks of the user are for the user's network
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    weights = parameters(twin)
    _fill(weights, mask)
    inputs = _positive(inputs_of(example))
    names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
    with evaluating(twin), torch.enable_grad(), _Twin(names) as mode:
        output = twin(*inputs.args, **inputs.kwargs)
    signal = total(output)
    chosen = [weights[name] for name in mask]
    found: tuple[Tensor | None, ...] = (None,) * len(chosen)
    if signal.requires_grad:
        found = torch.autograd.grad(signal, chosen, allow_unused=True)
    effective = Mask()
    for (name, kept), gradient in zip(mask.items(), found, strict=True):
        passes = torch.zeros_like(kept) if gradient is None else (gradient != 0).to(kept.device)
        effective[name] = kept & passes
    return Flow(effective, bool(signal.detach() != 0) and kept_weights(effective) > 0, mode.positions)


@torch.no_grad()
def _fill(weights: Mapping[str, nn.Parameter], mask: Mapping[str, Tensor]) -> None:
    """Positive numbers where kept, of a size that lets signals neither grow nor fade; no biases."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        weight.requires_grad_(True)
        if name in mask:
            kept = mask[name].to(weight.device)
            fan = max(1.0, int(kept.count_nonzero()) / len(kept))
            weight.copy_((torch.rand(weight.shape, generator=generator, dtype=torch.float64) + 0.5) * kept / fan)
        elif weight.dim() >= 2:
            weight.copy_(torch.rand(weight.shape, generator=generator, dtype=torch.float64) + 0.5)
            weight.div_(max(1, weight.numel() // len(weight)))
        else:
            weight.fill_(0.0 if "bias" in name.rpartition(".")[2] else 1.0)


def _positive(inputs: Inputs) -> Inputs:
    """Positive random numbers of float64 in the place of all floats."""
    generator = torch.Generator().manual_seed(1)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return torch.rand(leaf.shape, generator=generator, dtype=torch.float64) + 0.5
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

    return Inputs(*tree_map(convert, (inputs.args, inputs.kwargs)))


def _floats(output: Any) -> Iterator[Tensor]:
    """All floating tensors of a model's output: of tuples, dictionaries and objects that behave like them."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _floats(value)
    else:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor | Mapping):
                yield from _floats(leaf)


def total(output: Any) -> Tensor:
    """The sum of all floating outputs of a model; a loss that it returns beside them is left out."""
    leaves = list(_floats(output))
    return torch.stack([leaf.sum() for leaf in leaves if leaf.dim() or len(leaves) == 1]).sum()


# What the twin does instead of the network's own operations.

_PASS = {
    *("relu", "relu_", "relu6", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu", "selu_", "celu", "celu_"),
    *("gelu", "silu", "mish", "softplus", "softsign", "sigmoid", "sigmoid_", "tanh", "tanh_", "hardtanh"),
    *("hardtanh_", "hardswish", "hardsigmoid", "logsigmoid", "tanhshrink", "softshrink", "hardshrink"),
    *("threshold", "threshold_", "rrelu", "rrelu_", "prelu", "clamp", "clamp_", "clip", "abs", "neg", "sqrt"),
    *("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm", "normalize", "local_response_norm"),
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    *("log_softmax", "__neg__", "contiguous"),
}
_SUM = {"sub", "sub_", "__sub__", "__isub__", "rsub", "__rsub__", "subtract"}
_PRODUCT = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_QUOTIENT = {"div", "div_", "__truediv__", "__itruediv__", "true_divide", "divide"}
_AVERAGE: dict[str, Callable[..., Tensor]] = {
    "adaptive_max_pool1d": F.adaptive_avg_pool1d,
    "adaptive_max_pool2d": F.adaptive_avg_pool2d,
    "adaptive_max_pool3d": F.adaptive_avg_pool3d,
    "amax": torch.mean,
}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class _Twin(TorchFunctionMode):
    """Let everything through that the network's own operations would clip, cancel or normalise away."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.positions: dict[str, int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        output = _instead(name, args, kwargs)
        if output is None:
            output = function(*args, **kwargs)
            self._note(name, args, kwargs, output)
        return output

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Add up how often each weight of a layer is used."""
        if name == "linear":
            self._use(args[1], args[0].numel() // args[0].shape[-1])
        elif name in ("conv1d", "conv2d", "conv3d"):
            self._use(args[1], output.numel() // args[1].shape[0])
        elif name.startswith("conv_transpose"):
            self._use(args[1], args[0].numel() // args[1].shape[0])
        elif name in _RECURRENT:
            steps = args[0].numel() // args[0].shape[-1]
            for weight in args[2] if isinstance(args[2], list | tuple) else args[3]:
                self._use(weight, steps)
        elif name == "multi_head_attention_forward":
            tokens = args[0].numel() // args[0].shape[-1]
            projections = (kwargs.get(f"{letter}_proj_weight") for letter in "qkv")
            for weight in (args[5], args[11], *projections):
                self._use(weight, tokens)

    def _use(self, weight: Tensor | None, times: int) -> None:
        name = None if weight is None else self.names.get(weight.untyped_storage().data_ptr())
        if name is not None:
            self.positions[name] = self.positions.get(name, 0) + times


def _instead(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the twin computes instead of a network's operation; None where it computes the same."""
    if name in _PASS:
        return (args[0] if args else kwargs["input"]) * 1.0  # a new tensor, as the operation would give
    if name in _SUM:
        return args[0] + args[1]
    if name in _AVERAGE:
        return _AVERAGE[name](*args, **kwargs)
    if name.startswith("max_pool"):
        return _mean_pool(int(name[len("max_pool")]), *args, **kwargs)
    tensors = [value for value in args[:2] if isinstance(value, Tensor)]
    if name in _PRODUCT and len(tensors) == 2 and all(tensor.requires_grad for tensor in tensors):
        return args[0] + args[1]  # a gate: open to either of its factors
    if name in _QUOTIENT and len(tensors) == 2:
        return args[0] * 1.0
    return None


def _mean_pool(
    dims: int,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    if return_indices or dilation not in (1, (1,) * dims):
        return None
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    return pool(input, kernel_size, stride, padding, ceil_mode)


def check_paths(model: nn.Module, mask: Mapping[str, Tensor], example: Inputs | None) -> None:
    """Warn, before any training, of empty layers and of a network that no path leads through any more.

    An empty layer may be harmless: a residual network goes around an empty shortcut. A network without a path
    from input to output is not: it computes a constant and cannot learn.
    """
    empty = empty_layers(mask)
    found = None
    if example is not None and all_weights(mask) <= _LARGEST:
        try:
            found = flow(model, mask, example)
        except Exception as error:  # the user's own code may refuse a float64 copy of itself
            if empty:
                warnings.warn(f"paths through the network could not be followed: {error}", CollapseWarning, 4)
    if found is not None and not found.connected:
        cause = f"; empty: {_list(empty)}" if empty else ""
        warnings.warn(
            f"no path is left from input to output: the network computes a constant and cannot learn{cause}. "
            "Use a lower sparsity, another method or min_kept=1.",
            CollapseWarning,
            stacklevel=4,
        )
    elif empty:
        detour = (
            "paths around it remain, the network can learn"
            if found
            else "whether paths around it remain was not checked"
        )
        warnings.warn(f"nothing is left of {_list(empty)}; {detour}", CollapseWarning, stacklevel=4)


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
