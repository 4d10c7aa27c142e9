"""Inference for one image at a time: the vectors run along the pixels, and one call does a whole region.

A value is a plane for each channel, with zeros around it. The zeros between two rows are the right border of one and
the left border of the other, so that a plane is one line of pixels in which every kept weight is an offset. Where
rows are whole vectors there is nothing between them, and layers are done by rows: see `driveprune.sparse.rows`. A
layer with a stride, or one that changes the size, first sorts its input by the remainders of the stride.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from driveprune.compiled import threads, use_threads
from driveprune.sparse.arena import Arena
from driveprune.sparse.blocked import pooled
from driveprune.sparse.code import LANES, LINE
from driveprune.sparse.flat_kernels import (
    ACROSS,
    ADD,
    AFFINE,
    COPY,
    FIELDS,
    LAYER,
    LINEAR,
    MAX_POOL,
    MEAN,
    ROWS,
    SPREAD,
    work,
    work_together,
)
from driveprune.sparse.folded import Folded, Weights
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.line import ways
from driveprune.sparse.memory import Floats
from driveprune.sparse.rows import SIDES, TILE
from driveprune.sparse.step import Step, UnknownStepError
from driveprune.sparse.team import counters_for
from driveprune.sparse.tiling import Ints, Layer

ROOM = 16 * LANES
"""Numbers that may be read behind the end, beside a row: a kernel reaches less far to the right than that."""

LARGEST = 2**31 - 1
"""Offsets are numbers of 32 bits."""

ITEM_WORK = 1_000
"""Vector operations that are worth being a piece of work of their own: about half a microsecond."""

PIECES = 4
"""Pieces that a thread's work in a step is divided into, so that another one can help."""

LEAST_PART = 20
"""So many vectors of a line of pixels are worth being a thread's part of it: at least six, as fewer sums would take
several weights at once."""

TEAM_WORK = 200_000
"""Vector operations of a region that are worth the waking of other threads."""

PAIRED_SHARE = 0.83
"""Two outputs are computed together if they have at most this share of their places: each vector is loaded once, but
some products are in vain."""

PAIRED_DENSITY = 0.1
"""Layers with fewer weights than this have hardly two outputs that are alike."""


FIRST_LEVEL_BYTES = 26_000
"""What the rows that a tile reads should take of the first-level cache (32 kB or more)."""

LEAST_WEIGHTS = 20
"""Input channels are taken in groups only if so many weights of an output are left for each group."""


