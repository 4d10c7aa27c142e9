"""Memory that is used again: fresh pages from the system cost more time than many of the kernels."""

from __future__ import annotations

import math
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

LIMIT = 1 << 30
"""Above so many bytes, what was not asked for in a while is given back to the system."""

WHILE = 1 << 34
"""Bytes that were handed out since a size was last asked for, if it counts as not asked for: several steps of a large
network, whose values are one piece of memory in training, or many small ones."""


class Memory:
    """Hands out tensors; the memory of those that nobody holds any more is handed out again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[int, list[Floats]] = defaultdict(list)
        self._asked: dict[int, int] = {}
        self._handed_out = 0
        self._unwanted = False
        """Whether what nobody holds is to be given back to the system before more is handed out."""

    def empty(self, *shape: int) -> Tensor:
        """A float32 tensor with anything in it."""
        count = math.prod(shape)
        if count < SMALL:
            return torch.empty(shape, dtype=torch.float32)
        with self._lock:
            if self._unwanted:
                self._forget_unheld()
            self._handed_out += 4 * count
            self._asked[count] = self._handed_out
            arrays = self._known[count]
            for number in range(len(arrays)):
                if sys.getrefcount(arrays[number]) == 2:  # the list's, and that of the question
                    return torch.from_numpy(arrays[number]).view(shape)
            if self._bytes() > LIMIT:
                self._forget_unused()
            arrays = self._known[count]
            arrays.append(torch.empty(count, dtype=torch.float32).numpy())
            return torch.from_numpy(arrays[-1]).view(shape)

    def give_back(self) -> None:
        """Give what nobody holds back to the system: now, or when memory is asked for next if it is just being so."""
        self._unwanted = True
        if self._lock.acquire(blocking=False):  # it may be this very thread that has the lock
            try:
                self._forget_unheld()
            finally:
                self._lock.release()

    def _bytes(self) -> int:
        return sum(4 * count * len(arrays) for count, arrays in self._known.items())

    def _forget_unused(self) -> None:
        for count in [count for count in self._known if self._handed_out - self._asked[count] > WHILE]:
            self._forget(count)

    def _forget_unheld(self) -> None:
        self._unwanted = False
        for count in list(self._known):
            self._forget(count)

    def _forget(self, count: int) -> None:
        """Forget the memory of a size that nobody holds."""
        arrays = self._known[count]
        held = [arrays[number] for number in range(len(arrays)) if sys.getrefcount(arrays[number]) > 2]
        self._known[count] = held
        if not held:
            del self._known[count], self._asked[count]


MEMORY = Memory()


class Lease:
    """Memory stays for whoever has one: when it ends, what nobody holds at that time goes back to the system.

    Each kernel and each network has one. Networks have memory of sizes of their own, which would stay after them.
    """

    _memory = MEMORY  # modules may be gone at the end of the process

    def __del__(self) -> None:
        self._memory.give_back()

    def __reduce__(self) -> tuple[type[Lease], tuple[()]]:
        return Lease, ()


def empty(*shape: int) -> Tensor:
    """A float32 tensor with anything in it, of memory that was used before if there is some."""
    return MEMORY.empty(*shape)
