"""Atoms: which indices of which tensors are one, and can only be removed everywhere or nowhere.

Each index along each dimension of each tensor is an atom, a number. Dimensions along which nothing can be removed
have no atoms: their axis is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Axis = npt.NDArray[np.int64] | None
Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Use:
    """A layer that sums over an axis of its input: a convolution or a linear layer."""

    node: str
    input: str
    """The node whose value it takes."""
    module: str
    """The layer's name; empty if it is no module."""
    axis: npt.NDArray[np.int64]
    """The atoms of the input that it sums over."""
    dim: int
    """Which dimension of the input that is."""
    bias: bool
    """Whether a constant along the axis is the same as a bias, whatever the place in the image."""
    padded: bool
    """Whether it is that but for the zeros around the image."""


@dataclass
class Space:
    """The atoms of a network: which are one, and which must stay."""

    parents: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pinned: set[int] = field(default_factory=set)
    axes: dict[str, Axes] = field(default_factory=dict)
    """Node -> the axes of its value."""
    tensors: dict[str, Axes] = field(default_factory=dict)
    """Parameter or buffer -> its axes."""
    uses: list[Use] = field(default_factory=list)
    groups: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = field(default_factory=list)
    """Atoms of input and output of each group of a grouped convolution: all of them go, or none."""
    sizes: dict[str, dict[int, npt.NDArray[np.int64]]] = field(default_factory=dict)
    """Node that reshapes -> which numbers of its shape are the size of an axis with atoms."""

    def new(self, count: int) -> npt.NDArray[np.int64]:
        """So many atoms that were not there before."""
        first = self.parents.size
        self.parents = np.concatenate([self.parents, np.arange(first, first + count)])
        return np.arange(first, first + count)

    def roots(self, axis: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The one atom that stands for each."""
        found = self.parents[axis]
        while not np.array_equal(found, self.parents[found]):
            found = self.parents[found]
        return found

    def join(self, first: Axis, second: Axis) -> Axis:
        """Say that two axes are the same, index by index; with one that has no atoms, nothing can be removed."""
        if first is None or second is None or first.size != second.size:
            self.pin(first, second)
            return None
        for a, b in zip(self.roots(first), self.roots(second), strict=True):
            low, high = sorted((self.root(int(a)), self.root(int(b))))
            self.parents[high] = low
        return first

    def root(self, atom: int) -> int:
        """The one atom that stands for this one."""
        while self.parents[atom] != atom:
            atom = int(self.parents[atom])
        return atom

    def pin(self, *axes: Axis) -> None:
        """Say that nothing along these axes can be removed."""
        for axis in axes:
            if axis is not None:
                self.pinned |= set(axis.tolist())

    def pinned_roots(self) -> npt.NDArray[np.int64]:
        """The atoms that must stay."""
        return (
            np.unique(self.roots(np.array(sorted(self.pinned), np.int64))) if self.pinned else np.zeros(0, np.int64)
        )
