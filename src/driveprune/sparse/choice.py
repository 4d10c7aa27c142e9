"""What is faster sparse, and what with its zeros filled in, measured on this machine: layers, and networks."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from driveprune.compiled import threads
from driveprune.graph import Inputs, total
from driveprune.sparse.blocked import convolve, pack, unpack
from driveprune.sparse.layers import SparseLayer, Way, Ways

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


INFERENCE, TRAINING = "inference", "training step"

NO_SLOWER = 0.97
"""The sparse kernels are used if they take less than this share of torch's time: a measurement is not exact."""

TOKEN = 4
"""An example of no more than so many inputs shows what an input is, not how large batches are."""

CLEAR = 1.5
"""What takes so many times as long as the fastest is not measured any more."""

LEAST_ROUNDS, MOST_ROUNDS = 3, 100
STEADY = 1.05
"""The fastest two of a job's times must agree so well: on a busy machine, many are far too long."""
ENOUGH_SECONDS, LONGEST_SECONDS = 0.25, 0.7
"""For one comparison: in any case, for what is quick; and at most, if times are not steady or passes are slow."""


@dataclass(frozen=True)
class Measured:
    """What a pass of a whole network takes, in seconds, by each way; and the way that was chosen."""

    work: str
    """Inference or a training step."""
    batch: int
    seconds: Mapping[Way, float]
    chosen: Way
    busy: bool = False
    """Whether the machine was so busy that the seconds are those of the processors, not of the clock."""

    @property
    def sparse(self) -> float:
        """By the sparse kernels."""
        return self.seconds["sparse"]

    @property
    def dense(self) -> float:
        """By torch, with zeros filled in: the ordinary network."""
        return self.seconds["dense"]


def choose(
    net: nn.Module, ways: Ways, inputs: Inputs, shared: Iterable[object] = ()
) -> tuple[tuple[Measured, ...], tuple[str, ...]]:
    """Measure a whole network on a copy of it, and set the ways that its layers are computed.

    Args:
        net: a network with sparse layers.
        ways: what these layers have in common, to be set.
        inputs: an example.
        shared: what the copy need not copy.

    Returns:
        What was measured, and what could not be, in words.

    """
    twin = copy.deepcopy(net, {id(each): each for each in shared})
    own = next(module.ways for module in twin.modules() if isinstance(module, SparseLayer))
    size = batch_of(inputs)
    token = size <= TOKEN
    works: list[tuple[str, list[int]]] = [(INFERENCE, [size, max(size, BATCH)] if token else [size])]
    if any(weight.requires_grad for weight in net.parameters()):
        works.append((TRAINING, [BATCH if token else size]))
    found: list[Measured] = []
    notes: list[str] = []
    with undisturbed():
        for work, sizes in works:
            times = {each: _times(twin, own, work, repeated(inputs, size, each)) for each in sizes}
            known = {each: value for each, value in times.items() if not isinstance(value, str)}
            notes += [f"{work}, batch {each}: {why}" for each, why in times.items() if isinstance(why, str)]
            way = fastest_way(list(known.values())) if known else "sparse"
            _set(ways, work, way)
            found += [
                Measured(work, each, value, way, getattr(value, "busy", False)) for each, value in known.items()
            ]
    if not any(each.work == TRAINING for each in found):
        ways.training = ways.inference
    return tuple(found), tuple(notes)


def fastest_way(times: Sequence[Mapping[Way, float]]) -> Way:
    """The way for one kind of work, from its times at one or more sizes of batches.

    Sparse, if it is faster somewhere and nowhere slower, each by more than a measurement is inexact; else the one of
    torch's that is never far from the faster of both.

    >>> fastest_way([{"sparse": 1.0, "dense": 2.0}, {"sparse": 1.0, "dense": 1.01}])
    'sparse'
    >>> fastest_way([{"sparse": 1.0, "dense": 2.0}, {"sparse": 1.0, "dense": 0.9}])
    'dense'
    """
    torchs: list[dict[Way, float]] = [{way: each[way] for way in each if way != "sparse"} for each in times]
    if all("sparse" in each for each in times):
        shares = [each["sparse"] / min(others.values()) for each, others in zip(times, torchs, strict=True)]
        if max(shares) <= 1 / NO_SLOWER and min(shares) < NO_SLOWER:
            return "sparse"
    common = [way for way in torchs[0] if all(way in each for each in torchs)]
    worst = {way: max(each[way] / min(each.values()) for each in torchs) for way in common}
    best: Way = min(worst, key=worst.__getitem__)
    return "dense" if worst.get("dense", math.inf) * NO_SLOWER <= worst[best] else best


