"""The loops for one image at a time, compiled by numba: see `driveprune.sparse.flat`."""

from __future__ import annotations

import numba
import numpy as np
from numba import prange

from driveprune.sparse.kernels import compiled
from driveprune.sparse.vector import FROM_BIAS, LANES, make_tile

LAYER, LINEAR, AFFINE, MAX_POOL, MEAN, ADD, COPY = range(7)

FIELDS = {
    name: number
    for number, name in enumerate(
        (
            "kind", "input", "output", "plus", "relu", "channels", "height", "width", "outputs", "rows", "columns",
            "row_stride", "column_stride", "top", "left", "deep", "pitch", "plane", "starts", "bias", "parts",
            "parallel", "kernel_rows", "kernel_columns", "count",
        )
    )
}  # fmt: skip
(
    KIND, INPUT, OUTPUT, PLUS, RELU, CHANNELS, HEIGHT, WIDTH, OUTPUTS, ROWS, COLUMNS, ROW_STRIDE, COLUMN_STRIDE, TOP,
    LEFT, DEEP, PITCH, PLANE, STARTS, BIAS, PARTS, PARALLEL, KERNEL_ROWS, KERNEL_COLUMNS, COUNT,
) = FIELDS.values()  # fmt: skip

_tile_8, _tile_4, _tile_2, _tile_1 = (make_tile(1, run) for run in (8, 4, 2, 1))


@compiled()
def _spread(arena, step, scratch, low, high):
    """Channels `low` to `high` of a layer's input into the scratch."""
    height, width, deep, pitch = step[HEIGHT], step[WIDTH], step[DEEP], step[PITCH]
    for c in range(low, high):
        source = step[INPUT] + c * height * width
        for ry in range(step[ROW_STRIDE]):
            for rx in range(step[COLUMN_STRIDE]):
                to = ((c * step[ROW_STRIDE] + ry) * step[COLUMN_STRIDE] + rx) * step[PLANE]
                for i in range(deep):
                    y = i * step[ROW_STRIDE] + ry - step[TOP]
                    here = to + i * pitch
                    if y < 0 or y >= height:
                        for j in range(pitch):
                            scratch[here + j] = 0.0
                    elif step[COLUMN_STRIDE] == 1:
                        first, last = min(step[LEFT], pitch), min(pitch, width + step[LEFT])
                        for j in range(first):
                            scratch[here + j] = 0.0
                        begin = source + y * width - step[LEFT]
                        for j in range(first, last):
                            scratch[here + j] = arena[begin + j]
                        for j in range(last, pitch):
                            scratch[here + j] = 0.0
                    else:
                        for j in range(pitch):
                            x = j * step[COLUMN_STRIDE] + rx - step[LEFT]
                            inside = 0 <= x < width
                            scratch[here + j] = arena[source + y * width + x] if inside else np.float32(0.0)


@numba.njit(inline="always")
def _stretch(left, x, offsets, values, begin, end, where, place, line, base, step, start, bias, plus):
    """As many vectors of a line as a tile has; how many they were."""
    if left >= 8:
        _tile_8(x, offsets, values, begin, end, where, where, place, line, base, step, start, bias, plus, False)
        return 8
    if left >= 4:
        _tile_4(x, offsets, values, begin, end, where, where, place, line, base, step, start, bias, plus, False)
        return 4
    if left >= 2:
        _tile_2(x, offsets, values, begin, end, where, where, place, line, base, step, start, bias, plus, False)
        return 2
    _tile_1(x, offsets, values, begin, end, where, where, place, line, base, step, start, bias, plus, False)
    return 1


@compiled()
def _outputs(arena, step, scratch, line, zero, offsets, values, starts, bias, low, high):
    """The outputs `low` to `high` of a layer: each as a line of pixels, then without those between the rows."""
    rows, columns, pitch = step[ROWS], step[COLUMNS], step[PITCH]
    has_plus, relu = step[PLUS] >= 0, step[RELU] != 0
    vectors = ((rows - 1) * pitch + columns + LANES - 1) // LANES
    where = np.zeros(1, np.int64)
    for o in range(low, high):
        begin, end = starts[step[STARTS] + o], starts[step[STARTS] + o + 1]
        shift = bias[step[BIAS] + o]
        done = 0
        while done < vectors:
            where[0] = done * LANES
            done += _stretch(
                vectors - done, scratch, offsets, values, begin, end, where, 0, line, 0, LANES, FROM_BIAS, shift, line
            )
        to, other = step[OUTPUT] + o * rows * columns, step[PLUS] + o * rows * columns
        for y in range(rows):
            _take_row(arena, to + y * columns, line, y * pitch, columns, has_plus, other + y * columns, relu)


@numba.njit(inline="always")
def _take_row(arena, to, line, begin, columns, has_plus, other, relu):
    """A row of an output out of its line."""
    zero = np.float32(0.0)
    if has_plus:
        for x in range(columns):
            line[begin + x] += arena[other + x]
    if relu:
        for x in range(columns):
            value = line[begin + x]
            arena[to + x] = zero if value <= zero else value
    else:
        for x in range(columns):
            arena[to + x] = line[begin + x]


