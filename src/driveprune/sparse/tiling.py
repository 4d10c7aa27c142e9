"""How a sparse convolution is cut into pieces that stay in the caches, as tables for the kernels.

The input of a few blocks of images is copied, a band of rows at a time, into a scratch memory with zeros around it.
There, every kept weight is an offset. Where only few rows fit at a time, the scratch is a *ring*: a band is one row
of the output, the row of the input that is new to it takes the place of the oldest one, and the offsets come in as
many *turns* as the ring has rows. For a stride, columns are sorted by remainder, so that what a tile reads lies side
by side. The gradient of the input is the same work with the pattern turned around; for a stride s, it falls into s ·
s classes of pixels, each with weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from driveprune.sparse.code import LANES, LINE
from driveprune.sparse.tile import SPARE, TILE

Ints = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.int32]

SCRATCH_BYTES = 350_000
"""What a thread's scratch memory should take: with what is read for the next band and the sums, less than a usual
second-level cache."""

FIRST_LEVEL_BYTES = 22_000
"""What the inputs of a tile should take of the first-level cache (32 kB or more)."""

LEAST_WEIGHTS = 15
"""Input channels are taken in groups only if so many weights of an output are left for each group."""

LEAST_BAND = 4
"""Bands of more rows than so many times the rows that two of them share are copied one by one, without a ring."""

RUNS = (8, 4, 2, 1)
"""How many vectors lie side by side in a tile of each kind; the rest of the eight are other stretches."""

HALF = len(RUNS)
"""The kind of a tile of four vectors, for which weights are taken in twos: all there is of 32 images of one pixel."""

WINDOWS = HALF + 1
"""The kind of a tile of 2×4 pixels of which the largest of each window of 2×2 is wanted."""


@dataclass(frozen=True)
class Layer:
    """What a convolution, or a linear layer (a kernel of one pixel), is; and where its kept weights are."""

    outputs: int
    inputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    places: Ints = field(repr=False)
    """A row (output, input, y, x) for each kept weight, in the order of the values."""

    def check(self, channels: int) -> None:
        """An error if an input of so many channels is none for this layer."""
        if channels != self.inputs:
            raise ValueError(f"a layer of {self.inputs} input channels was given {channels}")

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width of its output."""
        found = [
            (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            for size, pad, gap, kernel, step in zip(
                (height, width), self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        if min(found) < 1:
            raise ValueError(f"a kernel of {self.kernel} with padding {self.padding} does not fit {height}×{width}")
        return found[0], found[1]


@dataclass(frozen=True)
class Tiling:
    """The tables of one kernel call. Lengths and offsets count float32 numbers."""

    sizes: Ints
    """The numbers by name: see `SIZES`."""
    bands: Ints
    """A row (first row of the input, first run, end of runs, rows that are in the scratch already, turn) for each
    band."""
    runs: Ints
    """A row (class, kind of tile, first tile, end of tiles) for tiles of one kind."""
    inward: Ints
    outward: Ints
    """Where the stretches of each tile begin, in the scratch and in the output: eight entries a tile."""
    counted: npt.NDArray[np.float32]
    """1 for each stretch of a tile, 0 for a repetition that fills it up."""
    starts: Ints
    """Where the kept weights of (class, group, output) begin in `offsets`, and where those of them do that are taken
    one by one: the others come in twos, whose inputs lie side by side (anywhere for tiles of kind `HALF`)."""
    offsets: Offsets
    """Where each weight's input is, for each turn after the other."""
    order: Ints | None
    """Which value each offset of a turn belongs to; None if they are in order."""
    kept: int
    """How many kept weights there are; some have no offset if no pixel ever meets them."""

    @property
    def lengths(self) -> dict[str, int]:
        """How long the tables are that are joined with those of other layers."""
        return {
            "bands": len(self.bands), "runs": len(self.runs), "tiles": len(self.inward), "starts": len(self.starts),
            "offsets": len(self.offsets),
        }  # fmt: skip

    @property
    def scratch(self) -> int:
        """Numbers that the scratch of a thread holds, and room for reading a vector too far."""
        return int(self.sizes[SIZES["sums"]] + (self.sizes[SIZES["outputs"]] + 1) * TILE * LANES)

    @property
    def sums(self) -> int:
        """Numbers in a row of sums, one for each offset of a turn, and zeros after them, in whole lines."""
        return -(-(int(self.starts[-1]) + 1 + SPARE) // LINE) * LINE

    @cached_property
    def slots(self) -> Ints:
        """Where the sum of each value is, if there is one for each offset of a turn, and zeros follow."""
        sums = np.arange(self.starts[-1])
        found = np.full(self.kept, len(sums))
        found[sums if self.order is None else self.order] = sums
        return found


def ranges(ends: dict[str, int], lengths: Mapping[str, int]) -> dict[str, int]:
    """Where the next tables of some lengths begin and end, if others end there so far; the ends move on."""
    found: dict[str, int] = {}
    for name, length in lengths.items():
        found |= {name: ends[name], f"{name}_end": ends[name] + length}
        ends[name] += length
    return found


SIZES = {
    name: number
    for number, name in enumerate(
        (
            "inputs", "height", "width", "outputs", "out_plane", "blocks", "rows", "columns", "stride", "left",
            "row_pitch", "block_pitch", "channel_pitch", "groups", "step", "sums", "row_stride", "row_kinds", "kinds",
        )
    )
}  # fmt: skip


@dataclass(frozen=True)
class _Class:
    """Pixels of the output that the same weights lead to."""

    rows: Ints
    """Which rows of the grid have such pixels ..."""
    columns: tuple[int, int]
    """... and from which column on, to which."""
    row: int
    column: int
    """The output pixel of (u, v) is (u · scale + row, v · scale + column)."""
    weights: Ints
    """Which kept weights, and for each its row and its column (remainder, quotient) in the scratch."""
    taps: Ints


def forward(layer: Layer, height: int, width: int, blocks: int) -> Tiling:
    """The tables of a layer's output, for so many blocks of images of a size at a time."""
    return _forward(layer, height, width, blocks, windows=False)


def row_by_row(layer: Layer, height: int, width: int, blocks: int) -> Tiling:
    """The same, one row of the output at a time, from a ring."""
    return _forward(layer, height, width, blocks, windows=False, by_rows=True)


def can_halve(layer: Layer, height: int, width: int) -> bool:
    """Whether the tables of `halved` can be made."""
    rows, columns = layer.size(height, width)
    return rows % 2 == 0 and columns % 4 == 0


def halved(layer: Layer, height: int, width: int, blocks: int) -> Tiling:
    """The same for the largest values of windows of 2×2 of the output, side by side."""
    return _forward(layer, height, width, blocks, windows=True)


def _forward(
    layer: Layer, height: int, width: int, blocks: int, *, windows: bool, by_rows: bool = False
) -> Tiling:  # fmt: skip
    out = layer.size(height, width)
    y, x = layer.places[:, 2] * layer.dilation[0], layer.places[:, 3] * layer.dilation[1]
    step = layer.stride[1]
    taps = np.stack([y, x % step, x // step], 1)
    pixels = _Class(np.arange(out[0]), (0, out[1]), 0, 0, np.arange(len(taps)), taps)
    reach = (layer.kernel[0] - 1) * layer.dilation[0], (layer.kernel[1] - 1) * layer.dilation[1]
    return _tiling(
        (layer.outputs, layer.inputs), layer.places[:, 0], layer.places[:, 1], (height, width), out, [pixels],
        grid=out, stride=layer.stride, scale=(1, 1), reach=(reach[0], reach[1] // step), before=layer.padding,
        kinds=(min(layer.stride[0], reach[0] + 1), min(step, reach[1] + 1)), blocks=blocks, windows=windows,
        by_rows=by_rows,
    )  # fmt: skip


def backward(layer: Layer, height: int, width: int, blocks: int) -> Tiling:
    """The tables of the gradient of a layer's input, from that of its output."""
    return _backward(layer, height, width, blocks, at_once=False)


def both(layer: Layer, height: int, width: int, blocks: int) -> Tiling:
    """The same for the gradients of its input and its weights together: all weights of an output at once."""
    return _backward(layer, height, width, blocks, at_once=True)


def _backward(layer: Layer, height: int, width: int, blocks: int, *, at_once: bool) -> Tiling:
    out = layer.size(height, width)
    step, pad, places = layer.stride, layer.padding, layer.places
    taps = places[:, 2] * layer.dilation[0], places[:, 3] * layer.dilation[1]
    reach = tuple((k - 1) * gap // s for k, gap, s in zip(layer.kernel, layer.dilation, step, strict=True))
    grid = tuple((size - 1 + p) // s + 1 for size, p, s in zip((height, width), pad, step, strict=True))
    classes = []
    for ry in range(step[0]):
        for rx in range(step[1]):
            mine = np.flatnonzero((taps[0] % step[0] == ry) & (taps[1] % step[1] == rx))
            row, column = (reach[n] - (taps[n][mine] - r) // step[n] for n, r in ((0, ry), (1, rx)))
            where = np.stack([row, np.zeros_like(row), column], 1)
            v = np.arange(grid[1]) * step[1] + rx - pad[1]
            inside = np.flatnonzero((v >= 0) & (v < width))
            u = np.arange(grid[0]) * step[0] + ry - pad[0]
            rows = np.flatnonzero((u >= 0) & (u < height))
            if len(inside) and len(rows):
                columns = int(inside[0]), int(inside[-1]) + 1
                classes.append(_Class(rows, columns, ry - pad[0], rx - pad[1], mine, where))
    return _tiling(
        (layer.inputs, layer.outputs), places[:, 1], places[:, 0], out, (height, width), classes,
        grid=(grid[0], grid[1]), stride=(1, 1), scale=step, reach=(reach[0], reach[1]), before=(reach[0], reach[1]),
        kinds=(1, 1), blocks=blocks, at_once=at_once,
    )  # fmt: skip


def blocks_for(size: tuple[int, int]) -> int:
    """How many blocks to take at a time, so that small images fill the tiles."""
    pixels = size[0] * size[1]
    return max(1, TILE // pixels)


def _tiling(
    channels: tuple[int, int],
    to: Ints,
    source: Ints,
    size: tuple[int, int],
    out: tuple[int, int],
    classes: list[_Class],
    *,
    grid: tuple[int, int],
    stride: tuple[int, int],
    scale: tuple[int, int],
    reach: tuple[int, int],
    before: tuple[int, int],
    kinds: tuple[int, int],
    blocks: int,
    windows: bool = False,
    by_rows: bool = False,
    at_once: bool = False,
) -> Tiling:
    """Tables for outputs that are sums over inputs at fixed offsets.

    `grid` is what the rows and columns of the classes count. A pixel (u, v) of it reads the rows u · stride - before
    to that plus reach, of which only so many `kinds` of remainders of the stride are copied; its output is at (u, v)
    · scale plus the class's place.
    """
    outputs, inputs = channels
    across = size == out == stride == (1, 1) and reach == before == (0, 0)
    half = across and blocks == TILE // 2 and not at_once
    columns = grid[1] + reach[1]
    row_pitch = kinds[1] * columns * LANES
    run = TILE if across else 4 if windows else _run(grid, reach)
    out = (out[0] // 2, out[1] // 2) if windows else out
    rows = _rows_at_a_time(inputs, grid, run, stride[0], reach[0], row_pitch * blocks)
    can_ring = stride[0] == 1 and len(classes) == 1 and not windows
    is_ring = by_rows or (can_ring and _pays_as_ring(grid, reach[0], rows))
    run, rows = (TILE, 1) if is_ring else (run, rows)
    deep = (rows - 1) * stride[0] + reach[0] + 1
    turns, kept = (deep, max(0, deep - stride[0])) if is_ring else (1, 0)
    block_pitch = LANES if across else deep * row_pitch
    channel_pitch = _not_a_power(blocks * block_pitch)
    step = outputs * LANES if across else scale[1] * LANES
    tiles = _Tiles(run, across, half, windows, block_pitch, row_pitch * stride[0], outputs, out, blocks, scale)
    bands = []
    for first in range(0, grid[0], rows):
        runs = tiles.add_band(classes, first, min(first + rows, grid[0]))
        bands.append((first * stride[0] - before[0], *runs, kept if first else 0, first * stride[0] % turns))
    groups = 1 if at_once else _groups(inputs, len(to), outputs, reach, kinds, run)
    starts, offsets, order = _weights(
        classes, to, source, outputs, inputs, groups, channel_pitch, row_pitch, columns * LANES, half, deep, turns
    )
    known = {
        "inputs": inputs, "height": size[0], "width": size[1], "outputs": outputs,
        "out_plane": out[0] * out[1] * LANES, "blocks": blocks, "rows": deep, "columns": columns, "stride": stride[1],
        "left": before[1], "row_pitch": row_pitch, "block_pitch": block_pitch, "channel_pitch": channel_pitch,
        "groups": groups, "step": step,
        "sums": -(-inputs * channel_pitch // 16) * 16 + TILE * LANES, "row_stride": stride[0], "row_kinds": kinds[0],
        "kinds": kinds[1],
    }  # fmt: skip
    sizes = np.array([known[name] for name in SIZES], np.int64)
    return Tiling(sizes, _table(bands, 5), *tiles.tables(), starts, offsets, order, len(to))


def _run(grid: tuple[int, int], reach: tuple[int, int]) -> int:
    """How many pixels lie side by side in a tile: fewer where kernels are high, as a tile of two rows reads less."""
    widest = next(run for run in RUNS if run <= grid[1])
    return min(widest, 4) if grid[0] > 1 and reach[0] > 0 else widest


def _pays_as_ring(grid: tuple[int, int], reach: int, rows: int) -> bool:
    """Whether bands of so many rows copy many rows of the input more than once, and a tile lies in one row."""
    return grid[1] >= TILE and rows < grid[0] and rows <= reach * LEAST_BAND


def _table(rows: Sequence[Sequence[int]], width: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, width)


def _rows_at_a_time(inputs: int, grid: tuple[int, int], run: int, stride: int, reach: int, row_bytes: int) -> int:
    """As many rows as the scratch has room for, and enough to fill tiles of narrow images."""
    least = min(grid[0], TILE // run)
    rows = least
    while (
        rows + least <= grid[0]
        and inputs * ((rows + least - 1) * stride + reach + 1) * row_bytes * 4 <= SCRATCH_BYTES
    ):
        rows += least
    return rows


def _not_a_power(pitch: int) -> int:
    """Channels at distances of powers of two would share few lines of the cache: keep off them."""
    line = 16
    lines = -(-pitch // line)
    return (lines + 1 if lines % 8 == 0 else lines) * line if pitch > LANES else pitch


def _groups(inputs: int, weights: int, outputs: int, reach: tuple[int, int], kinds: tuple[int, int], run: int) -> int:
    """In how many groups to take the input channels, so that what the tiles of one read stays close."""
    pixels = (TILE // run + reach[0]) * (run + reach[1]) * kinds[0] * kinds[1]
    wanted = -(-inputs * pixels * LANES * 4 // FIRST_LEVEL_BYTES)
    return int(max(1, min(wanted, weights // max(1, outputs) // LEAST_WEIGHTS)))


def _weights(
    classes: list[_Class], to: Ints, source: Ints, outputs: int, inputs: int, groups: int, channel_pitch: int,
    row_pitch: int, remainder_pitch: int, half: bool, deep: int, turns: int,
) -> tuple[Ints, Offsets, Ints | None]:  # fmt: skip
    """Kept weights by class, group of inputs and output; in a scratch of so many rows, for so many turns of it."""
    keys, rows, within, order = [], [], [], []
    for number, each in enumerate(classes):
        c = source[each.weights]
        group = c * groups // inputs
        keys.append((number * groups + group) * outputs + to[each.weights])
        y, remainder, x = each.taps.T
        rows.append(y)
        within.append(c * channel_pitch + remainder * remainder_pitch + x * LANES)
        order.append(each.weights)
    key, row, rest, all_weights = (
        np.concatenate(each or [np.zeros(0, np.int64)]) for each in (keys, rows, within, order)
    )
    offset = rest + row * row_pitch
    sorting = np.lexsort((offset, key))
    count = len(classes) * groups * outputs
    key, offset = key[sorting], offset[sorting]
    paired = _in_twos(np.append(key[1:] == key[:-1], False)[: len(key)]) if half else _neighbours(key, offset)
    by_twos = np.lexsort((np.arange(len(key)), ~paired, key))
    found, row, rest = (each[sorting][by_twos] for each in (all_weights, row, rest))
    offsets = np.concatenate([rest + (row + turn) % deep * row_pitch for turn in range(turns)])
    starts = np.searchsorted(key, np.arange(count + 1))
    middles = starts[:-1] + np.bincount(key[paired], minlength=count)
    both = np.append(np.stack([starts[:-1], middles], 1).reshape(-1), starts[-1])
    in_order = len(found) == len(to) and bool((found == np.arange(len(to))).all())
    return both.astype(np.int64), offsets.astype(np.int32), None if in_order else found


def _neighbours(key: Ints, offset: Ints) -> npt.NDArray[np.bool_]:
    """Which weights, sorted by key and offset, are one of two neighbours."""
    return _in_twos(np.append((key[1:] == key[:-1]) & (offset[1:] == offset[:-1] + LANES), False)[: len(key)])


def _in_twos(joined: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which of a row are one of two, if some are joined with the one after them."""
    begins = np.flatnonzero(~np.append(False, joined[:-1])[: len(joined)])
    lengths = np.diff(np.append(begins, len(joined)))
    within = np.arange(len(joined)) - np.repeat(begins, lengths)
    return within < np.repeat(lengths // 2 * 2, lengths)


class _Tiles:
    """Collects the tiles of an output."""

    def __init__(
        self, run: int, across: bool, half: bool, windows: bool, block_pitch: int, row_pitch: int, outputs: int,
        out: tuple[int, int], blocks: int, scale: tuple[int, int],
    ) -> None:  # fmt: skip
        self._run, self._across, self._half, self._windows = run, across, half, windows
        self._block_pitch, self._row_pitch = block_pitch, row_pitch
        self._out, self._blocks, self._scale = out, blocks, scale
        self._out_block = outputs * out[0] * out[1] * LANES
        self._runs: list[tuple[int, ...]] = []
        self._inward: list[list[int]] = []
        self._outward: list[list[int]] = []
        self._counted: list[list[int]] = []

    def tables(self) -> tuple[Ints, Ints, Ints, npt.NDArray[np.float32]]:
        """Runs, inward, outward and counted, as in `Tiling`."""
        inward, outward = (_table(each, TILE).reshape(-1) for each in (self._inward, self._outward))
        return _table(self._runs, 4), inward, outward, np.array(self._counted, np.float32).reshape(-1)

    def add_band(self, classes: list[_Class], first: int, end: int) -> tuple[int, int]:
        """The pixels in the grid's rows `first` to `end`; from which run on, to which."""
        begin = len(self._runs)
        for number, each in enumerate(classes):
            self._add(number, each, first, end)
        return begin, len(self._runs)

    def _add(self, number: int, each: _Class, first: int, end: int) -> None:
        """The pixels of a class in the grid's rows `first` to `end`."""
        if self._windows:
            self._group(number, WINDOWS, 2, self._window_rows(first, end, each.columns[1]))
            return
        stretches: dict[int, list[tuple[int, int]]] = {run: [] for run in RUNS}
        lines, height = self._lines(each, first, end), TILE // self._run
        for at in range(0, len(lines), height):  # the stretches of a tile are one below the other
            done, length = 0, lines[at][2]
            for run in RUNS[RUNS.index(self._run) :]:
                while length - done >= run:
                    for inward, outward, _, step in lines[at : at + height]:
                        stretches[run].append((inward + done * LANES, outward + done * step))
                    done += run
        for kind, run in enumerate(RUNS):
            self._group(number, kind, TILE // run, stretches[run])

    def _lines(self, each: _Class, first: int, end: int) -> list[tuple[int, int, int, int]]:
        """(place in the scratch, place in the output, pixels, step of the output) of pixels in a line."""
        if self._across:  # images of one pixel: the blocks are side by side
            return [(0, 0, self._blocks, self._out_block)]
        low, high = each.columns
        found = []
        for block in range(self._blocks):
            for u in each.rows[(each.rows >= first) & (each.rows < end)].tolist():
                y, x = u * self._scale[0] + each.row, low * self._scale[1] + each.column
                inward = block * self._block_pitch + (u - first) * self._row_pitch + low * LANES
                outward = block * self._out_block + (y * self._out[1] + x) * LANES
                found.append((inward, outward, high - low, self._scale[1] * LANES))
        return found

    def _window_rows(self, first: int, end: int, columns: int) -> list[tuple[int, int]]:
        """The two rows of each two windows side by side."""
        found = []
        for block in range(self._blocks):
            for u in range(first, end, 2):
                for v in range(0, columns, 4):
                    outward = block * self._out_block + (u // 2 * self._out[1] + v // 2) * LANES
                    inward = block * self._block_pitch + (u - first) * self._row_pitch + v * LANES
                    found += [(inward, outward), (inward + self._row_pitch, outward)]
        return found

    def _group(self, number: int, kind: int, size: int, stretches: list[tuple[int, int]]) -> None:
        """Tiles of `size` stretches each; the last ones are repeated to fill the last tile."""
        if not stretches:
            return
        begin = len(self._inward)
        for at in range(0, len(stretches), size):
            some = stretches[at : at + size]
            self._counted.append([1] * len(some) + [0] * (TILE - len(some)))
            some += some[-1:] * (size - len(some))
            self._inward.append([inward for inward, _ in some] + [0] * (TILE - size))
            self._outward.append([outward for _, outward in some] + [0] * (TILE - size))
        self._runs.append((number, HALF if self._half else kind, begin, len(self._inward)))