class _Pitch:
    """The length of a row with its border: the same for all values that layers lead from one to the other."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._other: _Pitch | None = None
        self._ways: set[bool] = set()

    def _last(self) -> _Pitch:
        last = self
        while last._other is not None:  # as many as there are layers
            last = last._other
        return last

    def need(self, least: int) -> None:
        """At least so long."""
        last = self._last()
        last._least = max(last._least, least)

    def join(self, other: _Pitch) -> None:
        """From now on the same as another."""
        first, second = self._last(), other._last()
        if first is not second:
            second.need(first._least)
            second._ways |= first._ways
            first._other = second

    def read(self, *, by_rows: bool) -> None:
        """A layer reads it by rows, with nothing between them, or as a line."""
        self._last()._ways.add(by_rows)

    @property
    def contested(self) -> bool:
        """Whether some layers read it by rows and others as a line."""
        return len(self._last()._ways) > 1

    @property
    def length(self) -> int:
        """What it is, when all needs are known."""
        return self._last()._least


@dataclass(frozen=True)
class _Sorting:
    """How the pixels of planes are sorted: by the remainders of a stride, so many of them, from a border on.

    If they are to be read by rows there is no border: what is before the first pixel is zero.
    """

    stride: tuple[int, int]
    kinds: tuple[int, int]
    border: tuple[int, int]
    by_rows: bool

    def taps(self, layer: Layer) -> tuple[Ints, Ints]:
        """Which row, and which column, of those that are sorted each row and column of a kernel begins with."""
        sizes = zip(layer.kernel, layer.dilation, layer.padding, self.border, strict=True)
        rows, columns = (np.arange(kernel) * gap - pad + border for kernel, gap, pad, border in sizes)
        return rows, columns

    def serves(self, layer: Layer, has: tuple[int, int], wanted: tuple[int, int], *, by_rows: bool) -> bool:
        """Whether a layer finds all that it reads for an output of a size, if each kind is so large."""
        both = zip(self.taps(layer), self.stride, self.kinds, has, wanted, strict=True)
        return (layer.stride, by_rows) == (self.stride, self.by_rows) and all(
            (taps % stride).max() < kinds
            and (by_rows or (taps.min() >= 0 and (taps // stride).max() + count <= size))
            for taps, stride, kinds, size, count in both
        )


class _Value:
    """Planes of (height + 2 · border) rows."""

    def __init__(
        self, shape: tuple[int, int, int], *, narrow: bool = False, sorting: _Sorting | None = None
    ) -> None:  # fmt: skip
        self.shape, self.border = shape, 0
        self.narrow, self.sorting = narrow, sorting
        """Planes of one number, side by side; sorted for a layer's stride, border and all."""
        self.pitch = _Pitch(shape[2])
        self.framed = False
        """Whether the zeros around it are written with it: else they are there from the start."""
        self.begin = self.start = self.plane = 0
        """Where it and its first pixel are in the arena, and how far the next plane's is; once it is laid out."""

    def need(self, border: int, *, by_rows: bool) -> None:
        """So many zeros on all sides; only above and below if it is read by rows."""
        self.border = max(self.border, border)
        self.pitch.read(by_rows=by_rows)
        if not by_rows:
            self.pitch.need(self.shape[2] + border)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Values of the same kind have their zeros in the same places."""
        return self.shape, self.border, self.pitch.length, self.narrow, self.sorting, self.framed

    @property
    def line(self) -> int:
        """Numbers from the first pixel to the end of the last row."""
        return self.shape[1] * self.pitch.length

    @property
    def size(self) -> int:
        """Numbers that it takes in the arena."""
        return self.shape[0] * self._apart

    @property
    def frame(self) -> int:
        """Zeros above and below each plane, if these are read by rows."""
        return self.border * self.pitch.length

    @property
    def _lead(self) -> int:
        return 0 if self.narrow else _rounded(self.border * (self.pitch.length + 1))

    @property
    def _apart(self) -> int:
        """From plane to plane."""
        if self.narrow:
            return 1
        apart = self._lead + _rounded(max(_rounded(self.line), self.line + self.border * self.pitch.length))
        return apart + LINE if apart % (2 * LINE) == 0 else apart  # they begin in different places of the cache

    def lay_out(self, place: int) -> None:
        """Put it into the arena."""
        self.begin, self.start, self.plane = place, place + self._lead, self._apart

    @property
    def planes(self) -> tuple[int, int, int, int]:
        """Where the first one begins, how far the next one is, how many there are, and of how many pixels."""
        assert self.pitch.length == self.shape[2]  # which are side by side
        return self.start, self.plane, self.shape[0], self.line

    def strided(self, arena: Tensor) -> Tensor:
        """Its pixels in the arena, as a batch of one image."""
        return arena.as_strided((1, *self.shape), (0, self.plane, self.pitch.length, 1), self.start)


def _rounded(count: int, unit: int = LANES) -> int:
    return -(-count // unit) * unit


@dataclass
class _Work:
    """A step to be: what it reads and writes, and its own numbers."""

    kind: int
    source: _Value
    target: _Value
    plus: _Value | None = None
    first: int = 0
    """The channel of the target that it begins with."""
    channels: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    folded: Folded | None = None
    layer: Layer | None = None

    @property
    def frames(self) -> bool:
        """Whether it writes the zeros around its target, too."""
        sorting = self.target.sorting
        return self.kind == ROWS or (sorting is not None and sorting.by_rows)

    @property
    def values(self) -> list[_Value]:
        """What it reads and writes."""
        return [self.source, self.target, *([] if self.plus is None else [self.plus])]


@dataclass
class _Memory:
    """What one call needs for itself."""

    arena: Floats
    counters: Ints
    inputs: list[Tensor]
    outputs: list[Tensor]


class Flat:
    """A region for one image of a size, with all weights folded, as tables for so many threads."""

    def __init__(
        self, steps: list[Step], inputs: dict[str, tuple[int, int, int]], outputs: tuple[str, ...], team: int
    ) -> None:
        plan = _planned(steps, inputs)
        self.inputs, self.outputs = ([plan.values[name] for name in some] for some in (inputs, outputs))
        self.size = plan.lay_out(self.outputs)
        if self.size > LARGEST:
            raise UnknownStepError("offsets that are too long")
        tables = _Tables(team)
        for each in plan.work:
            tables.add(each)
        self.work = tables.work
        self.weights = Weights(tables.folds, tables.value_count, tables.bias_count)
        self.tables = tables.arrays()


class FlatRegion:
    """A region for one image of a size, in one call."""

    def __init__(self, steps: list[Step], inputs: dict[str, tuple[int, int, int]], outputs: tuple[str, ...]) -> None:
        self._threads = threads()
        self._flat = Flat(steps, inputs, outputs, self._threads)
        self._together = self._threads > 1 and self._flat.work > TEAM_WORK
        self._free: list[_Memory] = []

    def __call__(self, *images: Tensor) -> list[Tensor]:
        """The outputs for batches of one image each, with four dimensions."""
        flat = self._flat
        flat.weights.refresh()
        try:
            memory = self._free.pop()
        except IndexError:  # all are in use, by other threads
            memory = self._memory()
        for place, image in zip(memory.inputs, images, strict=True):
            place.copy_(image.view(place.shape))
        memory.counters[:] = 0
        weights = flat.weights.values, flat.weights.bias
        given = memory.arena, *flat.tables, weights, memory.counters, self._threads
        if self._together:
            use_threads()
            work_together(*given)  # type: ignore[no-untyped-call]
        else:
            work(*given, 0)  # type: ignore[no-untyped-call,call-arg]
        found = [place.clone(memory_format=torch.contiguous_format) for place in memory.outputs]
        self._free.append(memory)
        return found

    @torch.inference_mode(False)
    def _memory(self) -> _Memory:
        flat = self._flat
        arena = torch.zeros(flat.size, dtype=torch.float32)
        inputs, outputs = ([each.strided(arena) for each in some] for some in (flat.inputs, flat.outputs))
        counters = np.zeros(counters_for(len(flat.tables[1]) - 1), np.int64)
        return _Memory(arena.numpy(), counters, inputs, outputs)


def _planned(steps: list[Step], inputs: dict[str, tuple[int, int, int]]) -> _Plan:
    """The plan of a region: by rows where that is possible, if all that share rows can do so."""
    for by_rows in (True, False):
        plan = _Plan(inputs, by_rows=by_rows)
        for step in steps:
            plan.add(step)
        if not plan.contested:
            break
    return plan


def first_by_rows(steps: list[Step], inputs: dict[str, tuple[int, int, int]]) -> int:
    """How many of the first steps are layers that can be done by rows, or no layers at all."""
    plan = _Plan(inputs, by_rows=True)
    for number, step in enumerate(steps):
        try:
            plan.add(step)
        except UnknownStepError:
            return number
        if step.kind == "layer" and plan.work[-1].kind != ROWS:
            return number
    return len(steps)


class _Plan:
    """Steps and values of a region, before it is known where the values are."""

    def __init__(self, inputs: dict[str, tuple[int, int, int]], *, by_rows: bool) -> None:
        self._by_rows = by_rows
        self.values = {name: _Value(shape, narrow=shape[1:] == (1, 1)) for name, shape in inputs.items()}
        self._all, self._inputs = list(self.values.values()), len(inputs)
        self._sorted: dict[_Value, list[tuple[_Value, _Sorting]]] = {}
        """What there is of each value, sorted for the strides of layers."""
        self.work: list[_Work] = []

    @property
    def contested(self) -> bool:
        """Whether some layers want rows that others can not read."""
        return any(value.pitch.contested for value in self._all)

    def lay_out(self, outputs: list[_Value]) -> int:
        """Find a place for each value; how many numbers they take.

        A place is used again when nobody needs its value any more: for any value whose zeros are written with it, or
        for one with its zeros in the same places. A sum in a layer that is done by rows may take the place of what
        is added.
        """
        last = {value: number for number, each in enumerate(self.work) for value in each.values}
        arena, free = Arena(), defaultdict[Any, list[int]](list)
        for value in self._all[: self._inputs]:
            value.lay_out(arena.add(value.size))
        for each in self.work:
            each.target.framed = each.frames
        for number, each in enumerate(self.work):
            done = {value for value in each.values if last[value] == number and value not in outputs}
            if each.kind == ROWS and each.plus in done - {each.source}:
                each.target.border = max(each.target.border, each.plus.border)
                if each.plus.kind == each.target.kind:
                    each.target.lay_out(each.plus.begin)
                    done.remove(each.plus)
            for value in each.values:
                if value.plane == 0 and value.framed:
                    value.lay_out(arena.take(value.size))
                elif value.plane == 0:
                    places = free[value.kind]
                    value.lay_out(places.pop() if places else arena.add(value.size))
            for value in done:
                if value.framed:
                    arena.give_back(value.begin, value.size)
                else:
                    free[value.kind].append(value.begin)
        return arena.size + ROOM + max(value.pitch.length for value in self._all)

    def add(self, step: Step) -> None:
        """The next step."""
        x = self.values[step.inputs[0]]
        plus = None if step.plus is None else self.values[step.plus]
        match step.kind:
            case "dropout" | "same":
                self.values[step.output] = x
            case "flatten":
                self.values[step.output] = self._flattened(x)
            case "cat":
                self._add_cat(step)
            case "layer":
                assert isinstance(step.module, SparseLayer)
                self._add_layer(step, step.module.kernel.layer, x, plus)
            case "norm" | "relu":
                folded = Folded(None, step.norm, x.shape[0])
                self._simple(step, AFFINE, x, x.shape, plus, {"relu": int(step.relu)}, folded)
            case "max_pool":
                rows, columns = pooled(x.shape[1:], *step.numbers)
                numbers = {"rows": rows, "columns": columns, **step.windows}
                self._simple(step, MAX_POOL, x, (x.shape[0], rows, columns), None, numbers)
            case "pool" if isinstance(step.module, nn.AdaptiveAvgPool2d) and step.module.output_size in {1, (1, 1)}:
                self._simple(step, MEAN, x, (x.shape[0], 1, 1), None, {})
            case "add":
                self._simple(step, ADD, x, x.shape, self.values[step.inputs[1]], {"relu": int(step.relu)})
            case _:
                raise UnknownStepError(step.kind)

    def _new(
        self, shape: tuple[int, int, int], *, narrow: bool = False, sorting: _Sorting | None = None
    ) -> _Value:  # fmt: skip
        self._all.append(_Value(shape, narrow=narrow, sorting=sorting))
        return self._all[-1]

    def _simple(
        self, step: Step, kind: int, x: _Value, shape: tuple[int, int, int], plus: _Value | None,
        numbers: dict[str, int], folded: Folded | None = None,
    ) -> None:  # fmt: skip
        _check_sum(plus, shape)
        out = self._new(shape, narrow=shape[1:] == (1, 1))
        self.values[step.output] = out
        self.work.append(_Work(kind, x, out, plus, channels=shape[0], numbers=numbers, folded=folded))

    def _narrow(self, x: _Value) -> _Value:
        """Channels of one pixel side by side."""
        if x.narrow:
            return x
        narrow = self._new(x.shape, narrow=True)
        self.work.append(_Work(COPY, x, narrow, channels=x.shape[0]))
        return narrow

    def _flattened(self, x: _Value) -> _Value:
        channels, height, width = x.shape
        if height == width == 1:
            return self._narrow(x)
        out = self._new((channels * height * width, 1, 1), narrow=True)
        apart = {"out_plane": height * width, "out_pitch": width}
        self.work.append(_Work(COPY, x, out, channels=channels, numbers=apart))
        return out

    def _add_cat(self, step: Step) -> None:
        parts = [self.values[name] for name in step.inputs]
        if len({part.shape[1:] for part in parts}) > 1:
            raise UnknownStepError("cat of different sizes")
        size = parts[0].shape[1:]
        out = self._new((sum(part.shape[0] for part in parts), *size), narrow=size == (1, 1))
        first = 0
        for part in parts:
            self.work.append(_Work(COPY, part, out, first=first, channels=part.shape[0]))
            first += part.shape[0]
        self.values[step.output] = out

    def _add_layer(self, step: Step, layer: Layer, x: _Value, plus: _Value | None) -> None:
        layer.check(x.shape[0])
        step_size = x.shape[1:]
        shape = (layer.outputs, *layer.size(*x.shape[1:]))
        _check_sum(plus, shape)
        single = x.shape[1:] == layer.kernel == layer.stride == (1, 1) and layer.padding == (0, 0)
        narrow = single and (plus is None or plus.narrow)
        out = self._new(shape, narrow=narrow)
        self.values[step.output] = out
        if narrow:
            x = self._narrow(x)
        else:
            plus = None if plus is None else self._wide(plus)
            x = self._joined(layer, x, out)
            if plus is not None:
                out.pitch.join(plus.pitch)
        numbers = {"relu": int(step.relu)}
        wide = ROWS if self._reads_rows(layer, step_size, out) else LAYER
        self.work.append(
            _Work(
                LINEAR if narrow else wide,
                x,
                out,
                plus,
                0,
                layer.outputs,
                numbers,
                Folded(step.module, step.norm),
                layer,
            )
        )

    def _wide(self, x: _Value) -> _Value:
        """A plane that vectors can be read from."""
        if not x.narrow:
            return x
        wide = self._new(x.shape)
        self.work.append(_Work(COPY, x, wide, channels=x.shape[0]))
        return wide

    def _reads_rows(self, layer: Layer, size: tuple[int, int], out: _Value) -> bool:
        """Whether a layer reads images of a size by rows."""
        return self._by_rows and not out.narrow and _reads_rows(layer, size, out.shape[1:])

    def _joined(self, layer: Layer, x: _Value, out: _Value) -> _Value:
        """The input as a layer reads it, its rows as long as the output's."""
        by_rows = self._reads_rows(layer, x.shape[1:], out)
        if _keeps_size(layer) and not x.narrow:
            x.need(max(layer.padding), by_rows=by_rows)
            x.pitch.join(out.pitch)
            return x
        known = self._sorted.setdefault(x, [])
        size = out.shape[1:]
        found = next((each for each, how in known if how.serves(layer, each.shape[1:], size, by_rows=by_rows)), None)
        if found is None:
            found, how = self._sort(layer, x, out, by_rows=by_rows)
            known.append((found, how))
        if by_rows:
            found.need(_reach(layer), by_rows=True)
        else:
            found.pitch.read(by_rows=False)
        found.pitch.join(out.pitch)
        return found

    def _sort(self, layer: Layer, x: _Value, out: _Value, *, by_rows: bool) -> tuple[_Value, _Sorting]:
        """The input of a layer, sorted by the remainders of its stride; and how."""
        (sr, sc), (_, rows, columns) = layer.stride, out.shape
        reach = [
            0 if by_rows else (k - 1) * gap // step
            for k, gap, step in zip(layer.kernel, layer.dilation, layer.stride, strict=True)
        ]
        border = (0, 0) if by_rows else layer.padding
        deep, kinds = rows + reach[0], _remainders(layer, border)
        sorting = _Sorting(layer.stride, kinds, border, by_rows)
        sorted_ = self._new((x.shape[0] * kinds[0] * kinds[1], deep, columns + reach[1]), sorting=sorting)
        numbers = {
            "row_stride": sr, "column_stride": sc, "top": border[0], "left": border[1], "deep": deep,
            "columns": columns + reach[1], "row_kinds": kinds[0], "column_kinds": kinds[1],
        }  # fmt: skip
        self.work.append(_Work(SPREAD, x, sorted_, channels=x.shape[0], numbers=numbers))
        return sorted_, sorting