@compiled()
def _linear(arena, step, zero, offsets, values, starts, bias, low, high):
    """The outputs `low` to `high` of a linear layer."""
    base = step[INPUT]
    for o in range(low, high):
        begin, end = starts[step[STARTS] + o], starts[step[STARTS] + o + 1]
        a, b, c, d = bias[step[BIAS] + o], zero, zero, zero
        j = begin
        while j + 4 <= end:
            a += values[j] * arena[base + offsets[j]]
            b += values[j + 1] * arena[base + offsets[j + 1]]
            c += values[j + 2] * arena[base + offsets[j + 2]]
            d += values[j + 3] * arena[base + offsets[j + 3]]
            j += 4
        while j < end:
            a += values[j] * arena[base + offsets[j]]
            j += 1
        value = (a + b) + (c + d)
        if step[PLUS] >= 0:
            value += arena[step[PLUS] + o]
        arena[step[OUTPUT] + o] = zero if step[RELU] and value <= 0 else value


@compiled()
def _affine(arena, step, zero, scales, low, high):
    """Channels `low` to `high` of a normalisation, or of a ReLU alone."""
    plane = step[HEIGHT] * step[WIDTH]
    for c in range(low, high):
        a, b = scales[step[STARTS] + c], scales[step[BIAS] + c]
        for k in range(c * plane, (c + 1) * plane):
            value = arena[step[INPUT] + k] * a + b
            if step[PLUS] >= 0:
                value += arena[step[PLUS] + k]
            arena[step[OUTPUT] + k] = zero if step[RELU] and value <= 0 else value


@compiled()
def _halve(arena, step, low, high):
    """Max pooling over windows of 2×2 side by side."""
    height, width, rows, columns = step[HEIGHT], step[WIDTH], step[ROWS], step[COLUMNS]
    for c in range(low, high):
        source, to = step[INPUT] + c * height * width, step[OUTPUT] + c * rows * columns
        for y in range(rows):
            above, below = source + 2 * y * width, source + (2 * y + 1) * width
            for x in range(columns):
                a, b = arena[above + 2 * x], arena[above + 2 * x + 1]
                d, e = arena[below + 2 * x], arena[below + 2 * x + 1]
                a = a if b <= a or np.isnan(a) else b
                d = d if e <= d or np.isnan(d) else e
                arena[to + y * columns + x] = a if d <= a or np.isnan(a) else d


@compiled()
def _max_pool(arena, step, low, high):
    height, width, rows, columns = step[HEIGHT], step[WIDTH], step[ROWS], step[COLUMNS]
    pairs = step[KERNEL_ROWS] == step[KERNEL_COLUMNS] == step[ROW_STRIDE] == step[COLUMN_STRIDE] == 2
    if pairs and step[TOP] == 0 and step[LEFT] == 0:
        _halve(arena, step, low, high)
        return
    for c in range(low, high):
        source, to = step[INPUT] + c * height * width, step[OUTPUT] + c * rows * columns
        for y in range(rows):
            top = y * step[ROW_STRIDE] - step[TOP]
            bottom = min(height, top + step[KERNEL_ROWS])
            for x in range(columns):
                left = x * step[COLUMN_STRIDE] - step[LEFT]
                right = min(width, left + step[KERNEL_COLUMNS])
                best = arena[source + max(0, top) * width + max(0, left)]
                for i in range(max(0, top), bottom):
                    for j in range(max(0, left), right):
                        value = arena[source + i * width + j]
                        if value > best or np.isnan(value):
                            best = value
                arena[to + y * columns + x] = best


@compiled()
def _small_step(arena, step, zero):
    """Steps that only move numbers."""
    if step[KIND] == MEAN:
        plane = step[HEIGHT] * step[WIDTH]
        for c in range(step[CHANNELS]):
            total = zero
            for k in range(plane):
                total += arena[step[INPUT] + c * plane + k]
            arena[step[OUTPUT] + c] = total / plane
    elif step[KIND] == ADD:
        for k in range(step[COUNT]):
            value = arena[step[INPUT] + k] + arena[step[PLUS] + k]
            arena[step[OUTPUT] + k] = zero if step[RELU] and value <= 0 else value
    else:
        for k in range(step[COUNT]):
            arena[step[OUTPUT] + k] = arena[step[INPUT] + k]


@compiled()
def _part(arena, step, scratch, line, zero, offsets, values, starts, bias, low, high):
    """The outputs `low` to `high` of a step."""
    if step[KIND] == LAYER:
        _outputs(arena, step, scratch, line, zero, offsets, values, starts, bias, low, high)
    elif step[KIND] == LINEAR:
        _linear(arena, step, zero, offsets, values, starts, bias, low, high)
    elif step[KIND] == AFFINE:
        _affine(arena, step, zero, bias, low, high)
    elif step[KIND] == MAX_POOL:
        _max_pool(arena, step, low, high)


@compiled(parallel=True)
def run_steps(arena, steps, scratch, lines, parts, offsets, values, starts, bias):
    """All steps of a region for one image. `parts` says which outputs are whose when several threads work."""
    zero = np.float32(0.0)
    count = len(lines)
    for number in range(len(steps)):
        step = steps[number]
        channels = step[CHANNELS]
        if step[KIND] >= MEAN:
            _small_step(arena, step, zero)
        elif step[PARALLEL]:
            if step[KIND] == LAYER:
                for t in prange(count):
                    _spread(arena, steps[number], scratch, t * channels // count, (t + 1) * channels // count)
            for t in prange(count):
                here = steps[number]
                low, high = parts[here[PARTS] + t], parts[here[PARTS] + t + 1]
                _part(arena, here, scratch, lines[t], zero, offsets, values, starts, bias, low, high)
        else:
            if step[KIND] == LAYER:
                _spread(arena, step, scratch, 0, channels)
            _part(arena, step, scratch, lines[0], zero, offsets, values, starts, bias, 0, step[OUTPUTS])
