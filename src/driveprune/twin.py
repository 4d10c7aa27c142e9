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

from driveprune.double import in_double
from driveprune.signals import gets_offset, is_offset, is_signal, mark

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
_QUOTIENT = {"div", "truediv", "divide", "true_divide"}
_EITHER = (
    _PRODUCT
    | _QUOTIENT
    | set(
        """
    add radd sub rsub subtract rdiv rtruediv
    maximum minimum fmax fmin lerp where atan2 hypot
    """.split()
    )
)
_BILINEAR = {"matmul", "bmm", "mm", "mv", "rmatmul"}
_PRODUCTS = _BILINEAR | {"addmm", "baddbmm"}
_COPIES = set(
    """
    getitem index_select gather take_along_dim embedding to double float half bfloat16 type contiguous clone reshape
    repeat repeat_interleave flatten roll flip interpolate pad
    """.split()
)
"""Functions whose result is made of their input's numbers: of a weight, that weight elsewhere."""
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
        self.turn, self.turns = 0, 1
        """Which run this is, and how many it takes until each expert of a mixture was chosen by some token."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        signals = [leaf for leaf in tree_leaves((args, kwargs)) if is_signal(leaf)]
        if not signals:
            output = in_double(function, args, kwargs)
            self._note_copy(name.strip("_"), args, kwargs, output)
            return output
        plain = name.strip("_").removeprefix("i") if name in _IN_PLACE_OPERATORS else name.strip("_")
        output = self._instead(plain, args, kwargs)
        if output is None:
            output = in_double(function, args, kwargs)
        elif name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.startswith("_")):
            output = args[0].copy_(output)
        if plain == "getitem" and args[0].dim() > 2:  # of a stack of matrices the input chooses some
            self._note_copy(plain, args, kwargs, output)
        self._count(plain, args, kwargs, output)
        if not name.endswith("_like") and not name.startswith("new_"):
            written = args[0] if name == "__setitem__" and is_signal(args[2]) else output
            self._mark(written, signals, gets_offset(plain, args, kwargs))
        return output

    def _mark(self, output: Any, signals: list[Tensor], offset: bool) -> None:
        """What comes of signals is a signal; but integers and flags only carry it if they come of integers."""
        from_floats = any(signal.is_floating_point() for signal in signals)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_complex():
                raise NotImplementedError("complex numbers are followed in rotations of pairs of channels only")
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or not from_floats):
                mark(leaf, offset)

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
            return self._bilinear(name, args)
        if name in _AVERAGE:
            return _AVERAGE[name](*args[:2], **_without(kwargs, "return_indices"))
        if name.startswith("max_pool"):
            return _mean_pool(int(name[len("max_pool")]), *args, **kwargs)
        if name in ("max", "min", "amax", "amin"):
            return self._largest(name, args, kwargs)
        return self._in_another_way(name, args, kwargs)

    def _in_another_way(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Choices, attention, tables, and pairs of channels as complex numbers: either goes into both."""
        match name:
            case "topk" | "argmax" | "argmin":
                return self._choice(name, args, kwargs)
            case "scaled_dot_product_attention":
                return self._attention(args, kwargs)
            case "multi_head_attention_forward":
                return self._multi_head(args, kwargs)
            case "einsum":
                return self._einsum(*args)
            case "view_as_complex":
                return _level(args[0]).sum(-1)
            case "view_as_real":
                return torch.stack([args[0], args[0]], -1)
            case "embedding":
                index, weight = _bound(args, kwargs, "input", "weight")
                return (weight.mean(0) * index.new_ones((*index.shape, 1), dtype=torch.float64)).abs()
        return None

    def _open(self, value: Tensor) -> Tensor:
        """1 where a signal can be other than zero and lets a factor pass: on a path, or where it is offset."""
        if is_offset(value):
            return torch.ones_like(value, dtype=torch.float64)
        return (value.detach() != 0).double()

    def _either(self, name: str, operands: list[Any]) -> Tensor:
        """The sum of the signals among the operands; a product keeps the size of a constant factor.

        Of two factors, and of a quotient's numerator and denominator, one passes where the other is open.
        """
        tensors = [value for value in operands if isinstance(value, Tensor)]
        signals = [value for value in tensors if is_signal(value)]
        if name in _PRODUCT and len(tensors) == 2 and len(signals) == 1:
            factor = next(value for value in tensors if not is_signal(value))
            return signals[0] * factor.abs()
        self.added |= {found for value in tensors if not is_signal(value) and (found := self._name(value))}
        shape = torch.broadcast_shapes(*(value.shape for value in tensors))  # type: ignore[no-untyped-call]
        passing = [_level(value) for value in signals]
        if len(signals) == 2 and name in _PRODUCT | _QUOTIENT:
            above, below = passing
            passing = [above * self._open(signals[1]) if name in _PRODUCT else above, below * self._open(signals[0])]
        return torch.stack([value.expand(shape) for value in passing]).sum(0)

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

    def _choice(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A choice among experts: each is chosen by somebody, whatever the twin's numbers are."""
        x = args[0] if args else kwargs["input"]
        if not x.is_floating_point() or not x.dim():
            return None
        rest = args[1:] if name == "topk" else (1, *args[1:])
        count, dim, *_ = (*rest, *(kwargs.get(key, -1) for key in ("k", "dim")[len(rest) :]))
        if dim is None:
            return None
        index = self._in_turn(x.movedim(dim, -1).shape, count).to(x.device).movedim(-1, dim)
        if name != "topk":
            return index if kwargs.get("keepdim", len(args) > 2 and args[2]) else index.squeeze(dim)
        return torch.return_types.topk((_level(x).gather(dim, index), index))

    def _in_turn(self, shape: torch.Size, count: int) -> Tensor:
        """For each row `count` of its entries, in turn, so that over all rows and runs each is chosen."""
        rows, size = prod(shape[:-1]), max(1, shape[-1])
        self.turns = min(_MOST_TURNS, max(self.turns, -(-size // max(1, rows * count))))
        chosen = torch.arange(rows * count) + self.turn * rows * count
        return (chosen % size).view(*shape[:-1], count)

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        query, key, value = _bound(args, kwargs, "query", "key", "value")
        bias = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        mixed = self._attended(query, key, value)
        if (found := self._name(bias)) is not None:
            self.added.add(found)
        if isinstance(bias, Tensor) and is_signal(bias) and bias.is_floating_point():
            mixed = mixed + _level(bias).mean(-1, keepdim=True)
        return mixed

    def _bilinear(self, name: str, args: tuple[Any, ...]) -> Tensor | None:
        """A product of two signals is open to either where the other is open: f(a, 1) + f(1, b)."""
        if not (is_signal(args[0]) and is_signal(args[1])):
            return None
        function: Callable[[Tensor, Tensor], Tensor] = getattr(torch, name.removeprefix("r"))
        a, b = args[:2] if name != "rmatmul" else (args[1], args[0])
        return function(_level(a), self._open(b)) + function(self._open(a), _level(b))

    def _einsum(self, equation: Any, *operands: Any) -> Tensor | None:
        """As a product of two signals; a product of more, or of one, is computed as it is."""
        factors = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
        if len(factors) != 2 or not all(map(is_signal, factors)):
            return None
        a, b = factors
        first: Tensor = torch.einsum(equation, _level(a), self._open(b))
        return first + torch.einsum(equation, self._open(a), _level(b))

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each output is reached by all queries and keys of its head, and by its own value.

        With fewer heads of keys and values than of queries (grouped-query attention) each serves several in a row.
        """
        opens = [self._open(each) for each in (query, key, value)]
        levels = [_level(each) for each in (query, key, value)]
        if query.dim() > 3:
            for each in (opens, levels):
                each[1:] = [_for_all_heads(tensor, query.shape[-3]) for tensor in each[1:]]
        scores = levels[0] * opens[1].mean(-2, keepdim=True) + opens[0] * levels[1].mean(-2, keepdim=True)
        told = levels[2].mean(-2, keepdim=True)
        return scores.mean(-1, keepdim=True) * opens[2].amax(-2, keepdim=True) + told

    def _multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        query, key, value, width, heads, together, biases = args[:7]
        apart = [kwargs.get(f"{letter}_proj_weight") for letter in "qkv"]
        weights = apart if together is None else together.chunk(3)
        projected = (F.linear(x, w) for x, w in zip((query, key, value), weights, strict=True))
        split = [x.view(*x.shape[:-1], heads, width // heads).transpose(0, -2) for x in projected]  # heads first
        for each, x in zip(split, (query, key, value), strict=True):
            mark(each, is_offset(x) or biases is not None)
        mixed = self._attended(*split).transpose(0, -2).flatten(-2)
        return F.linear(mixed.expand(*query.shape[:-1], width), args[11]), None

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
        elif name in _PRODUCTS and len(args) >= 2:
            factors = args[-2:]
            inner = factors[0].shape[-1] if name != "rmatmul" else factors[1].shape[-1]
            for weight in factors:
                self._use(weight, output.numel() * inner / max(1, weight.numel()))
        elif name == "grouped_mm":
            self._use(args[1], len(args[0]) / len(args[1]))
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
        if not isinstance(weight, Tensor):
            return None
        return self._names.get(weight.untyped_storage().data_ptr(), getattr(weight, "_copy_of", None))

    def _note_copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Remember whose numbers a tensor holds that is a weight's copy, or a part of it."""
        if name in _COPIES and isinstance(output, Tensor) and output.is_floating_point():
            found = {known for leaf in tree_leaves((args, kwargs)) if (known := self._name(leaf)) is not None}
            if len(found) == 1:
                output._copy_of = found.pop()  # type: ignore[attr-defined]


_MOST_TURNS = 64
_IN_PLACE_OPERATORS = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}


def _signal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = next(leaf for leaf in tree_leaves((args, kwargs)) if is_signal(leaf))
    return found


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


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


def _for_all_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[-3] in (1, heads) else tensor.repeat_interleave(heads // tensor.shape[-3], -3)


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
