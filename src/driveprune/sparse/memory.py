"""Memory that is used again: fresh pages from the system cost more time than many of the kernels."""

from __future__ import annotations

import sys
from collections import defaultdict
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]

SMALL = 1 << 16
"""Tensors of fewer numbers are left to torch."""

LIMIT = 1 << 31
"""Bytes to keep at most while nobody uses them."""


class Memory:
    """Hands out tensors; the memory of those that nobody holds any more is handed out again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[int, list[Floats]] = defaultdict(list)

    def empty(self, *shape: int) -> Tensor:
        """A float32 tensor with anything in it."""
        count = int(np.prod(shape))
        if count < SMALL:
            return torch.empty(shape)
        with self._lock:
            arrays = self._known[count]
            for number in range(len(arrays)):
                if sys.getrefcount(arrays[number]) == 2:  # the list's, and that of the question
                    return torch.from_numpy(arrays[number]).view(shape)
            if self._bytes() > LIMIT:
                self._forget_unused()
            arrays = self._known[count]
            arrays.append(torch.empty(count).numpy())
            return torch.from_numpy(arrays[-1]).view(shape)

    def _bytes(self) -> int:
        return sum(4 * count * len(arrays) for count, arrays in self._known.items())

    def _forget_unused(self) -> None:
        for arrays in self._known.values():
            arrays[:] = [array for array in arrays if sys.getrefcount(array) > 3]


MEMORY = Memory()


def empty(*shape: int) -> Tensor:
    """A float32 tensor with anything in it, of memory that was used before if there is some."""
    return MEMORY.empty(*shape)
