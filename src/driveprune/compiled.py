"""Loops compiled by numba, and the threads that they run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numba
import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(*, parallel: bool = False, nogil: bool = True) -> Callable[[_F], _F]:
    """Compile a function, and keep what was compiled for the next process where that is possible.

    One that is not `parallel` makes no arrays: numba then does not count references to them, which in short loops
    costs as much as the work.
    """

    def wrap(function: _F) -> _F:
        options: dict[str, Any] = {"nogil": nogil, "parallel": parallel, "error_model": "numpy", "_nrt": parallel}
        try:
            return cast(_F, numba.njit(cache=True, **options)(function))
        except RuntimeError:  # there is no folder to keep it in
            return cast(_F, numba.njit(**options)(function))

    return wrap


def threads() -> int:
    """How many threads compiled loops use: as many as torch, as far as numba has them."""
    _launch()
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


def use_threads() -> None:
    """Let the next compiled loop use as many threads as torch."""
    _set_threads(threads())  # type: ignore[type-var]


@numba.njit
def _set_threads(count: int) -> None:
    numba.set_num_threads(count)  # much faster here than in Python


@cache
def _launch() -> None:
    """Start numba's threads. It shares OpenMP with torch, whose number of threads it would change."""
    count = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(count)
