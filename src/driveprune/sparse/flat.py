"""Inference for one image at a time: the vectors run along the pixels of a plane, and one call does a whole region.

Values are (channels, height, width). A layer first spreads its input out, with zeros around it and sorted by the
remainders of a stride; then every kept weight is an offset, and an output plane is one line of pixels, in which those
between the rows are computed in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from driveprune.sparse.blocked import flat, pooled, run, threads
from driveprune.sparse.flat_kernels import ADD, AFFINE, COPY, FIELDS, LAYER, LINEAR, MAX_POOL, MEAN, run_steps
from driveprune.sparse.folded import Folded
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.memory import Floats
from driveprune.sparse.step import Step
from driveprune.sparse.tiling import Ints, Layer
from driveprune.sparse.vector import LANES

TILE_ROOM = 8 * LANES
"""Numbers that may be read behind the end."""

PARALLEL_WORK = 1_000_000
"""Vector operations that a step must have to be worth the waking of other threads."""


@dataclass(frozen=True)
class _Value:
    """Where a value is in the arena, and its shape (channels, height, width)."""

    place: int
    shape: tuple[int, int, int]

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return self.shape[0] * self.shape[1] * self.shape[2]


class UnknownStepError(Exception):
    """A step that is not known here."""


class FlatRegion:
    """A region for one image of a size, with all weights folded, as tables for one call."""

    def __init__(self, steps: list[Step], inputs: dict[str, tuple[int, int, int]], outputs: tuple[str, ...]) -> None:
        self._values: dict[str, _Value] = {}
        self._size = self._scratch_size = 0
        self._rows: list[dict[str, int]] = []
        self._parts: list[int] = []
        self._starts: list[Ints] = []
        self._offsets: list[np.ndarray[Any, Any]] = []
        self._bias_size = self._start_size = self._weight_size = 0
        self._folds: list[tuple[Folded, slice, slice]] = []
        self._threads = threads()
        self._longest = TILE_ROOM
        for name, shape in inputs.items():
            self._new(name, shape)
        for step in steps:
            self._add(step)
        self._inputs, self._outputs = tuple(inputs), outputs
        self._steps = np.array([[row.get(name, 0) for name in FIELDS] for row in self._rows], np.int64)
        self._bias = torch.zeros(self._bias_size).numpy()
        self._weights = torch.zeros(self._weight_size).numpy()
        self._all_starts = np.concatenate([*self._starts, np.zeros(1, np.int64)])
        self._all_offsets = np.concatenate([*self._offsets, np.zeros(1, np.int32)])
        self._all_parts = np.array(self._parts, np.int64)
        self._free: list[tuple[Floats, Floats, Floats]] = []
        self._version: object = None

    def __call__(self, *images: Tensor) -> list[Tensor]:
        """The outputs for inputs of one image each, without the dimension of the batch."""
        self._refresh()
        try:
            memory = self._free.pop()
        except IndexError:  # all are in use, by other threads
            memory = self._memory()
        arena, scratch, lines = memory
        for name, image in zip(self._inputs, images, strict=True):
            value = self._values[name]
            arena[value.place : value.place + value.count] = flat(image.contiguous())
        run(
            run_steps, arena, self._steps, scratch, lines, self._all_parts, self._all_offsets, self._weights,
            self._all_starts, self._bias,
        )  # fmt: skip
        found = []
        for name in self._outputs:
            value = self._values[name]
            found.append(torch.from_numpy(arena[value.place : value.place + value.count].copy()).view(value.shape))
        self._free.append(memory)
        return found

    def _memory(self) -> tuple[Floats, Floats, Floats]:
        pitch = -(-self._longest // 16) * 16
        return (
            torch.zeros(self._size + 16).numpy(), torch.zeros(self._scratch_size + TILE_ROOM).numpy(),
            torch.zeros(self._threads, pitch).numpy(),
        )  # fmt: skip

    def _refresh(self) -> None:
        """Take over weights that have changed."""
        version = [fold.version() for fold, _, _ in self._folds]
        if version != self._version:
            for fold, weights, bias in self._folds:
                fold.fill(self._weights[weights], self._bias[bias])
            self._version = version

    def _new(self, name: str, shape: tuple[int, int, int]) -> _Value:
        value = _Value(self._size, shape)
        self._size += -(-value.count // 16) * 16
        self._values[name] = value
        return value

    def _add(self, step: Step) -> None:
        x = self._values[step.inputs[0]]
        if step.kind in {"dropout", "same"}:
            self._values[step.output] = x
        elif step.kind == "flatten":
            self._values[step.output] = _Value(x.place, (x.count, 1, 1))
        elif step.kind == "cat":
            self._add_cat(step)
        else:
            self._add_work(step, x)

    def _add_cat(self, step: Step) -> None:
        parts = [self._values[name] for name in step.inputs]
        if len({part.shape[1:] for part in parts}) > 1:
            raise UnknownStepError("cat of different sizes")
        channels = sum(part.shape[0] for part in parts)
        place = self._new(step.output, (channels, *parts[0].shape[1:])).place
        for part in parts:
            self._rows.append({"kind": COPY, "input": part.place, "output": place, "count": part.count})
            place += part.count

    def _add_work(self, step: Step, x: _Value) -> None:
        channels, height, width = x.shape
        plus = -1 if step.plus is None else self._values[step.plus].place
        row = {
            "input": x.place, "plus": plus, "relu": int(step.relu), "channels": channels, "height": height,
            "width": width, "outputs": channels, "rows": height, "columns": width, "count": x.count,
        }  # fmt: skip
        shape = x.shape
        match step.kind:
            case "layer":
                assert isinstance(step.module, SparseLayer)
                shape = self._add_layer(step, row, step.module.kernel.layer, height, width)
            case "norm" | "relu":
                row |= {"kind": AFFINE, "starts": self._bias_size + channels, "bias": self._bias_size}
                self._fold(Folded(None, step.norm, channels), 0, 2 * channels)
            case "max_pool":
                (kr, kc), (sr, sc), (top, left) = step.numbers
                rows, columns = pooled((height, width), *step.numbers)
                row |= {
                    "kind": MAX_POOL, "rows": rows, "columns": columns, "row_stride": sr, "column_stride": sc,
                    "top": top, "left": left, "kernel_rows": kr, "kernel_columns": kc,
                }  # fmt: skip
                shape = channels, rows, columns
            case "pool" if isinstance(step.module, nn.AdaptiveAvgPool2d) and step.module.output_size in {1, (1, 1)}:
                row |= {"kind": MEAN}
                shape = channels, 1, 1
            case "add":
                row |= {"kind": ADD, "plus": self._values[step.inputs[1]].place}
            case _:
                raise UnknownStepError(step.kind)
        other = step.inputs[1] if step.kind == "add" else step.plus
        if other is not None and self._values[other].shape != shape:
            raise UnknownStepError("add of different sizes")
        row["output"] = self._new(step.output, shape).place
        self._rows.append(row)

    def _add_layer(
        self, step: Step, row: dict[str, int], layer: Layer, height: int, width: int
    ) -> tuple[int, int, int]:
        layer.check(row["channels"])
        rows, columns = layer.size(height, width)
        (sr, sc), places = layer.stride, layer.places
        y, x = places[:, 2] * layer.dilation[0], places[:, 3] * layer.dilation[1]
        deep = rows + (layer.kernel[0] - 1) * layer.dilation[0] // sr
        pitch = columns + (layer.kernel[1] - 1) * layer.dilation[1] // sc
        plane = deep * pitch
        place = (((places[:, 1] * sr + y % sr) * sc + x % sc) * deep + y // sr) * pitch + x // sc
        single = (rows, columns) == (height, width) == layer.kernel == layer.stride == (1, 1) and layer.padding == (
            0,
            0,
        )
        starts = np.searchsorted(places[:, 0], np.arange(layer.outputs + 1))
        vectors = -(-((rows - 1) * pitch + columns) // LANES)
        work = len(places) * vectors // (LANES if single else 1)
        row |= {
            "kind": LINEAR if single else LAYER, "outputs": layer.outputs, "rows": rows, "columns": columns,
            "row_stride": sr, "column_stride": sc, "top": layer.padding[0], "left": layer.padding[1], "deep": deep,
            "pitch": pitch, "plane": plane, "starts": self._start_size, "bias": self._bias_size,
            "parts": len(self._parts), "parallel": int(work > PARALLEL_WORK and self._threads > 1),
        }  # fmt: skip
        bounds = np.searchsorted(starts, np.arange(self._threads) * len(places) / self._threads)
        self._parts += [0, *(int(bound) for bound in bounds[1:]), layer.outputs]
        self._starts.append(starts + self._weight_size)
        self._start_size += len(starts)
        self._offsets.append(place.astype(np.int32))
        self._longest = max(self._longest, vectors * LANES + TILE_ROOM)
        self._scratch_size = max(self._scratch_size, layer.inputs * sr * sc * plane)
        self._fold(Folded(step.module, step.norm), len(places), layer.outputs)
        return layer.outputs, rows, columns

    def _fold(self, folded: Folded, weights: int, bias: int) -> None:
        weight_part = slice(self._weight_size, self._weight_size + weights)
        self._folds.append((folded, weight_part, slice(self._bias_size, self._bias_size + bias)))
        self._weight_size += weights
        self._bias_size += bias
