"""float64, whatever the network's own code asks for.

Networks name precisions in their code: `x.float()`, `torch.zeros(3)`, `softmax(x, dtype=torch.float32)`. While
`Double` is active all of these are float64, so that a network whose parameters are float64 runs, and is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_NAMED_AFTER_A_TYPE = {"float", "half", "bfloat16"}
_GROUPED = {"grouped_mm", "_grouped_mm"}


class Double(TorchFunctionMode):
    """Every floating-point number in float64 while it is active."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return in_double(function, args, kwargs or {})


def in_double(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of torch gives if every floating-point type that is asked for is float64."""
    name = getattr(function, "__name__", "")
    if name in _NAMED_AFTER_A_TYPE and len(args) == 1 and isinstance(args[0], Tensor):
        return args[0].double()
    if name in _GROUPED and (found := _grouped_product(*args, **kwargs)) is not None:
        return found
    if name != "view":  # which looks at the same bits in another way
        args, kwargs = tree_map(_no_other_type, (args, kwargs))
    output = function(*args, **kwargs)
    is_narrow = isinstance(output, Tensor) and output.is_floating_point() and output.dtype != torch.float64
    return output.double() if is_narrow else output


def _no_other_type(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _grouped_product(
    a: Tensor, b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, **_: Any
) -> Tensor | None:
    """Rows of `a`, in groups that end at `offs`, times the matrices of `b`: torch has it in float32 only."""
    if offs is None:
        product = torch.matmul(a, b)
    elif a.dim() == 2 and b.dim() == 3:
        ends = offs.tolist()
        starts = [0, *ends[:-1]]
        pieces = [a[start:end] @ matrix for start, end, matrix in zip(starts, ends, b, strict=True)]
        pieces.append(a.new_zeros(len(a) - ends[-1], b.shape[-1]))
        product = torch.cat(pieces)
    else:
        return None
    return product if bias is None else product + bias
