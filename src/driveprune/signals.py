"""Signals: tensors that depend on the network's input, and whether they can be other than zero without it.

A signal is *offset* if something was added on its way (a bias, a table of positions, the 1 of exp(0)): where no path
leads to it, it is a constant. Without an offset it is zero there, and so is all that it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_KEEP_ZERO = set(
    """
    relu relu6 leaky_relu elu selu celu gelu silu mish softsign tanh hardswish tanhshrink softshrink hardshrink prelu
    rrelu abs absolute neg negative sqrt square sin expm1 log1p erf sinh asinh atan round floor ceil sign nan_to_num
    dropout dropout1d dropout2d dropout3d feature_dropout detach rms_norm normalize cumsum
    matmul bmm mm mv rmatmul grouped_mm einsum embedding topk view_as_complex view_as_real
    view view_as reshape reshape_as transpose permute flatten unflatten squeeze unsqueeze expand expand_as getitem
    get chunk split unbind tensor_split contiguous clone to float double half bfloat16 type repeat repeat_interleave
    gather index_select take_along_dim index roll flip narrow select movedim moveaxis swapaxes swapdims t
    sum mean amax amin max min unfold fold pixel_shuffle pixel_unshuffle channel_shuffle interpolate tile tril triu
    diagonal avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    """.split()
)
"""Functions that make zeros of zeros."""
_LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
_SUMS = _JOINS | {"add", "radd", "sub", "rsub", "subtract", "maximum", "minimum", "fmax", "fmin"}
_WRITES = {"index_add", "index_copy", "scatter", "scatter_add", "copy", "setitem", "where"}
_DIVISIONS = {"div", "truediv", "divide", "true_divide"}


def mark(tensor: Tensor, offset: bool = False) -> Tensor:
    """Say that a tensor depends on the network's input."""
    tensor._is_signal = True  # type: ignore[attr-defined]
    tensor._is_offset = offset  # type: ignore[attr-defined]
    return tensor


def is_signal(value: Any) -> bool:
    """Whether a value depends on the network's input."""
    return isinstance(value, Tensor) and getattr(value, "_is_signal", False)


def is_offset(value: Any) -> bool:
    """Whether a signal may be other than zero where no path leads to it."""
    return getattr(value, "_is_offset", True)


def gets_offset(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of signals may be other than zero where they are zero; if in doubt, it may."""
    signals = [leaf for leaf in tree_leaves((args, kwargs)) if is_signal(leaf) and leaf.is_floating_point()]
    some = any(map(is_offset, signals))
    if not signals:
        return name != "embedding"
    if name in ("mul", "rmul", "multiply"):
        return all(map(is_offset, signals))  # one factor that is zero is enough
    if name in _DIVISIONS:
        return not is_signal(args[0]) or is_offset(args[0])
    if name in _LAYERS:
        return some or kwargs.get("bias", args[2] if len(args) > 2 else None) is not None
    if name == "scaled_dot_product_attention":
        return is_offset(kwargs.get("value", args[2] if len(args) > 2 else None))
    if name in ("pow", "masked_fill", "pad"):
        return some or not _keeps_zero_by_its_number(name, args, kwargs)
    if name in _SUMS or name in _WRITES or name in ("max", "min"):
        return some or any(not _is_nothing(value) for value in _constants(name, args, kwargs))
    return some or name not in _KEEP_ZERO


def _keeps_zero_by_its_number(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Powers above zero, and zeros put in."""
    if name == "pow":
        return len(args) > 1 and isinstance(args[1], int | float) and args[1] > 0
    place = {"masked_fill": 2, "pad": 3}[name]
    return (kwargs.get("value", args[place] if len(args) > place else None) or 0) == 0


def _constants(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """What takes part in a sum and is no signal; the places that numbers are written to are left out."""
    given = [*args, *kwargs.values()]
    if name in ("where", "setitem"):
        given = [each for each in given if not _is_place(each)]
    with_numbers = name in _SUMS | {"where", "setitem"} and name not in _JOINS
    for leaf in tree_leaves(given):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() and not is_signal(leaf):
                yield leaf
        elif with_numbers and isinstance(leaf, int | float) and not isinstance(leaf, bool):
            yield leaf


def _is_place(value: Any) -> bool:
    return isinstance(value, slice | tuple | list) or value is None or value is Ellipsis


def _is_nothing(value: Any) -> bool:
    """Zeros that no training changes."""
    if isinstance(value, Tensor):
        return not value.requires_grad and not torch.count_nonzero(value)
    return bool(value == 0)
