"""Inference for one image at a time: the vectors run along the pixels, and one call does a whole region.

A value is a plane for each channel, with zeros around it. The zeros between two rows are the right border of one and
the left border of the other, so that a plane is one line of pixels in which every kept weight is an offset. A layer
with a stride, or one that changes the size, first sorts its input by the remainders of the stride.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from driveprune.compiled import threads, use_threads
from driveprune.sparse.blocked import pooled
from driveprune.sparse.code import LANES
from driveprune.sparse.flat_kernels import (
    ADD,
    AFFINE,
    COPY,
    FIELDS,
    LAYER,
    LINEAR,
    MAX_POOL,
    MEAN,
    SPREAD,
    work,
    work_together,
)
from driveprune.sparse.folded import Folded, Weights
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.line import ways
from driveprune.sparse.memory import Floats
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


class _Pitch:
    """The length of a row with its border: the same for all values that layers lead from one to the other."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._other: _Pitch | None = None

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
            first._other = second

    @property
    def length(self) -> int:
        """What it is, when all needs are known."""
        return self._last()._least


@dataclass(frozen=True)
class _Sorting:
    """How the pixels of planes are sorted: by the remainders of a stride, so many of them, from a border on."""

    stride: tuple[int, int]
    kinds: tuple[int, int]
    border: tuple[int, int]

    def taps(self, layer: Layer) -> tuple[Ints, Ints]:
        """Which row, and which column, of those that are sorted each row and column of a kernel begins with."""
        sizes = zip(layer.kernel, layer.dilation, layer.padding, self.border, strict=True)
        rows, columns = (np.arange(kernel) * gap - pad + border for kernel, gap, pad, border in sizes)
        return rows, columns

    def serves(self, layer: Layer, has: tuple[int, int], wanted: tuple[int, int]) -> bool:
        """Whether a layer finds all that it reads for an output of a size, if each kind is so large."""
        both = zip(self.taps(layer), self.stride, self.kinds, has, wanted, strict=True)
        return layer.stride == self.stride and all(
            taps.min() >= 0 and (taps % stride).max() < kinds and (taps // stride).max() + count <= size
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
        self.start = self.plane = 0
        """Where the first pixel is in the arena, and how far the next plane's is; once it is laid out."""

    def need(self, border: int) -> None:
        """So many zeros on all sides."""
        self.border = max(self.border, border)
        self.pitch.need(self.shape[2] + border)

    @property
    def line(self) -> int:
        """Numbers from the first pixel to the end of the last row."""
        return self.shape[1] * self.pitch.length

    def lay_out(self, place: int) -> int:
        """Put it into the arena; the end of it."""
        channels = self.shape[0]
        if self.narrow:
            self.start, self.plane = place, 1
        else:
            lead = _rounded(self.border * (self.pitch.length + 1))
            self.start = place + lead
            self.plane = lead + _rounded(max(_rounded(self.line), self.line + self.border * self.pitch.length))
        return _rounded(place + channels * self.plane, 16)

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


@dataclass
class _Memory:
    """What one call needs for itself."""

    arena: Floats
    counters: Ints
    inputs: list[Tensor]
    outputs: list[Tensor]


class FlatRegion:
    """A region for one image of a size, with all weights folded, as tables for one call."""

    def __init__(self, steps: list[Step], inputs: dict[str, tuple[int, int, int]], outputs: tuple[str, ...]) -> None:
        plan = _Plan(inputs)
        for step in steps:
            plan.add(step)
        self._inputs = [plan.values[name] for name in inputs]
        self._outputs = [plan.values[name] for name in outputs]
        self._size = plan.lay_out()
        if self._size > LARGEST:
            raise UnknownStepError("offsets that are too long")
        self._threads = threads()
        tables = _Tables(self._threads)
        for each in plan.work:
            tables.add(each)
        self._together = self._threads > 1 and tables.work > TEAM_WORK
        self._weights = Weights(tables.folds, tables.value_count, tables.bias_count)
        self._tables = tables.arrays()
        self._free: list[_Memory] = []

    def __call__(self, *images: Tensor) -> list[Tensor]:
        """The outputs for batches of one image each, with four dimensions."""
        self._weights.refresh()
        try:
            memory = self._free.pop()
        except IndexError:  # all are in use, by other threads
            memory = self._memory()
        for place, image in zip(memory.inputs, images, strict=True):
            place.copy_(image.view(place.shape))
        memory.counters[:] = 0
        weights = self._weights.values, self._weights.bias
        given = memory.arena, *self._tables, weights, memory.counters, self._threads
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
        arena = torch.zeros(self._size, dtype=torch.float32)
        inputs, outputs = ([each.strided(arena) for each in some] for some in (self._inputs, self._outputs))
        counters = np.zeros(counters_for(len(self._tables[1]) - 1), np.int64)
        return _Memory(arena.numpy(), counters, inputs, outputs)


class _Plan:
    """Steps and values of a region, before it is known where the values are."""

    def __init__(self, inputs: dict[str, tuple[int, int, int]]) -> None:
        self.values = {name: _Value(shape, narrow=shape[1:] == (1, 1)) for name, shape in inputs.items()}
        self._all = list(self.values.values())
        self._sorted: dict[_Value, list[tuple[_Value, _Sorting]]] = {}
        """What there is of each value, sorted for the strides of layers."""
        self.work: list[_Work] = []

    def lay_out(self) -> int:
        """Find a place for each value; how many numbers they take."""
        end = 0
        for value in self._all:
            end = value.lay_out(end)
        return end + ROOM + max(value.pitch.length for value in self._all)

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
        self.work.append(
            _Work(
                LINEAR if narrow else LAYER,
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

    def _joined(self, layer: Layer, x: _Value, out: _Value) -> _Value:
        """The input as a layer reads it, its rows as long as the output's."""
        if _keeps_size(layer) and not x.narrow:
            x.need(max(layer.padding))
            x.pitch.join(out.pitch)
            return x
        known = self._sorted.setdefault(x, [])
        found = next((each for each, how in known if how.serves(layer, each.shape[1:], out.shape[1:])), None)
        if found is None:
            found, how = self._sort(layer, x, out)
            known.append((found, how))
        found.pitch.join(out.pitch)
        return found

    def _sort(self, layer: Layer, x: _Value, out: _Value) -> tuple[_Value, _Sorting]:
        """The input of a layer, sorted by the remainders of its stride; and how."""
        (sr, sc), (_, rows, columns) = layer.stride, out.shape
        reach = [
            (k - 1) * gap // step for k, gap, step in zip(layer.kernel, layer.dilation, layer.stride, strict=True)
        ]
        deep, kinds = rows + reach[0], _remainders(layer)
        sorting = _Sorting(layer.stride, kinds, layer.padding)
        sorted_ = self._new((x.shape[0] * kinds[0] * kinds[1], deep, columns + reach[1]), sorting=sorting)
        numbers = {
            "row_stride": sr, "column_stride": sc, "top": layer.padding[0], "left": layer.padding[1], "deep": deep,
            "columns": columns + reach[1], "row_kinds": kinds[0], "column_kinds": kinds[1],
        }  # fmt: skip
        self.work.append(_Work(SPREAD, x, sorted_, channels=x.shape[0], numbers=numbers))
        return sorted_, sorting


def _keeps_size(layer: Layer) -> bool:
    """Whether a layer's output is as large as its input, whatever that is."""
    both = zip(layer.padding, layer.dilation, layer.kernel, strict=True)
    return layer.stride == (1, 1) and all(2 * pad == gap * (kernel - 1) for pad, gap, kernel in both)


def _remainders(layer: Layer) -> tuple[int, int]:
    """How many remainders of the stride a layer's kernel reads, down and across."""
    sizes = zip(layer.kernel, layer.dilation, layer.stride, strict=True)
    rows, columns = (max(place * gap % step for place in range(kernel)) + 1 for kernel, gap, step in sizes)
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
            "plus": -1, "height": height, "width": width, **each.numbers,
        }  # fmt: skip
        if plus is not None:
            row |= {"plus": plus.start, "plus_plane": plus.plane, "plus_pitch": plus.pitch.length}
        costs = np.full(each.channels, height * width, np.int64)
        if each.kind in {LAYER, LINEAR}:
            costs = self._add_layer(each, row)
        elif each.kind == AFFINE:
            assert each.folded is not None
            row |= {"bias": self.bias_count, "scale": self.bias_count + each.channels}
            self._fold(each.folded, np.zeros(0, np.int64), 0, 2 * each.channels)
        self._rows.append(row)
        self._share_out(costs, row.get("vectors", 1))

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
