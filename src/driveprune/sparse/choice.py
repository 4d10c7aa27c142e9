"""Whether a layer is faster sparse or with its zeros filled in, by a measurement on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from driveprune.compiled import threads
from driveprune.sparse.blocked import convolve, pack, unpack
from driveprune.sparse.layers import SparseLayer

BATCH = 32
"""Images to measure with."""

CLEARLY_SPARSE = 0.3
"""Below this density nothing is measured: the sparse kernels win."""

WORTH_MEASURING = 20_000_000
"""Layers of fewer multiply-adds are not worth leaving the kernels' layout."""

CLEARLY_FASTER = 0.85
"""So much less time must torch take: a measurement of a few milliseconds is not exact."""

_measured: dict[tuple[object, ...], bool] = {}


def is_dense_faster(layer: SparseLayer, shape: torch.Size) -> bool:
    """Whether torch computes a layer faster than the sparse kernels, for an input of a shape; measured once."""
    weights = math.prod(layer.shape)
    work = weights * BATCH * (math.prod(layer.kernel.layer.size(*shape[2:])) if len(shape) == 4 else 1)
    if layer.weight.numel() < CLEARLY_SPARSE * weights or work < WORTH_MEASURING:
        return False
    key = layer.shape, layer.geometry, tuple(shape[1:]), layer.weight.numel(), threads()
    if key not in _measured:
        x = torch.randn(BATCH, *shape[1:], generator=torch.Generator().manual_seed(0))
        _measured[key] = _seconds(lambda: _dense(layer, x)) < CLEARLY_FASTER * _seconds(lambda: _sparse(layer, x))
    return _measured[key]


def _sparse(layer: SparseLayer, x: Tensor) -> Callable[[], object]:
    """Forward and backward in the kernels' own layout."""
    packed = pack(x).requires_grad_()
    weight = layer.weight.detach().requires_grad_()

    def work() -> object:
        out = convolve(packed, weight, layer.bias, layer.kernel)
        return torch.autograd.grad(out, (packed, weight), torch.ones_like(out))

    return work


def _dense(layer: SparseLayer, x: Tensor) -> Callable[[], object]:
    """The same by torch, with the way from the kernels' layout and back."""
    packed = pack(x).requires_grad_()
    weight = layer.weight.detach().requires_grad_()

    def work() -> object:
        out = pack(layer.forward_dense(unpack(packed, len(x), x.dim()), weight))
        return torch.autograd.grad(out, (packed, weight), torch.ones_like(out))

    return work


def _seconds(prepare: Callable[[], Callable[[], object]]) -> float:
    """The least time of a few runs, after one that does not count."""
    work = prepare()
    times = []
    for _ in range(4):
        start = time.perf_counter()
        with torch.enable_grad():
            work()
        times.append(time.perf_counter() - start)
    return min(times[1:])
