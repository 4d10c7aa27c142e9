"""The loops for one image at a time, compiled by numba: see `driveprune.sparse.flat`."""

from __future__ import annotations

import numba
import numpy as np
from numba import prange

from driveprune.compiled import compiled
from driveprune.sparse.code import LANES
from driveprune.sparse.line import PAIR_SUMS, SUMS, make_line
from driveprune.sparse.rows import TILE, make_rows
from driveprune.sparse.team import report, take_from, wait
from driveprune.sparse.vector import clear_vector, make_deal, make_halve

SPREAD, LAYER, ROWS, LINEAR, AFFINE, MAX_POOL, MEAN, ADD, COPY = range(9)

FIELDS = {
    name: number
    for number, name in enumerate(
        (
            "kind", "input", "in_plane", "in_pitch", "output", "out_plane", "out_pitch", "plus", "plus_plane",
            "plus_pitch", "relu", "height", "width", "rows", "columns", "row_stride", "column_stride", "top", "left",
            "deep", "row_kinds", "column_kinds", "kernel_rows", "kernel_columns", "vectors", "mask", "bias", "scale",
            "jobs", "groups", "outputs", "across", "frame",
        )
    )
}  # fmt: skip
(
    KIND, INPUT, IN_PLANE, IN_PITCH, OUTPUT, OUT_PLANE, OUT_PITCH, PLUS, PLUS_PLANE, PLUS_PITCH, RELU, HEIGHT, WIDTH,
    OUT_ROWS, COLUMNS, ROW_STRIDE, COLUMN_STRIDE, TOP, LEFT, DEEP, ROW_KINDS, COLUMN_KINDS, KERNEL_ROWS,
    KERNEL_COLUMNS, VECTORS, MASK, BIAS, SCALE, JOBS, GROUPS, OUTPUTS, ACROSS_ROW, FRAME,
) = FIELDS.values()  # fmt: skip

