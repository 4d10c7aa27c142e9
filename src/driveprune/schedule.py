"""Paths of sparsities: what is removed after each cut."""

from __future__ import annotations

from driveprune.kinds import Count, PathName, checked
from driveprune.mask import check_sparsity


def exponential(sparsity: float, cuts: int) -> tuple[float, ...]:
    """Each cut removes the same share of what is left: after cut n of N, 1 - (1 - κ)^(n/N) is gone.

    >>> [round(s, 3) for s in exponential(0.875, cuts=3)]
    [0.5, 0.75, 0.875]
    """
    check_sparsity(sparsity)
    check_cuts(cuts)
    return (*(1 - (1 - sparsity) ** (n / cuts) for n in range(1, cuts)), sparsity)


def cubic(sparsity: float, cuts: int) -> tuple[float, ...]:
    """Fast at first, gentle at the end: κ·(1 - (1 - n/N)³), the path of gradual magnitude pruning.

    Reference: Zhu and Gupta, To prune, or not to prune, 2017.

    >>> cubic(0.8, cuts=2)
    (0.7000000000000001, 0.8)
    """
    check_sparsity(sparsity)
    check_cuts(cuts)
    return (*(sparsity * (1 - (1 - n / cuts) ** 3) for n in range(1, cuts)), sparsity)


def named(path: PathName, sparsity: float, cuts: int) -> tuple[float, ...]:
    """The path of a name.

    >>> named("cubic", 0.8, cuts=2) == cubic(0.8, cuts=2)
    True
    """
    return {"exponential": exponential, "cubic": cubic}[path](sparsity, cuts)


def check_cuts(cuts: int) -> int:
    """The number of cuts itself, or an error that names it."""
    found: int = checked("the number of cuts", cuts, Count)
    return found
