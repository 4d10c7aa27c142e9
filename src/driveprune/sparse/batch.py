"""Inference for a batch: a region in one call, whose steps a team of threads does together.

Values are blocked tensors in one piece of memory, which is used again when nobody needs a value any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from driveprune.compiled import threads, use_threads
from driveprune.sparse.arena import Arena
from driveprune.sparse.batch_kernels import (
    AFFINE,
    BY_ROWS,
    COPY,
    FIELDS,
    LAYER,
    MAX_POOL,
    MEAN,
    PACK,
    PAIR,
    work,
    work_together,
)
from driveprune.sparse.blocked import HALVES, STREAM_BYTES, pooled
from driveprune.sparse.code import LANES, LINE
from driveprune.sparse.folded import Folded, Weights
from driveprune.sparse.memory import Floats
from driveprune.sparse.pairs import fit, follower, kernel_of, pair, pay
from driveprune.sparse.step import Step, UnknownStepError
from driveprune.sparse.team import COUNTERS
from driveprune.sparse.tiling import Ints, Tiling, can_halve, forward, halved, ranges
from driveprune.sparse.wide import Wide, nothing

PIECE = 50_000
"""Numbers that are worth being a piece of work of their own, in steps that only move them."""

Shape = tuple[int, int, int]


@dataclass
class _Buffer:
    """A part of the arena, and how many steps are still to read it."""

    place: int
    size: int
    uses: int

    @property
    def streams(self) -> int:
        """Whether it is too large to stay in a cache until it is read."""
        return int(self.size * 4 > STREAM_BYTES)


@dataclass(frozen=True)
class _Value:
    """A blocked tensor."""

    shape: Shape
    buffer: _Buffer

    @property
    def place(self) -> int:
        """Where it begins in the arena."""
        return self.buffer.place


BLOCKS = 2
"""So many blocks of images a thread takes through all steps by itself, waiting for nobody: two blocks of the smallest
images fill a tile."""


class BatchRegion:
    """A region for so many images of a size: in parts for which each thread works alone, and a rest done together.

    If the first steps are done image by image, `wide`, the others begin with its output.
    """

    def __init__(
        self, steps: list[Step], inputs: dict[str, Shape], outputs: tuple[str, ...], count: int,
        wide: Wide | None = None,
    ) -> None:  # fmt: skip
        team = threads()
        blocks = BLOCKS if wide is None else max(1, min(BLOCKS, count // (LANES * team)))
        alone = blocks * LANES * team
        whole, rest = divmod(count, alone) if team > 1 else (0, count)
        self._parts = [_Part(steps, inputs, outputs, alone, team, wide)] * whole if whole else []
        if rest:
            crews = team if rest > alone - LANES else 1  # if all blocks are needed
            self._parts.append(_Part(steps, inputs, outputs, rest, crews, wide))

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """The outputs for the inputs, with four dimensions."""
        if len(self._parts) == 1:
            return self._parts[0](*tensors)
        counts = [part.count for part in self._parts]
        split = zip(*(torch.split(tensor, counts) for tensor in tensors), strict=True)
        found = [part(*some) for part, some in zip(self._parts, split, strict=True)]
        return [torch.cat(each) for each in zip(*found, strict=True)]


@dataclass
class _Memory:
    """What one call needs for itself."""

    arenas: Floats
    scratch: Floats
    counters: Ints
    inputs: list[Tensor]
    outputs: list[Tensor]
    wide: tuple[Floats, Floats]
    """Arenas for first steps, and what these leave."""


class _Part:
    """A region for so many images, with all weights folded, as tables for one call.

    The images are divided among `crews`: a thread each, or one of all threads.
    """

    def __init__(
        self, steps: list[Step], inputs: dict[str, Shape], outputs: tuple[str, ...], count: int, crews: int,
        wide: Wide | None,
    ) -> None:  # fmt: skip
        self.count, self._crews, self._threads, self._wide = count, crews, threads(), wide
        self._blocks = -(-count // (LANES * crews))
        tables = _Tables(steps, inputs, outputs, self._blocks, self._threads // crews, by_rows=wide is not None)
        self._inputs, self._outputs = tables.inputs, [tables.values[name] for name in outputs]
        self._size, self._scratch = tables.size, tables.scratch
        self._weights = tables.weights()
        self._steps, self._items, self._arrays, self._offsets = tables.arrays()
        self._free: list[_Memory] = []

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        self._weights.refresh()
        try:
            memory = self._free.pop()
        except IndexError:  # all are in use, by other threads
            memory = self._memory()
        if self._wide is None:
            wide = nothing()
            for place, tensor in zip(memory.inputs, tensors, strict=True):
                place.copy_(self._filled(tensor).view(place.shape))
        else:
            self._wide.refresh()
            wide = self._wide.given(*memory.wide, *tensors)
        memory.counters[:] = 0
        weights = self._offsets, self._weights.values, self._weights.bias
        given = memory.arenas, self._steps, self._items, self._arrays, weights, memory.scratch, memory.counters, wide
        if self._threads > 1:
            use_threads()
            work_together(*given)  # type: ignore[no-untyped-call]
        else:  # which also works in a process that was forked, unlike OpenMP's threads
            work(*given, 0)  # type: ignore[no-untyped-call]
        copies = [place.clone(memory_format=torch.contiguous_format) for place in memory.outputs]
        found = [each.view(-1, *each.shape[3:])[: self.count] for each in copies]
        self._free.append(memory)
        return found

    def _filled(self, tensor: Tensor) -> Tensor:
        """The images, and zeros that fill up the last block."""
        missing = self._crews * self._blocks * LANES - self.count
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor.contiguous()

    @torch.inference_mode(False)
    def _memory(self) -> _Memory:
        arenas = torch.zeros(self._crews, -(-self._size // LINE) * LINE, dtype=torch.float32)

        def view(value: _Value) -> Tensor:
            """(crews, blocks, LANES, channels, height, width)."""
            mine = arenas[:, value.place : value.place + value.buffer.size]
            return mine.view(self._crews, self._blocks, *value.shape, LANES).movedim(-1, 2)

        inputs, outputs = ([view(each) for each in some] for some in (self._inputs, self._outputs))
        scratch = torch.empty(self._threads, -(-self._scratch // LINE) * LINE, dtype=torch.float32).numpy()
        counters = np.zeros((self._crews, COUNTERS), np.int64)
        return _Memory(arenas.numpy(), scratch, counters, inputs, outputs, self._wide_memory())

    def _wide_memory(self) -> tuple[Floats, Floats]:
        if self._wide is None:
            return np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32)
        each = self._blocks * LANES * math.prod(self._wide.shape)
        return self._wide.arenas(self._threads), torch.zeros(self._crews, each, dtype=torch.float32).numpy()


class _Tables:
    """The arrays that the kernels read."""

    def __init__(
        self, steps: list[Step], inputs: dict[str, Shape], outputs: tuple[str, ...], blocks: int, count: int, *,
        by_rows: bool,
    ) -> None:  # fmt: skip
        self._blocks, self._threads = blocks, count
        self._uses = _uses(steps, outputs)
        self._arena, self.scratch = Arena(LANES), 16
        self._rows: list[dict[str, int]] = []
        self._items: list[tuple[int, ...]] = []
        self._tilings: list[Tiling] = []
        self._ends = dict.fromkeys(("bands", "runs", "tiles", "starts", "offsets", "weights"), 0)
        self._folds: list[tuple[Folded, Ints, slice]] = []
        self._bias_count = 0
        self.values: dict[str, _Value] = {}
        for name, shape in inputs.items():
            self._new(name, shape)
        self.inputs = list(self.values.values())
        if by_rows:
            self._add_images(*self.inputs)
        self._waiting: dict[str, Step] = {}
        for step in steps:
            self._begin(step, steps)

    def _add_images(self, x: _Value) -> None:
        """The first steps, image by image; then what they leave, side by side."""
        self._items += [(0, image, image + 1, 0) for image in range(self._blocks * LANES)]
        self._rows.append({"kind": BY_ROWS})
        channels, height, width = x.shape
        row = {"kind": PACK, "output": x.place, "channels": channels, "height": height, "width": width}
        self._add_pieces(row, self._blocks * channels, x.buffer.size)

    def _add_pieces(self, row: dict[str, int], planes: int, size: int) -> None:
        """A step over so many planes, with so many numbers."""
        pieces = max(1, min(4 * self._threads, size // PIECE, planes)) if self._threads > 1 else 1
        done = len(self._items)
        self._items += [
            (len(self._rows), piece * planes // pieces, (piece + 1) * planes // pieces, done)
            for piece in range(pieces)
        ]
        self._rows.append(row)

    def _begin(self, step: Step, steps: list[Step]) -> None:
        """Add a step, with the one before it if that waits; or let it wait for the one after it."""
        before = self._waiting.get(step.inputs[0])
        if before is not None:
            self._add_pair(before, step)
        elif self._waits(step, steps):
            self._waiting[step.output] = step
            return
        else:
            self._add(step)
        read = step.inputs if before is None else before.inputs
        for name in (*read, *([] if step.plus is None else [step.plus])):
            self._release(self.values[name].buffer)

    def _waits(self, step: Step, steps: list[Step]) -> bool:
        """Whether a layer is done together with the next one: if there is a block of images for every thread."""
        after = follower(step, steps, self._uses.get(step.output, 0))
        if after is None or self._blocks < self._threads:
            return False
        first, second, size = kernel_of(step).layer, kernel_of(after).layer, self.values[step.inputs[0]].shape[1:]
        return fit(first, second, size, halves=after.halves) and pay(first, second, size)

    @property
    def size(self) -> int:
        """Numbers in the arena."""
        return self._arena.size

    def weights(self) -> Weights:
        """The folded weights, to be filled in."""
        return Weights(self._folds, self._ends["weights"], self._bias_count)

    def arrays(self) -> tuple[Ints, Ints, tuple[Any, ...], Any]:
        """Steps, items, the tables of all tilings and the offsets."""
        steps = [[row.get(name, 0) for name in FIELDS] for row in self._rows]
        names = ("bands", "runs", "inward", "outward", "starts")
        tilings = self._tilings
        joined = (np.concatenate([getattr(each, name) for each in tilings]) for name in names)
        tables = np.stack([each.sizes for each in tilings]), *joined
        offsets = np.concatenate([each.offsets for each in tilings])
        return np.array(steps, np.int64), np.array(self._items, np.int64), tables, offsets

    def _new(self, name: str, shape: Shape) -> _Value:
        """A value, and its place."""
        size = self._blocks * shape[0] * shape[1] * shape[2] * LANES
        place = self._arena.take(size)
        self.values[name] = _Value(shape, _Buffer(place, size, self._uses.get(name, 0)))
        return self.values[name]

    def _release(self, buffer: _Buffer) -> None:
        """One use less; after the last one, others may have the memory."""
        buffer.uses -= 1
        if buffer.uses == 0:
            self._arena.give_back(buffer.place, buffer.size)

    def _add(self, step: Step) -> None:
        x = self.values[step.inputs[0]]
        match step.kind:
            case "dropout" | "same":
                self._alias(step, x, x.shape)
            case "flatten":
                self._alias(step, x, (x.shape[0] * x.shape[1] * x.shape[2], 1, 1))
            case "cat":
                self._add_cat(step)
            case "layer":
                self._add_layer(step, x)
            case "norm" | "relu" | "add":
                self._add_affine(step, x)
            case "max_pool":
                out = self._new(step.output, (x.shape[0], *pooled(x.shape[1:], *step.numbers)))
                self._add_planes(step, MAX_POOL, x, out, step.windows)
            case "pool" if isinstance(step.module, nn.AdaptiveAvgPool2d) and step.module.output_size in {1, (1, 1)}:
                self._add_planes(step, MEAN, x, self._new(step.output, (x.shape[0], 1, 1)), {})
            case _:
                raise UnknownStepError(step.kind)

    def _alias(self, step: Step, x: _Value, shape: Shape) -> None:
        """The same memory under another name: it is free when neither is needed."""
        self.values[step.output] = _Value(shape, x.buffer)
        x.buffer.uses += self._uses.get(step.output, 0)

    def _add_cat(self, step: Step) -> None:
        parts = [self.values[name] for name in step.inputs]
        if len({part.shape[1:] for part in parts}) > 1:
            raise UnknownStepError("cat of different sizes")
        out = self._new(step.output, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
        first = 0
        for part in parts:
            self._add_planes(step, COPY, part, out, {"first": first})
            first += part.shape[0]

    def _add_affine(self, step: Step, x: _Value) -> None:
        plus = step.inputs[1] if step.kind == "add" else step.plus
        other = None if plus is None else self.values[plus]
        if other is not None and other.shape != x.shape:
            raise UnknownStepError("add of different sizes")
        channels = x.shape[0]
        numbers = {
            "bias": self._bias_count, "scale": self._bias_count + channels, "relu": int(step.relu),
            "plus": -1 if other is None else other.place,
        }  # fmt: skip
        self._fold(Folded(None, step.norm, channels), np.zeros(0, np.int64), 2 * channels)
        self._add_planes(step, AFFINE, x, self._new(step.output, x.shape), numbers)

    def _add_planes(self, step: Step, kind: int, x: _Value, out: _Value, numbers: dict[str, int]) -> None:
        channels, height, width = x.shape
        _, rows, columns = out.shape
        row = {
            "kind": kind, "input": x.place, "output": out.place, "plus": -1, "channels": channels, "height": height,
            "width": width, "rows": rows, "columns": columns, "outputs": out.shape[0],
            "stream": out.buffer.streams, **numbers,
        }  # fmt: skip
        self._add_pieces(row, self._blocks * channels, x.buffer.size)

    def _add_layer(self, step: Step, x: _Value) -> None:
        kernel = kernel_of(step)
        kernel.layer.check(x.shape[0])
        size = kernel.layer.size(*x.shape[1:])
        if step.halves and not can_halve(kernel.layer, *x.shape[1:]):
            self._add_apart(step, x)
            return
        numbers = self._output(step, size)
        before, bias = len(self._items), self._bias_count
        make = halved if step.halves else forward
        for first, jobs, tiling in kernel.pieces(make, x.shape[1:], size, self._blocks):
            parts = -(-self._threads // jobs)
            self._items += [(len(self._rows), piece, piece + 1, before) for piece in range(jobs * parts)]
            more = {"kind": LAYER, "input": x.place, "first_block": first, "parts": parts}
            self._add_tables(step, tiling, bias, numbers | more)
            self.scratch = max(self.scratch, tiling.scratch)
        self._bias_count += kernel.layer.outputs

    def _add_pair(self, before: Step, step: Step) -> None:
        """Two layers in a row, block by block of images."""
        x, first, second = self.values[before.inputs[0]], kernel_of(before), kernel_of(step)
        first.layer.check(x.shape[0])
        second.layer.check(first.layer.outputs)
        tables = pair(first, second, x.shape[1:], halves=step.halves)
        numbers = self._output(step, second.layer.size(*first.layer.size(*x.shape[1:])))
        done = len(self._items)
        self._items += [(len(self._rows), block, block + 1, done) for block in range(self._blocks)]
        inner = {"kind": PAIR, "input": x.place, "plus": -1, "relu": int(before.relu)}
        self._add_tables(before, tables.first, self._bias_count, inner)
        self._bias_count += first.layer.outputs
        outer = numbers | {"kind": LAYER, "between": tables.between, "advance": tables.advance}
        self._add_tables(step, tables.second, self._bias_count, outer)
        self._bias_count += second.layer.outputs
        self.scratch = max(self.scratch, tables.scratch)

    def _output(self, step: Step, size: tuple[int, int]) -> dict[str, int]:
        """A place for the output of a layer, of a size before pooling, and what is done on the way there."""
        shape = kernel_of(step).layer.outputs, *(pooled(size, *HALVES) if step.halves else size)
        plus = None if step.plus is None else self.values[step.plus]
        if plus is not None and plus.shape != shape:
            raise UnknownStepError("add of different sizes")
        out = self._new(step.output, shape)
        return {
            "output": out.place, "plus": -1 if plus is None else plus.place, "relu": int(step.relu),
            "stream": out.buffer.streams,
        }  # fmt: skip

    def _add_tables(self, step: Step, tiling: Tiling, bias: int, numbers: dict[str, int]) -> None:
        """The row and the tables of a layer, and where its weights go."""
        row = {"bias": bias, "sizes": len(self._tilings), **numbers}
        row |= ranges(self._ends, tiling.lengths | {"weights": int(tiling.starts[-1])})
        self._tilings.append(tiling)
        self._rows.append(row)
        places = slice(bias, bias + kernel_of(step).layer.outputs)
        self._folds.append((Folded(step.module, step.norm), row["weights"] + tiling.slots, places))

    def _add_apart(self, step: Step, x: _Value) -> None:
        """A layer, then the pool that follows it."""
        between = f"{step.output} before pooling"
        self._uses[between] = 1
        self._add_layer(replace(step, output=between, halves=False), x)
        self._add(Step("max_pool", (between,), step.output, numbers=HALVES))
        self._release(self.values[between].buffer)

    def _fold(self, folded: Folded, slots: Ints, bias: int) -> None:
        self._folds.append((folded, slots, slice(self._bias_count, self._bias_count + bias)))
        self._bias_count += bias


def _uses(steps: list[Step], outputs: tuple[str, ...]) -> dict[str, int]:
    """How often each value is needed."""
    found: dict[str, int] = {}
    for name in (*outputs, *(each for step in steps for each in step.inputs)):
        found[name] = found.get(name, 0) + 1
    for step in steps:
        if step.plus is not None:
            found[step.plus] = found.get(step.plus, 0) + 1
    return found