_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11, _12 = (make_line(vectors, 1) for vectors in range(1, SUMS + 1))
_deal, _deal_half, _deal_2 = (make_deal(count) for count in (LANES, LANES // 2, 2))
_halve, _halve_half, _halve_2 = (make_halve(count) for count in (LANES, LANES // 2, 2))
ACROSS = (1, 2, 4, 8)
"""How many vectors a row may have, if it is done by rows."""
_rows_1, _rows_2, _rows_4, _rows_8 = (make_rows(across) for across in ACROSS)
_two_1, _two_2, _two_3, _two_4, _two_5 = (make_line(vectors, 2) for vectors in range(1, PAIR_SUMS // 2 + 1))


@numba.njit(inline="always")
def _single(size, arena, source, weights, targets, masks, place, biases, flags):
    """A stretch of one output."""
    if size == 12:
        _12(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 11:
        _11(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 10:
        _10(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 9:
        _9(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 8:
        _8(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 7:
        _7(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 6:
        _6(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 5:
        _5(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 4:
        _4(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 3:
        _3(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 2:
        _2(arena, source, weights, targets, masks, place, biases, flags)
    else:
        _1(arena, source, weights, targets, masks, place, biases, flags)


@numba.njit(inline="always")
def _pair(size, arena, source, weights, targets, masks, place, biases, flags):
    """A stretch of two outputs."""
    if size == 5:
        _two_5(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 4:
        _two_4(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 3:
        _two_3(arena, source, weights, targets, masks, place, biases, flags)
    elif size == 2:
        _two_2(arena, source, weights, targets, masks, place, biases, flags)
    else:
        _two_1(arena, source, weights, targets, masks, place, biases, flags)


@compiled()
def _layer(arena, step, jobs, low, high, part, offsets, values, bias, masks):
    """Jobs `low` to `high` of a layer: one or two outputs each, along a part (first, end) of their vectors."""
    has_plus, relu, vectors = step[PLUS] >= 0, step[RELU] != 0, part[1] - part[0]
    for number in range(low, high):
        job = jobs[step[JOBS] + number]
        first, second, begin, end, at = job[0], job[1], job[2], job[3], job[4]
        last, most = (second, PAIR_SUMS // 2) if second >= 0 else (first, SUMS)
        weights, flags = (offsets, begin, end, values, at), (has_plus, relu)
        biases = bias[step[BIAS] + first], bias[step[BIAS] + last]
        stretches = (vectors + most - 1) // most
        for stretch in range(stretches):
            here = part[0] + stretch * vectors // stretches
            size = part[0] + (stretch + 1) * vectors // stretches - here
            k = here * LANES
            targets = (
                step[OUTPUT] + first * step[OUT_PLANE] + k, step[OUTPUT] + last * step[OUT_PLANE] + k,
                step[PLUS] + first * step[PLUS_PLANE] + k, step[PLUS] + last * step[PLUS_PLANE] + k,
            )  # fmt: skip
            if second >= 0:
                _pair(size, arena, step[INPUT] + k, weights, targets, masks, step[MASK] + k, biases, flags)
            else:
                _single(size, arena, step[INPUT] + k, weights, targets, masks, step[MASK] + k, biases, flags)


@numba.njit(inline="always")
def _rows_of(across, arena, source, weights, bounds, to, plus, bias, flags):
    """A tile of one output."""
    if across == 1:
        _rows_1(arena, source, weights, bounds, to, plus, bias, flags)
    elif across == 2:
        _rows_2(arena, source, weights, bounds, to, plus, bias, flags)
    elif across == 4:
        _rows_4(arena, source, weights, bounds, to, plus, bias, flags)
    else:
        _rows_8(arena, source, weights, bounds, to, plus, bias, flags)


@compiled()
def _clear(arena, begin, end):
    """Zeros, in whole vectors."""
    for place in range(begin, end, LANES):
        clear_vector(arena, place)


@compiled()
def _frame(arena, step, planes, size, above, below):
    """The zeros above and below planes (first, end) of so many pixels."""
    for p in range(planes[0], planes[1]):
        begin = step[OUTPUT] + p * step[OUT_PLANE]
        if above:
            _clear(arena, begin - step[FRAME], begin)
        if below:
            _clear(arena, begin + size, begin + size + step[FRAME])


@compiled()
def _by_rows(arena, step, jobs, low, high, tiles, offsets, values, bias):
    """Outputs `low` to `high` of a layer that is done by rows, in `tiles` (first, end).

    One group of inputs after the other: the sums so far are where the output will be, which may be where the tensor
    is that is added first.
    """
    groups, has_plus, relu = step[GROUPS], step[PLUS] >= 0, step[RELU] != 0
    _frame(arena, step, (low, high), step[VECTORS] * LANES, tiles[0] == 0, tiles[1] * TILE == step[VECTORS])
    for tile in range(tiles[0], tiles[1]):
        k = tile * TILE * LANES
        for group in range(groups):
            flags = group > 0, group == 0 and has_plus, group == groups - 1 and relu
            for o in range(low, high):
                job = jobs[step[JOBS] + group * step[OUTPUTS] + o]
                _rows_of(
                    step[ACROSS_ROW], arena, step[INPUT] + k, (offsets, values, job[4]),
                    (job[0], job[1], job[2], job[3]), step[OUTPUT] + o * step[OUT_PLANE] + k,
                    step[PLUS] + o * step[PLUS_PLANE] + k, bias[step[BIAS] + o], flags,
                )  # fmt: skip


@compiled()
def _deal_row(arena, source, evens, odds, even_count, odd_count):
    """A row's numbers at odd places to one place, then those at even places to another, or to the same."""
    x, both = 0, min(even_count, odd_count)
    while x + LANES <= both:
        _deal(arena, evens + x, odds + x, arena, source + 2 * x)
        x += LANES
    if x + LANES // 2 <= both:
        _deal_half(arena, evens + x, odds + x, arena, source + 2 * x)
        x += LANES // 2
    while x + 2 <= both:
        _deal_2(arena, evens + x, odds + x, arena, source + 2 * x)
        x += 2
    for place in range(x, odd_count):
        arena[odds + place] = arena[source + 2 * place + 1]
    for place in range(x, even_count):
        arena[evens + place] = arena[source + 2 * place]


@compiled()
def _spread(arena, step, low, high):
    """Channels `low` to `high` sorted by the remainders of a stride.

    To be read by rows, planes have a frame; else what is not written is zero from the start.
    """
    height, width, columns, plane = step[HEIGHT], step[WIDTH], step[COLUMNS], step[OUT_PLANE]
    row_stride, column_stride, left = step[ROW_STRIDE], step[COLUMN_STRIDE], step[LEFT]
    row_kinds, column_kinds = step[ROW_KINDS], step[COLUMN_KINDS]
    even, odd = left // 2, (left + 1) // 2  # the columns of the first two pixels, if the stride is 2
    evens, odds = min((width + 1) // 2, columns - even), min(width // 2, columns - odd)
    whole = column_stride == column_kinds == 2 and left == 0 and width == 2 * columns and columns % LANES == 0
    kinds = row_kinds * column_kinds
    _frame(arena, step, (low * kinds, high * kinds), step[DEEP] * step[OUT_PITCH], True, True)
    for line in range(low * row_kinds, high * row_kinds):  # the rows of a channel with the same remainder
        ahead = line % row_kinds - step[TOP]
        first = max(0, -(ahead // row_stride))
        last = min(step[DEEP], (height - 1 - ahead) // row_stride + 1)
        image = step[INPUT] + line // row_kinds * step[IN_PLANE] + ahead * step[IN_PITCH]
        for i in range(first, last):
            source = image + i * row_stride * step[IN_PITCH]
            row = step[OUTPUT] + line * column_kinds * plane + i * step[OUT_PITCH]
            if whole:
                for x in range(0, columns, LANES):
                    _deal(arena, row + x, row + plane + x, arena, source + 2 * x)
            elif column_stride == 2 and column_kinds == 2:
                begin = row + left % 2 * plane + even
                _deal_row(arena, source, begin, row + (left + 1) % 2 * plane + odd, evens, odds)
            elif column_stride == 2 and left % 2 == 0:  # pixels at odd places are not needed
                _deal_row(arena, source, row + even, row + even, evens, min(evens, odds))
            else:
                for rx in range(column_kinds):
                    begin = max(0, -((rx - left) // column_stride))
                    end = min(columns, (width - 1 - rx + left) // column_stride + 1)
                    for j in range(begin, end):
                        arena[row + rx * plane + j] = arena[source + j * column_stride + rx - left]


@compiled()
def _linear(arena, step, zero, jobs, low, high, offsets, values, bias):
    """Jobs `low` to `high` of a linear layer: an output each."""
    base = step[INPUT]
    for number in range(low, high):
        job = jobs[step[JOBS] + number]
        o, begin, end, at = job[0], job[2], job[3], job[4] - job[2]
        a, b, c, d = bias[step[BIAS] + o], zero, zero, zero
        j = begin
        while j + 4 <= end:
            a += values[at + j] * arena[base + offsets[j]]
            b += values[at + j + 1] * arena[base + offsets[j + 1]]
            c += values[at + j + 2] * arena[base + offsets[j + 2]]
            d += values[at + j + 3] * arena[base + offsets[j + 3]]
            j += 4
        while j < end:
            a += values[at + j] * arena[base + offsets[j]]
            j += 1
        value = (a + b) + (c + d)
        if step[PLUS] >= 0:
            value += arena[step[PLUS] + o]
        arena[step[OUTPUT] + o] = zero if step[RELU] and value <= 0 else value


@compiled()
def _affine(arena, step, zero, scales, low, high):
    """Channels `low` to `high` of a normalisation, or of a ReLU alone."""
    for c in range(low, high):
        a, b = scales[step[SCALE] + c], scales[step[BIAS] + c]
        for y in range(step[HEIGHT]):
            source = step[INPUT] + c * step[IN_PLANE] + y * step[IN_PITCH]
            other = step[PLUS] + c * step[PLUS_PLANE] + y * step[PLUS_PITCH]
            to = step[OUTPUT] + c * step[OUT_PLANE] + y * step[OUT_PITCH]
            for x in range(step[WIDTH]):
                value = arena[source + x] * a + b
                if step[PLUS] >= 0:
                    value += arena[other + x]
                arena[to + x] = zero if step[RELU] and value <= 0 else value


@compiled()
def _pool_halves(arena, step, low, high):
    """Max pooling over windows of 2×2 side by side."""
    for c in range(low, high):
        for y in range(step[OUT_ROWS]):
            above = step[INPUT] + c * step[IN_PLANE] + 2 * y * step[IN_PITCH]
            below = above + step[IN_PITCH]
            to = step[OUTPUT] + c * step[OUT_PLANE] + y * step[OUT_PITCH]
            columns, x = step[COLUMNS], 0
            while x + LANES <= columns:
                _halve(arena, to + x, arena, above + 2 * x, below + 2 * x)
                x += LANES
            if x + LANES // 2 <= columns:
                _halve_half(arena, to + x, arena, above + 2 * x, below + 2 * x)
                x += LANES // 2
            while x + 2 <= columns:
                _halve_2(arena, to + x, arena, above + 2 * x, below + 2 * x)
                x += 2
            if x < columns:
                a, b = arena[above + 2 * x], arena[above + 2 * x + 1]
                d, e = arena[below + 2 * x], arena[below + 2 * x + 1]
                a = a if b <= a or np.isnan(a) else b
                d = d if e <= d or np.isnan(d) else e
                arena[to + x] = a if d <= a or np.isnan(a) else d


@compiled()
def _max_pool(arena, step, low, high):
    pairs = step[KERNEL_ROWS] == step[KERNEL_COLUMNS] == step[ROW_STRIDE] == step[COLUMN_STRIDE] == 2
    if pairs and step[TOP] == 0 and step[LEFT] == 0:
        _pool_halves(arena, step, low, high)
        return
    height, width, pitch = step[HEIGHT], step[WIDTH], step[IN_PITCH]
    for c in range(low, high):
        source = step[INPUT] + c * step[IN_PLANE]
        for y in range(step[OUT_ROWS]):
            top = y * step[ROW_STRIDE] - step[TOP]
            bottom = min(height, top + step[KERNEL_ROWS])
            to = step[OUTPUT] + c * step[OUT_PLANE] + y * step[OUT_PITCH]
            for x in range(step[COLUMNS]):
                left = x * step[COLUMN_STRIDE] - step[LEFT]
                right = min(width, left + step[KERNEL_COLUMNS])
                best = arena[source + max(0, top) * pitch + max(0, left)]
                for i in range(max(0, top), bottom):
                    for j in range(max(0, left), right):
                        value = arena[source + i * pitch + j]
                        if value > best or np.isnan(value):
                            best = value
                arena[to + x] = best


@compiled()
def _mean(arena, step, zero, low, high):
    """The mean of each channel."""
    for c in range(low, high):
        total = zero
        for y in range(step[HEIGHT]):
            source = step[INPUT] + c * step[IN_PLANE] + y * step[IN_PITCH]
            for x in range(step[WIDTH]):
                total += arena[source + x]
        arena[step[OUTPUT] + c * step[OUT_PLANE]] = total / (step[HEIGHT] * step[WIDTH])


@compiled()
def _add(arena, step, zero, low, high):
    """Channels `low` to `high` of a sum, or of a copy if there is nothing to add."""
    for c in range(low, high):
        for y in range(step[HEIGHT]):
            source = step[INPUT] + c * step[IN_PLANE] + y * step[IN_PITCH]
            other = step[PLUS] + c * step[PLUS_PLANE] + y * step[PLUS_PITCH]
            to = step[OUTPUT] + c * step[OUT_PLANE] + y * step[OUT_PITCH]
            if step[KIND] == COPY:
                for x in range(step[WIDTH]):
                    arena[to + x] = arena[source + x]
            else:
                for x in range(step[WIDTH]):
                    value = arena[source + x] + arena[other + x]
                    arena[to + x] = zero if step[RELU] and value <= 0 else value


@compiled()
def piece(arena, step, item, jobs, offsets, masks, weights):
    """A piece of a step, a row (low, high, first, end): some jobs or channels, some vectors or tiles of a layer."""
    zero = np.float32(0.0)
    values, bias = weights
    low, high = item[0], item[1]
    if step[KIND] == LAYER:
        _layer(arena, step, jobs, low, high, (item[2], item[3]), offsets, values, bias, masks)
    elif step[KIND] == ROWS:
        _by_rows(arena, step, jobs, low, high, (item[2], item[3]), offsets, values, bias)
    elif step[KIND] == SPREAD:
        _spread(arena, step, low, high)
    elif step[KIND] == LINEAR:
        _linear(arena, step, zero, jobs, low, high, offsets, values, bias)
    elif step[KIND] == AFFINE:
        _affine(arena, step, zero, bias, low, high)
    elif step[KIND] == MAX_POOL:
        _max_pool(arena, step, low, high)
    elif step[KIND] == MEAN:
        _mean(arena, step, zero, low, high)
    else:
        _add(arena, step, zero, low, high)


@compiled()
def work(arena, steps, queues, items, jobs, offsets, masks, weights, counters, threads, thread):
    """All steps, each when the one before is done: a thread's own pieces of it, then those that others have left."""
    for number in range(len(steps)):
        for turn in range(threads):
            queue = number * threads + (thread + turn) % threads
            item = queues[queue] + take_from(counters, queue)
            while item < queues[queue + 1]:
                wait(counters, queues[number * threads])
                piece(arena, steps[number], items[item], jobs, offsets, masks, weights)
                report(counters)
                item = queues[queue] + take_from(counters, queue)
    if thread == 0:
        wait(counters, queues[len(steps) * threads])


@compiled(parallel=True)
def work_together(arena, steps, queues, items, jobs, offsets, masks, weights, counters, threads):
    """The same by several threads."""
    for thread in prange(threads):
        work(arena, steps, queues, items, jobs, offsets, masks, weights, counters, threads, thread)