def _steps_of(layer: Layer) -> tuple[Ints, Ints]:
    """How far each row and each column of a kernel is from the pixel's own, in strides."""
    sizes = zip(layer.kernel, layer.dilation, layer.padding, layer.stride, strict=True)
    rows, columns = ((np.arange(kernel) * gap - pad) // step for kernel, gap, pad, step in sizes)
    return rows, columns


def _reach(layer: Layer) -> int:
    """Rows above or below its own that an output's row reads."""
    return int(np.abs(_steps_of(layer)[0]).max())


def _reads_rows(layer: Layer, size: tuple[int, int], out: tuple[int, int]) -> bool:
    """Whether rows are whole vectors, tiles whole rows, and no weight is more than one column away."""
    whole = size == (out[0] * layer.stride[0], out[1] * layer.stride[1])
    across = out[1] // LANES
    fit = out[1] % LANES == 0 and across in ACROSS and out[0] * across % TILE == 0
    return whole and fit and set(_steps_of(layer)[1].tolist()) <= set(SIDES)


def _keeps_size(layer: Layer) -> bool:
    """Whether a layer's output is as large as its input, whatever that is."""
    both = zip(layer.padding, layer.dilation, layer.kernel, strict=True)
    return layer.stride == (1, 1) and all(2 * pad == gap * (kernel - 1) for pad, gap, kernel in both)


def _remainders(layer: Layer, border: tuple[int, int]) -> tuple[int, int]:
    """How many remainders of the stride a layer's kernel reads, down and across, counted from a border on."""
    sizes = zip(layer.kernel, layer.dilation, layer.padding, border, layer.stride, strict=True)
    rows, columns = (
        max((place * gap - pad + first) % step for place in range(kernel)) + 1
        for kernel, gap, pad, first, step in sizes
    )
    return rows, columns


def _check_sum(plus: _Value | None, shape: tuple[int, int, int]) -> None:
    if plus is not None and plus.shape != shape:
        raise UnknownStepError("add of different sizes")


class _Tables:
    """The arrays that the kernels read."""

    def __init__(self, count: int) -> None:
        self._threads = count
        self._rows: list[dict[str, int]] = []
        self._items: list[tuple[int, ...]] = []
        self._queues = [0]
        self._jobs: list[Ints] = []
        self._offsets: list[Ints] = []
        self._masks: list[np.ndarray[Any, Any]] = []
        self._mask_places: dict[tuple[int, int, int], int] = {}
        self._job_count = self._offset_count = self._mask_count = 0
        self.folds: list[tuple[Folded, Ints, slice]] = []
        self.value_count = self.bias_count = 0
        self.work = 0
        """Vector operations of all steps."""

    def arrays(self) -> tuple[Any, ...]:
        """Steps, queues, items, jobs, offsets and masks."""
        steps = [[row.get(name, 0) for name in FIELDS] for row in self._rows]
        return (
            np.array(steps, np.int64).reshape(-1, len(FIELDS)),
            np.array(self._queues, np.int64),
            np.array(self._items, np.int64).reshape(-1, 4),
            np.concatenate([*self._jobs, np.zeros((1, 5), np.int64)]),
            np.concatenate([*self._offsets, np.zeros(1, np.int64)]).astype(np.int32),
            np.concatenate([*self._masks, np.zeros(1, np.int32)]),
        )

    def add(self, each: _Work) -> None:
        """One step."""
        x, out, plus = each.source, each.target, each.plus
        _, height, width = x.shape
        row = {
            "kind": each.kind, "input": x.start, "in_plane": x.plane, "in_pitch": x.pitch.length,
            "output": out.start + each.first * out.plane, "out_plane": out.plane, "out_pitch": out.pitch.length,
            "plus": -1, "height": height, "width": width, "frame": out.frame if out.framed else 0, **each.numbers,
        }  # fmt: skip
        if plus is not None:
            row |= {"plus": plus.start, "plus_plane": plus.plane, "plus_pitch": plus.pitch.length}
        costs = np.full(each.channels, height * width, np.int64)
        if each.kind == ROWS:
            self._add_rows(each, row)
        elif each.kind in {LAYER, LINEAR}:
            costs = self._add_layer(each, row)
        elif each.kind == AFFINE:
            assert each.folded is not None
            row |= {"bias": self.bias_count, "scale": self.bias_count + each.channels}
            self._fold(each.folded, np.zeros(0, np.int64), 0, 2 * each.channels)
        self._rows.append(row)
        if each.kind == ROWS:
            self._share_out_tiles(row["vectors"] // TILE, each.channels)
        else:
            self._share_out(costs, row.get("vectors", 1))

    def _share_out_tiles(self, tiles: int, outputs: int) -> None:
        """Divide a layer that is done by rows: tile by tile, of which a thread has those that are side by side.

        If there are few of them for the threads, a piece is only a part of the outputs.
        """
        count = self._threads
        parts = 1 if count == 1 else min(outputs, -(-2 * count // tiles))
        ranges = list(pairwise(part * outputs // parts for part in range(parts + 1)))
        pieces = [(low, high, tile, tile + 1) for tile in range(tiles) for low, high in ranges]
        for queue in range(count):
            mine = pieces[queue * len(pieces) // count : (queue + 1) * len(pieces) // count]
            self._items += mine
            self._queues.append(len(self._items))

    def _add_rows(self, each: _Work, row: dict[str, int]) -> None:
        """The weights of a layer that is done by rows."""
        assert each.layer is not None
        assert each.folded is not None
        layer, x, vectors = each.layer, each.source, each.target.line // LANES
        sides = _steps_of(layer)[1][layer.places[:, 3]]
        groups = _groups(layer, x)
        group = layer.places[:, 1] * groups // layer.inputs
        order = np.array([SIDES.index(side) for side in (-1, 0, 1)])[sides + 1]
        key = (group * layer.outputs + layer.places[:, 0]) * len(SIDES) + order
        sorting = np.argsort(key, kind="stable")
        starts = np.searchsorted(key[sorting], np.arange(groups * layer.outputs * len(SIDES) + 1))
        bounds = np.stack([starts[n : len(starts) - len(SIDES) + n : len(SIDES)] for n in range(len(SIDES) + 1)], 1)
        slots = np.empty(len(sorting), np.int64)
        slots[sorting] = np.arange(len(sorting))
        row |= {
            "vectors": vectors, "jobs": self._job_count, "bias": self.bias_count, "groups": groups,
            "outputs": layer.outputs, "across": each.target.shape[2] // LANES,
        }  # fmt: skip
        apart = np.full((len(bounds), 1), self.value_count - self._offset_count)
        self._jobs.append(np.concatenate([bounds + self._offset_count, apart], 1))
        self._offsets.append((_offsets(layer, x) - sides)[sorting])
        self._fold(each.folded, self.value_count + slots, len(slots), layer.outputs)
        self._job_count += len(bounds)
        self._offset_count += len(slots)
        self.work += len(slots) * vectors

    def _share_out(self, costs: Ints, vectors: int) -> None:
        """Divide a step into pieces of about the same work, in a queue for each thread.

        Of a large image, a thread has a part in all channels, most of which it made itself in the step before.
        """
        total, count = int(costs.sum()), self._threads
        parts = count if vectors >= LEAST_PART * count else 1
        pieces = min(PIECES * count // parts, total // ITEM_WORK // parts, len(costs))
        pieces = max(1, pieces - pieces % (count // parts))  # as many for each thread
        bounds = np.searchsorted(np.cumsum(costs), np.arange(1, pieces) * total / pieces)
        ranges = list(pairwise([0, *bounds.tolist(), len(costs)]))
        for queue in range(count):
            part = queue * parts // count
            first, end = part * vectors // parts, (part + 1) * vectors // parts
            mine = ranges if parts > 1 else ranges[queue * pieces // count : (queue + 1) * pieces // count]
            self._items += [(low, high, first, end) for low, high in mine]
            self._queues.append(len(self._items))
        self.work += total

    def _add_layer(self, each: _Work, row: dict[str, int]) -> Ints:
        """The weights of a layer; what each of its jobs costs."""
        assert each.layer is not None
        assert each.folded is not None
        layer, out = each.layer, each.target
        offsets = _offsets(layer, each.source)
        vectors = 1 if each.kind == LINEAR else -(-out.line // LANES)
        pairs = [] if each.kind == LINEAR else _pairs(layer)
        jobs = _Jobs(layer, offsets, pairs, vectors)
        row |= {"vectors": vectors, "jobs": self._job_count, "bias": self.bias_count}
        if each.kind == LAYER:
            row["mask"] = self._mask(out.shape[1], out.shape[2], out.pitch.length)
        table = jobs.table + np.array([0, 0, self._offset_count, self._offset_count, self.value_count])
        self._jobs.append(table)
        self._offsets.append(jobs.offsets)
        self._fold(each.folded, self.value_count + jobs.slots, jobs.value_count, layer.outputs)
        self._job_count += len(table)
        self._offset_count += len(jobs.offsets)
        costs: Ints = (table[:, 3] - table[:, 2] + 3) * vectors
        return costs

    def _mask(self, rows: int, columns: int, pitch: int) -> int:
        """Where the mask of the pixels in such a line is."""
        key = rows, columns, pitch
        if key not in self._mask_places:
            mask = np.zeros(_rounded(rows * pitch), np.int32)
            mask[: rows * pitch].reshape(rows, pitch)[:, :columns] = -1
            self._mask_places[key] = self._mask_count
            self._masks.append(mask)
            self._mask_count += len(mask)
        return self._mask_places[key]

    def _fold(self, folded: Folded, slots: Ints, values: int, bias: int) -> None:
        self.folds.append((folded, slots, slice(self.bias_count, self.bias_count + bias)))
        self.value_count += values
        self.bias_count += bias


def _groups(layer: Layer, x: _Value) -> int:
    """In how many groups to take the input channels, so that the rows which tiles of one read stay close."""
    rows = TILE * LANES // x.shape[2] + 2 * x.border
    kinds = 1 if x.sorting is None else x.sorting.kinds[0] * x.sorting.kinds[1]
    wanted = -(-layer.inputs * kinds * rows * x.shape[2] * 4 // FIRST_LEVEL_BYTES)
    return max(1, min(wanted, len(layer.places) // layer.outputs // LEAST_WEIGHTS))


def _offsets(layer: Layer, x: _Value) -> Ints:
    """How far from an output pixel's place in the line each weight's input is."""
    _, c, i, j = layer.places.T
    pitch, sorting = x.pitch.length, x.sorting
    if sorting is None:
        y, z = i * layer.dilation[0] - layer.padding[0], j * layer.dilation[1] - layer.padding[1]
        found = c * x.plane + y * pitch + z
    else:
        (sr, sc), kinds, (rows, columns) = sorting.stride, sorting.kinds, sorting.taps(layer)
        y, z = rows[i], columns[j]
        found = ((c * kinds[0] + y % sr) * kinds[1] + z % sc) * x.plane + y // sr * pitch + z // sc
    return np.asarray(found, np.int64)


class _Jobs:
    """The kept weights of a layer by job: an output, or two of which each place has a value for both."""

    def __init__(self, layer: Layer, offsets: Ints, pairs: list[tuple[int, int]], vectors: int) -> None:
        outputs = layer.places[:, 0]
        bounds = np.searchsorted(outputs, np.arange(layer.outputs + 1))
        self.slots = np.zeros(len(outputs), np.int64)
        """Where the value of each kept weight is."""
        self.value_count = 0
        self._offset_count = 0
        rows, found = [], []
        paired = {o for pair in pairs for o in pair}
        for first, second in [*pairs, *((o, -1) for o in range(layer.outputs) if o not in paired)]:
            both = [first] if second < 0 else [first, second]
            mine = [slice(bounds[o], bounds[o + 1]) for o in both]
            places = np.unique(np.concatenate([offsets[each] for each in mine]))
            for number, each in enumerate(mine):
                self.slots[each] = self.value_count + np.searchsorted(places, offsets[each]) * len(both) + number
            fill = -len(places) % ways(vectors, len(both))
            places = np.concatenate([places, places[:1].repeat(fill)])
            end = self._offset_count + len(places)
            rows.append((first, second, self._offset_count, end, self.value_count))
            found.append(places)
            self._offset_count = end
            self.value_count += len(places) * len(both)
        self.table = np.array(rows, np.int64).reshape(-1, 5)
        self.offsets = np.concatenate([*found, np.zeros(0, np.int64)])


def _pairs(layer: Layer) -> list[tuple[int, int]]:
    """Outputs that have so many places in common that they are faster together."""
    size = layer.inputs * layer.kernel[0] * layer.kernel[1]
    if len(layer.places) < PAIRED_DENSITY * layer.outputs * size:
        return []
    kept = np.zeros((layer.outputs, size), np.float32)
    o, c, y, x = layer.places.T
    kept[o, (c * layer.kernel[0] + y) * layer.kernel[1] + x] = 1
    counts, common = kept.sum(1), kept @ kept.T
    found, free = [], counts > 0
    for first in np.argsort(-counts, kind="stable").tolist():
        if free[first]:
            free[first] = False
            share = np.where(free, 1 - common[first] / (counts[first] + counts + (counts == 0)), 1.0)
            second = int(share.argmin())
            if share[second] <= PAIRED_SHARE:
                free[second] = False
                found.append((first, second))
    return found