def _set(ways: Ways, work: str, way: Way) -> None:
    if work == INFERENCE:
        ways.inference = way
    else:
        ways.training = way


def _times(twin: nn.Module, own: Ways, work: str, inputs: Inputs) -> dict[Way, float] | str:
    """The time of a pass by each way; or why there is none, in words."""
    before = [(module, module.training) for module in twin.modules()]
    if work == INFERENCE or not twin.training:
        twin.train(work == TRAINING)
    images = any(isinstance(module, SparseLayer) and module.dims == 4 for module in twin.modules())
    wanted: tuple[Way, ...] = ("dense", "channels last", "sparse") if images else ("dense", "sparse")
    jobs = {way: partial(_pass, twin, own, way, work == TRAINING, inputs) for way in wanted}
    try:
        return timed(jobs)
    except Exception as error:  # the network's own code, which may refuse this batch
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        for module, training in before:
            module.training = training


def _pass(twin: nn.Module, own: Ways, way: Way, training: bool, inputs: Inputs) -> None:
    """One pass, in training with the way back."""
    own.inference = own.training = way
    with torch.set_grad_enabled(training):
        output = twin(*inputs.args, **inputs.kwargs)
        if training:
            twin.zero_grad(set_to_none=True)
            total(output).backward()  # type: ignore[no-untyped-call]


class Times(dict[Way, float]):
    """Seconds of each job."""

    busy = False
    """Whether these are seconds of the processors: on the clock, no two runs took as long as each other."""


def timed(jobs: Mapping[Way, Callable[[], object]]) -> Times:
    """The least seconds of each job, run in turn, so that what else runs disturbs them alike.

    The first run of each may compile kernels and makes tables: it does not count. What is clearly slower than the
    fastest does not run any more. On a machine so busy that times do not agree, those of the processors are taken.
    """
    for job in jobs.values():
        job()
    seconds: dict[Way, list[float]] = {way: [] for way in jobs}
    of_processors: dict[Way, list[float]] = {way: [] for way in jobs}
    start = time.perf_counter()
    for number in range(MOST_ROUNDS):
        near = _near(seconds)
        if len(near) < 2 or _is_enough([seconds[way] for way in near], time.perf_counter() - start):
            break
        for way in near if number % 2 == 0 else reversed(near):
            begin, worked = time.perf_counter(), time.process_time()
            jobs[way]()
            seconds[way].append(time.perf_counter() - begin)
            of_processors[way].append(time.process_time() - worked)
    busy = not all(map(_agree, seconds.values()))
    found = Times({way: min(each) for way, each in (of_processors if busy else seconds).items()})
    found.busy = busy
    return found


def _near(seconds: Mapping[Way, list[float]]) -> list[Way]:
    """What may be the fastest, as far as is known."""
    best = min((min(each) for each in seconds.values() if each), default=math.inf)
    return [way for way, each in seconds.items() if not _is_steady(each) or min(each) < CLEAR * best]


def _is_steady(times: Sequence[float]) -> bool:
    return len(times) >= LEAST_ROUNDS and _agree(times)


def _agree(times: Sequence[float]) -> bool:
    return len(times) > 1 and sorted(times)[1] <= STEADY * min(times)


def _is_enough(times: Sequence[Sequence[float]], spent: float) -> bool:
    """Whether times are known well enough, after so many seconds."""
    return (spent > ENOUGH_SECONDS and all(map(_is_steady, times))) or (
        spent > LONGEST_SECONDS and min(map(len, times)) > 1
    )


def batch_of(inputs: Inputs) -> int:
    """The number of examples in an example: the length of its first tensor."""
    leaves = [leaf for leaf in tree_leaves((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(leaves[0]) if leaves else 1


def repeated(inputs: Inputs, size: int, wanted: int) -> Inputs:
    """An example of so many inputs as a batch of another size: the same again and again."""
    if wanted == size or not size:
        return inputs

    def longer(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != size:
            return leaf
        return leaf.detach()[torch.arange(wanted) % size]

    return Inputs(*tree_map(longer, (inputs.args, inputs.kwargs)))


@contextmanager
def undisturbed() -> Iterator[None]:
    """All random numbers go on afterwards as if nothing had been drawn."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
