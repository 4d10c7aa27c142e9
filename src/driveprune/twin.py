"""A network's twin, in which signals from the input are all that flows, and nothing stops them but missing weights.

While `Twin` is active, the user's own forward code runs with other arithmetic. A tensor is a *signal* if it depends
on the network's input. Signals are never negative; activations and normalisation let them through; where two
signals meet, in a sum, a difference, a gate or attention, either may pass; constants such as biases and positions
are no source. So a signal is positive exactly where a path of kept weights leads to it, and a weight lies on a path
exactly if its gradient is positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_PASS = set(
    """
    relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign sigmoid tanh hardtanh hardswish hardsigmoid
    logsigmoid tanhshrink softshrink hardshrink threshold rrelu prelu clamp clamp_min clamp_max clip abs absolute neg
    negative sqrt rsqrt square pow rpow reciprocal exp exp2 expm1 log log1p log2 log10 sin cos erf expit logit atan
    sinh cosh asinh round floor ceil sign nan_to_num
    batch_norm instance_norm layer_norm group_norm rms_norm normalize local_response_norm
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout
    softmax log_softmax softmin gumbel_softmax cumsum masked_fill detach
    """.split()
)
_TOGETHER = set(
    """
    layer_norm rms_norm group_norm instance_norm normalize local_response_norm softmax log_softmax softmin
    gumbel_softmax cumsum
    """.split()
)
_PRODUCT = {"mul", "rmul", "multiply"}
_EITHER = _PRODUCT | set(
    """
    add radd sub rsub subtract div rdiv truediv rtruediv divide true_divide
    maximum minimum fmax fmin lerp where atan2 hypot
    """.split()
)
_BILINEAR = {"matmul", "bmm", "mm", "mv", "rmatmul"}
_AVERAGE: dict[str, Callable[..., Any]] = {
    "adaptive_max_pool1d": F.adaptive_avg_pool1d,
    "adaptive_max_pool2d": F.adaptive_avg_pool2d,
    "adaptive_max_pool3d": F.adaptive_avg_pool3d,
}
_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}


class Twin(TorchFunctionMode):
    """The arithmetic of the twin; also counts how often each weight is multiplied.

    `names` gives the weights' names by the addresses of their storage, `sizes` their numbers of elements. With
    `mixing`, what is normalised together (by its mean and deviation, or to a sum of 1) counts as joined: that is no
    path of weights, but an influence all the same.
    """

    def __init__(self, names: dict[int, str], sizes: Mapping[str, int], *, mixing: bool = False) -> None:
        super().__init__()
        self._names, self._sizes, self._mixing = names, sizes, mixing
        self.positions: dict[str, float] = {}
        """How often each weight of a tensor is multiplied."""
        self.added: set[str] = set()
        """Weights that are added to a signal, such as tables of positions: always on a path."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        signals = [leaf for leaf in tree_leaves((args, kwargs)) if is_signal(leaf)]
        if not signals:
            return _in_double(function(*args, **kwargs))
        plain = name.strip("_").removeprefix("i") if name in _IN_PLACE_OPERATORS else name.strip("_")
        output = self._instead(plain, args, kwargs)
        if output is None:
            output = _in_double(function(*args, **kwargs))
        elif name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.startswith("_")):
            output = args[0].copy_(output)
        self._count(plain, args, kwargs, output)
        if not name.endswith("_like") and not name.startswith("new_"):
            self._mark(output, signals)
        return output

    def _mark(self, output: Any, signals: list[Tensor]) -> None:
        """What comes of signals is a signal; but integers and flags only carry it if they come of integers."""
        from_floats = any(signal.is_floating_point() for signal in signals)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or not from_floats):
                mark(leaf)

    def _instead(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the twin computes instead of the network's operation; None where it computes the same."""
        if name in _PASS:
            level = _level(_signal(args, kwargs))
            return _mixed(name, level, args, kwargs) if self._mixing and name in _TOGETHER else level
        if name in _EITHER:
            return self._either(name, [*args, *kwargs.values()])
        if name in _JOINS:
            return self._join(name, *_bound(args, kwargs, "tensors"), *args[1:], **_without(kwargs, "tensors"))
        if name in _BILINEAR:
            return _bilinear(name, args)
        if name in _AVERAGE:
            return _AVERAGE[name](*args[:2], **_without(kwargs, "return_indices"))
        if name.startswith("max_pool"):
            return _mean_pool(int(name[len("max_pool")]), *args, **kwargs)
        if name in ("max", "min", "amax", "amin"):
            return self._largest(name, args, kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(*_bound(args, kwargs, "query", "key", "value"))
        if name == "multi_head_attention_forward":
            return _multi_head(args, kwargs)
        if name == "embedding":
            index, weight = _bound(args, kwargs, "input", "weight")
            return (weight.mean(0) * index.new_ones((*index.shape, 1), dtype=torch.float64)).abs()
        return None

    def _either(self, name: str, operands: list[Any]) -> Tensor:
        """The sum of the signals among the operands; a product keeps the size of a constant factor."""
        tensors = [value for value in operands if isinstance(value, Tensor)]
        signals = [value for value in tensors if is_signal(value)]
        if name in _PRODUCT and len(tensors) == 2 and len(signals) == 1:
            factor = next(value for value in tensors if not is_signal(value))
            return signals[0] * factor.abs()
        self.added |= {found for value in tensors if not is_signal(value) and (found := self._name(value))}
        shape = torch.broadcast_shapes(*(value.shape for value in tensors))  # type: ignore[no-untyped-call]
        return torch.stack([_level(value).expand(shape) for value in signals]).sum(0)

    def _join(self, name: str, tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Signals side by side; constants among them, such as a token for the class, are nothing."""
        self.added |= {found for value in tensors if not is_signal(value) and (found := self._name(value))}
        function: Callable[..., Tensor] = getattr(torch, name)
        return function(
            [value if is_signal(value) else torch.zeros_like(value) for value in tensors], *args, **kwargs
        )

    def _largest(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 1 and isinstance(args[1], Tensor):
            return self._either(name, list(args))
        x = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dim is None or dim == ():
            return x.mean()
        keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        mean = x.mean(dim, keepdim=keepdim)
        if name.startswith("a"):
            return mean
        return torch.return_types.max((mean, x.detach().argmax(dim, keepdim=keepdim)))

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Add up how often the weights of a call are multiplied."""
        if name == "linear":
            x, weight = _bound(args, kwargs, "input", "weight")
            self._use(weight, x.numel() / max(1, x.shape[-1]))
        elif name in ("conv1d", "conv2d", "conv3d"):
            _, weight = _bound(args, kwargs, "input", "weight")
            self._use(weight, output.numel() / weight.shape[0])
        elif name.startswith("conv_transpose"):
            x, weight = _bound(args, kwargs, "input", "weight")
            self._use(weight, x.numel() / weight.shape[0])
        elif name in ("matmul", "mm", "addmm"):
            x, weight = args[-2:]
            self._use(weight, x.numel() / weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 0)
        elif name == "bilinear":
            self._use(args[2], prod(args[0].shape[:-1]))
        elif name in _RECURRENT:
            steps = args[0].numel() / args[0].shape[-1]
            for weight in tree_leaves((args, kwargs)):
                if isinstance(weight, Tensor) and weight.dim() == 2 and not is_signal(weight):
                    self._use(weight, steps)
        elif name == "multi_head_attention_forward":
            self._count_attention(args, kwargs)

    def _count_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked, known, told = (args[i].numel() / args[i].shape[-1] for i in range(3))
        self._use(args[5], (asked + known + told) / 3)
        self._use(args[11], asked)
        for letter, tokens in zip("qkv", (asked, known, told), strict=True):
            self._use(kwargs.get(f"{letter}_proj_weight"), tokens)

    def _use(self, weight: Any, times: float) -> None:
        name = self._name(weight)
        if name is not None:
            share = weight.numel() / self._sizes[name]  # less than 1 for a slice of the weight
            self.positions[name] = self.positions.get(name, 0) + times * share

    def _name(self, weight: Any) -> str | None:
        return self._names.get(weight.untyped_storage().data_ptr()) if isinstance(weight, Tensor) else None


_IN_PLACE_OPERATORS = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}


def mark(tensor: Tensor) -> Tensor:
    """Say that a tensor depends on the network's input."""
    tensor._is_signal = True  # type: ignore[attr-defined]
    return tensor


def is_signal(value: Any) -> bool:
    """Whether a value depends on the network's input."""
    return isinstance(value, Tensor) and getattr(value, "_is_signal", False)


def _signal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = next(leaf for leaf in tree_leaves((args, kwargs)) if is_signal(leaf))
    return found


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


def _in_double(output: Any) -> Any:
    """Floats in float64, whatever the network asked for."""
    if isinstance(output, Tensor) and output.is_floating_point() and output.dtype != torch.float64:
        return output.double()
    return output


def _level(signal: Tensor) -> Tensor:
    """The signal as a new tensor, scaled as a whole so that it neither grows nor fades."""
    signal = signal.double()
    largest = float(signal.detach().max()) if signal.numel() else 0.0
    return torch.div(signal, largest if largest > 0 else 1.0)


def _mixed(name: str, level: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Each signal and those that are normalised together with it; if in doubt, all of an example."""
    if name in ("layer_norm", "rms_norm"):
        (shape,) = _bound(args[1:], kwargs, "normalized_shape")
        return level + level.mean(tuple(range(-len(shape), 0)), keepdim=True)
    return level + level.flatten(1).mean(1).view(-1, *[1] * (level.dim() - 1))


def _bilinear(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """A product of two signals is open to either: f(a, 1) + f(1, b)."""
    if not (is_signal(args[0]) and is_signal(args[1])):
        return None
    function: Callable[[Tensor, Tensor], Tensor] = getattr(torch, name.removeprefix("r"))
    a, b = (_level(arg) for arg in args[:2])
    return function(a, torch.ones_like(b)) + function(torch.ones_like(a), b)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each output is reached by all queries and keys of its head, and by its own value."""
    mixed = _level(query).mean(-1, keepdim=True) + _level(key).mean((-2, -1), keepdim=True)
    return mixed + _level(value).mean(-2, keepdim=True)


def _multi_head(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    query, key, value, width, heads, together = args[:6]
    apart = [kwargs.get(f"{letter}_proj_weight") for letter in "qkv"]
    weights = apart if together is None else together.chunk(3)
    projected = (F.linear(x, w) for x, w in zip((query, key, value), weights, strict=True))
    split = [x.view(*x.shape[:-1], heads, width // heads).transpose(0, -2) for x in projected]  # heads first
    mixed = _attention(*split).transpose(0, -2).flatten(-2)
    return F.linear(mixed.expand(*query.shape[:-1], width), args[11]), None


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
    if return_indices or dilation not in (1, (1,) * dims, [1] * dims):
        return None
    pool: Callable[..., Tensor] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    return pool(input, kernel_size, stride or None, padding, ceil_mode)
