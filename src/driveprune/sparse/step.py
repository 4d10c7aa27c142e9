"""One operation of a region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


class UnknownStepError(Exception):
    """A step that only the kernels for training know."""


@dataclass(frozen=True)
class Step:
    """One operation on blocked tensors."""

    kind: str
    """layer, norm, relu, max_pool, pool, add, cat, flatten, dropout or same."""
    inputs: tuple[str, ...]
    output: str
    module: nn.Module | None = None
    norm: nn.Module | None = None
    plus: str | None = None
    relu: bool = False
    halves: bool = False
    """Whether max pooling over windows of 2×2, side by side, follows the normalisation and the ReLU."""
    numbers: tuple[Any, ...] = ()
    dims: int = 4
    constant: bool = False
    """Whether it is a layer without weights, whose input gets its gradient from others."""

    @property
    def windows(self) -> dict[str, int]:
        """The numbers of a max pooling by name."""
        (kernel_rows, kernel_columns), (row_stride, column_stride), (top, left) = self.numbers
        return {
            "kernel_rows": kernel_rows, "kernel_columns": kernel_columns, "row_stride": row_stride,
            "column_stride": column_stride, "top": top, "left": left,
        }  # fmt: skip
