"""The loops of convolutions over tiles, bands and blocks, compiled by numba.

A tensor of images is *blocked*: (blocks, channels, height, width, LANES), the images of a block side by side. Every
kernel takes flat arrays. Work is divided among threads in a fixed way and sums are added in a fixed order: the result
depends on the number of threads alone.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import prange

from driveprune.compiled import compiled
from driveprune.sparse.code import LANES, LINE
from driveprune.sparse.ends import MOMENT_VECTORS, make_tile_with_moments
from driveprune.sparse.tile import (
    TILE,
    make_finish,
    make_products,
    make_sums,
    make_tile,
    make_windows,
)
from driveprune.sparse.tiling import HALF, RUNS, SIZES, WINDOWS
from driveprune.sparse.vector import (
    CLIPPED,
    COPIED,
    SLOPE,
    clear_vector,
    copy_row,
    copy_vector,
    prefetch_lines,
    scale_row,
    scale_vector,
    slope_row,
)

(
    INPUTS, HEIGHT, WIDTH, OUTPUTS, OUT_PLANE, BLOCKS, ROWS, COLUMNS, STRIDE, LEFT, ROW_PITCH, BLOCK_PITCH,
    CHANNEL_PITCH, GROUPS, STEP, SUMS, ROW_STRIDE, ROW_KINDS, KINDS,
) = SIZES.values()  # fmt: skip


_tile_1x8, _tile_2x4, _tile_4x2, _tile_8x1 = (make_tile(TILE // run, run) for run in (8, 4, 2, 1))
_finish_1x8, _finish_2x4, _finish_4x2, _finish_8x1 = (make_finish(TILE // run, run) for run in (8, 4, 2, 1))
_windows = make_windows()
_WINDOW_SUMS = RUNS.index(4)  # the kind of tile that sums of windows come in
_sums_1x8, _sums_2x4, _sums_4x2, _sums_8x1 = (make_sums(TILE // run, run) for run in (8, 4, 2, 1))
_tile_1x4, _finish_1x4, _sums_1x4 = (make(1, 4, ways=2) for make in (make_tile, make_finish, make_sums))
_moments_1x8, _moments_2x4, _moments_4x2, _moments_8x1 = (
    make_tile_with_moments(TILE // run, run) for run in (8, 4, 2, 1)
)
_products_1x8, _products_2x4, _products_4x2, _products_8x1 = (make_products(TILE // run, run) for run in (8, 4, 2, 1))


@numba.njit(inline="always")
def as_it_is(x):
    """For a layer that takes its input as it is: (what is made of it, and what that needs).

    A normalisation needs the scales and shifts of its channels. The gradient before one needs scales, what was
    normalised, its means, and what goes back through means and variances.
    """
    return COPIED, x, x, x, x, x, x


@numba.njit(inline="always")
def normalised(kind, scales, shifts):
    """For a layer whose input is still to be normalised."""
    return kind, scales, shifts, scales, scales, scales, scales


@numba.njit(inline="always")
def before_normalisation(scales, other, means, firsts, seconds):
    """For the gradient of a layer's output, if that after its normalisation is there."""
    return SLOPE, scales, scales, other, means, firsts, seconds


@numba.njit(inline="always")
def no_moments(x):
    """For a layer without moments: (whether they are wanted, stretches of tiles that count, moments, their place)."""
    return False, x, x, 0


@compiled()
def _copy_sorted(x, begin, scratch, to, sizes, source, c):
    """A row, its columns sorted by their remainders, as far as they are read."""
    kind, scales, shifts, _, _, _, _ = source
    columns, stride, left = sizes[COLUMNS], sizes[STRIDE], sizes[LEFT]
    for remainder in range(sizes[KINDS]):
        for q in range(columns):
            column = q * stride + remainder
            place = to + (remainder * columns + q) * LANES
            if column < left or column >= sizes[WIDTH] + left:
                clear_vector(scratch, place)
            elif kind == COPIED:
                copy_vector(scratch, place, x, begin + column * LANES)
            else:
                scale_vector(scratch, place, x, begin + column * LANES, scales[c], shifts[c], kind == CLIPPED)


@numba.njit(inline="always")
def _take_row(x, begin, scratch, to, count, ahead, source, c):
    """A row, normalised if it has to be."""
    kind, scales, shifts, other, means, firsts, seconds = source
    if kind == COPIED:
        copy_row(scratch, to, x, begin, count, ahead)
    elif kind == SLOPE:
        slope_row(
            scratch, to, x, begin, count, ahead, other, scales[c], means[c], firsts[c], seconds[c]
        )  # fmt: skip
    else:
        scale_row(scratch, to, x, begin, count, ahead, scales[c], shifts[c], kind == CLIPPED)


@compiled()
def copy_band(x, x_base, blocks, sizes, band, scratch, source):
    """The rows of a band, of all channels, into the scratch, with zeros where there is no image.

    Rows that are there already stay; the first one is where the turn of the ring begins.
    """
    height, width, rows, columns = sizes[HEIGHT], sizes[WIDTH], sizes[ROWS], sizes[COLUMNS]
    channels, stride, left = sizes[INPUTS], sizes[STRIDE], sizes[LEFT]
    low = min(max(0, left), columns)  # columns [low, high) of the scratch are in the image, if the stride is 1
    high = max(low, min(columns, width + left))
    has_gaps = sizes[ROW_KINDS] < sizes[ROW_STRIDE]
    for c in range(channels):
        for b in range(blocks):
            plane = x_base + (b * channels + c) * height * width * LANES
            target = c * sizes[CHANNEL_PITCH] + b * sizes[BLOCK_PITCH]
            for r in range(band[3], rows):
                if has_gaps and r % sizes[ROW_STRIDE] >= sizes[ROW_KINDS]:
                    continue
                y, to = band[0] + r, target + (r + band[4]) % rows * sizes[ROW_PITCH]
                begin = plane + (y * width - left) * LANES
                if y < 0 or y >= height:
                    for q in range(sizes[KINDS] * columns):
                        clear_vector(scratch, to + q * LANES)
                elif stride == 1:
                    for q in range(low):
                        clear_vector(scratch, to + q * LANES)
                    first, ahead = low * LANES, height * width * LANES
                    _take_row(x, begin + first, scratch, to + first, high - low, ahead, source, c)
                    for q in range(high, columns):
                        clear_vector(scratch, to + q * LANES)
                else:
                    _copy_sorted(x, begin, scratch, to, sizes, source, c)


@compiled()
def ahead_of(x_base, sizes, bands, band, runs, t):
    """What is read for the next band and not for this one, in each plane: a tile's share of it.

    Where it begins in the first plane, and how many lines of the cache it has: none if a band is all of an image.
    """
    height, row = sizes[HEIGHT], sizes[WIDTH] * LANES
    if len(bands) == 1:
        return x_base, 0
    if band + 1 < len(bands):
        top, bottom = max(0, bands[band, 0] + sizes[ROWS]), bands[band + 1, 0] + sizes[ROWS]
    else:  # of the next blocks
        x_base += sizes[BLOCKS] * sizes[INPUTS] * height * row
        top, bottom = 0, bands[0, 0] + sizes[ROWS]
    lines = -(-max(0, min(height, bottom) - top) * row // LINE)
    begin, end = runs[bands[band, 1], 2], runs[bands[band, 2] - 1, 3]
    first, last = (t - begin) * lines // (end - begin), (t + 1 - begin) * lines // (end - begin)
    return x_base + top * row + first * LINE, last - first


@numba.njit(inline="always")
def look_ahead(x, soon, lines, sizes, number, numbers):
    """Have the lines of every plane of `numbers`, beginning with a number, in the cache when they are needed."""
    if lines > 0:
        for plane in range(number, sizes[BLOCKS] * sizes[INPUTS], numbers):
            prefetch_lines(x, soon + plane * sizes[HEIGHT] * sizes[WIDTH] * LANES, lines)


@numba.njit(inline="always")
def look_ahead_tile(array, base, tile, kind):
    """Have a plane's part of the next tile in the cache when it is needed, if the images are wide."""
    if kind < 2:
        for stretch in range(1 << kind):
            prefetch_lines(array, base + tile[stretch], (TILE >> kind) * LANES // LINE)


@numba.njit(inline="always")
def _tile(kind, x, weights, bounds, table, place, out, base, step, bias, plus, has_plus, relu, stream):
    """The sums of one output over one tile of a kind."""
    offsets, values = weights
    inward, outward = table
    if kind == 0:
        _tile_1x8(
            x, offsets, values, bounds, inward, outward, place, out, base, step, bias, plus, has_plus, relu, stream
        )
    elif kind == 1:
        _tile_2x4(
            x, offsets, values, bounds, inward, outward, place, out, base, step, bias, plus, has_plus, relu, stream
        )
    elif kind == 2:
        _tile_4x2(
            x, offsets, values, bounds, inward, outward, place, out, base, step, bias, plus, has_plus, relu, stream
        )
    elif kind == 3:
        _tile_8x1(
            x, offsets, values, bounds, inward, outward, place, out, base, step, bias, plus, has_plus, relu, stream
        )
    else:
        _tile_1x4(
            x, offsets, values, bounds, inward, outward, place, out, base, step, bias, plus, has_plus, relu, stream
        )


@numba.njit(inline="always")
def _finish(kind, x, at, weights, bounds, table, place, out, base, step, plus, has_plus, relu, stream):
    """The last sums of one output over one tile of a kind to where they belong."""
    offsets, values = weights
    inward, outward = table
    if kind == 0:
        _finish_1x8(
            x, at, offsets, values, bounds, inward, outward, place, out, base, step, plus, has_plus, relu, stream
        )
    elif kind == 1:
        _finish_2x4(
            x, at, offsets, values, bounds, inward, outward, place, out, base, step, plus, has_plus, relu, stream
        )
    elif kind == 2:
        _finish_4x2(
            x, at, offsets, values, bounds, inward, outward, place, out, base, step, plus, has_plus, relu, stream
        )
    elif kind == 3:
        _finish_8x1(
            x, at, offsets, values, bounds, inward, outward, place, out, base, step, plus, has_plus, relu, stream
        )
    else:
        _finish_1x4(
            x, at, offsets, values, bounds, inward, outward, place, out, base, step, plus, has_plus, relu, stream
        )


@numba.njit(inline="always")
def bounds_of(starts, key):
    """Where the weights of an output begin, those of them without a neighbour, and where they end."""
    return starts[2 * key], starts[2 * key + 1], starts[2 * key + 2]


@numba.njit(inline="always")
def _add_products(kind, scratch, begin, has_sums, bias, weights, bounds, inward, place):
    """Some products of one output over one tile of a kind, to its sums."""
    offsets, values = weights
    if kind == 0:
        _sums_1x8(scratch, begin, has_sums, bias, offsets, values, bounds, inward, place)
    elif kind == 1:
        _sums_2x4(scratch, begin, has_sums, bias, offsets, values, bounds, inward, place)
    elif kind == 2:
        _sums_4x2(scratch, begin, has_sums, bias, offsets, values, bounds, inward, place)
    elif kind == 3:
        _sums_8x1(scratch, begin, has_sums, bias, offsets, values, bounds, inward, place)
    else:
        _sums_1x4(scratch, begin, has_sums, bias, offsets, values, bounds, inward, place)


@compiled()
def _sum_groups(kind, scratch, weights, starts, key, sizes, inward, place, bias, low, high):
    """The sums of all outputs over one tile, side by side, one group of inputs after the other but the last."""
    outputs = sizes[OUTPUTS]
    for group in range(sizes[GROUPS] - 1):
        for o in range(low, high):
            bounds = bounds_of(starts, key + group * outputs + o)
            if bounds[0] < bounds[2] or group == 0:
                begin = sizes[SUMS] + o * TILE * LANES
                _add_products(kind, scratch, begin, group > 0, bias[o], weights, bounds, inward, place)


@numba.njit(inline="always")
def _tile_with_moments(
    kind, scratch, begin, has_sums, bias, weights, bounds, table, place, out, base, step, stream, moments, o, is_first
):  # fmt: skip
    """The last sums of one output over one tile of a kind to where they belong, and what makes their moments."""
    offsets, values = weights
    inward, outward = table
    _, counted, sums, at = moments
    at += o * MOMENT_VECTORS * LANES
    if kind == 0:
        _moments_1x8(
            scratch, begin, has_sums, bias, offsets, values, bounds, inward, outward, counted, place, out, base,
            step, stream, sums, at, is_first,
        )  # fmt: skip
    elif kind == 1:
        _moments_2x4(
            scratch, begin, has_sums, bias, offsets, values, bounds, inward, outward, counted, place, out, base,
            step, stream, sums, at, is_first,
        )  # fmt: skip
    elif kind == 2:
        _moments_4x2(
            scratch, begin, has_sums, bias, offsets, values, bounds, inward, outward, counted, place, out, base,
            step, stream, sums, at, is_first,
        )  # fmt: skip
    else:
        _moments_8x1(
            scratch, begin, has_sums, bias, offsets, values, bounds, inward, outward, counted, place, out, base,
            step, stream, sums, at, is_first,
        )  # fmt: skip


@compiled()
def correlate_blocks(
    x, x_base, out, out_base, plus, values, bias, low, high, sizes, bands, runs, inward, outward, starts, offsets,
    scratch, has_plus, relu, stream, some, source, moments,
):  # fmt: skip
    """The outputs `low` to `high` of as many blocks of images as the tables are for, in `some` (first, end) bands.

    `source` is what `as_it_is` explains, `moments` what `no_moments` does.
    """
    groups, outputs, plane, step = sizes[GROUPS], sizes[OUTPUTS], sizes[OUT_PLANE], sizes[STEP]
    table = inward, outward
    zero = np.float32(0.0)
    is_first = True
    for band in range(some[0], some[1]):
        turned = offsets[bands[band, 4] * len(values) :]
        weights = turned, values
        copy_band(x, x_base, sizes[BLOCKS], sizes, bands[band], scratch, source)
        for r in range(bands[band, 1], bands[band, 2]):
            key, kind = runs[r, 0] * groups * outputs, runs[r, 1]
            for t in range(runs[r, 2], runs[r, 3]):
                soon, lines = ahead_of(x_base, sizes, bands, band, runs, t)
                next_tile = outward[min(t + 1, runs[r, 3] - 1) * TILE :]
                if groups > 1:
                    plain = _WINDOW_SUMS if kind == WINDOWS else kind
                    _sum_groups(plain, scratch, weights, starts, key, sizes, inward, t * TILE, bias, low, high)
                for o in range(low, high):
                    base, sums = out_base + o * plane, sizes[SUMS] + o * TILE * LANES
                    look_ahead(x, soon, lines, sizes, o - low, high - low)
                    if has_plus:
                        look_ahead_tile(plus, base, next_tile, kind)
                    last = key + (groups - 1) * outputs + o
                    if moments[0]:
                        _tile_with_moments(
                            kind, scratch, sums, groups > 1, bias[o], weights, bounds_of(starts, last), table,
                            t * TILE, out, base, step, stream, moments, o, is_first,
                        )  # fmt: skip
                    elif kind == WINDOWS:
                        _windows(
                            scratch, sums, groups > 1, bias[o] if groups == 1 else zero, turned, values,
                            bounds_of(starts, last), inward, outward, t * TILE, out, base, step, relu, stream,
                        )  # fmt: skip
                    elif groups > 1:
                        _finish(
                            kind, scratch, sums, weights, bounds_of(starts, last), table, t * TILE, out, base, step,
                            plus, has_plus, relu, stream,
                        )  # fmt: skip
                    else:
                        _tile(
                            kind, scratch, weights, bounds_of(starts, key + o), table, t * TILE, out, base,
                            step, bias[o], plus, has_plus, relu, stream,
                        )  # fmt: skip
                is_first = False


@compiled(parallel=True)
def correlate(
    x, out, plus, has_plus, values, bias, first_block, jobs, parts, sizes, bands, runs, inward, outward,
    starts, offsets, scratch, relu, stream,
):  # fmt: skip
    """Outputs of blocked images: `jobs` pieces of blocks, each in `parts` of the outputs."""
    blocks, outputs = sizes[BLOCKS], sizes[OUTPUTS]
    in_block = sizes[INPUTS] * sizes[HEIGHT] * sizes[WIDTH] * LANES
    out_block = outputs * sizes[OUT_PLANE]
    for piece in prange(jobs * parts):
        job, part = piece // parts, piece % parts
        block = first_block + job * blocks
        low, high = part * outputs // parts, (part + 1) * outputs // parts
        correlate_blocks(
            x, block * in_block, out, block * out_block, plus, values, bias, low, high, sizes, bands, runs, inward,
            outward, starts, offsets, scratch[numba.get_thread_id()],
            has_plus, relu, stream, (0, len(bands)), as_it_is(x), no_moments(x),
        )  # fmt: skip


@numba.njit(inline="always")
def _products(kind, x, offsets, bounds, table, place, slope, base, step, sums):
    """The sums of products of one output over one tile of a kind."""
    inward, outward, counted = table
    if kind == 0:
        _products_1x8(x, offsets, bounds, inward, outward, counted, place, slope, base, step, sums)
    elif kind in (1, HALF):
        _products_2x4(x, offsets, bounds, inward, outward, counted, place, slope, base, step, sums)
    elif kind == 2:
        _products_4x2(x, offsets, bounds, inward, outward, counted, place, slope, base, step, sums)
    else:
        _products_8x1(x, offsets, bounds, inward, outward, counted, place, slope, base, step, sums)


@compiled()
def _sum_blocks(
    x, x_base, slope, base, sizes, bands, runs, inward, outward, counted, starts, offsets, scratch, sums, source
):
    """The sums of as many blocks of images as the tables are for."""
    outputs, plane, step, table = sizes[OUTPUTS], sizes[OUT_PLANE], sizes[STEP], (inward, outward, counted)
    for band in range(len(bands)):
        turned = offsets[bands[band, 4] * starts[-1] :]
        copy_band(x, x_base, sizes[BLOCKS], sizes, bands[band], scratch, source)
        for group in range(sizes[GROUPS]):
            key = group * outputs
            for r in range(bands[band, 1], bands[band, 2]):
                kind = runs[r, 1]
                for t in range(runs[r, 2], runs[r, 3]):
                    soon, lines = ahead_of(x_base, sizes, bands, band, runs, t)
                    next_tile = outward[min(t + 1, runs[r, 3] - 1) * TILE :]
                    for o in range(outputs):
                        if group == 0:  # the others find all of it in the cache
                            look_ahead(x, soon, lines, sizes, o, outputs)
                            look_ahead_tile(slope, base + o * plane, next_tile, kind)
                        low, middle, high = bounds_of(starts, key + o)
                        if low < high:
                            bounds = low, low if kind == HALF else middle, high
                            _products(
                                kind, scratch, turned, bounds, table, t * TILE, slope, base + o * plane, step, sums
                            )  # fmt: skip


@compiled()
def sum_share(
    x, slope, first_block, jobs, thread, threads, sizes, bands, runs, inward, outward, counted, starts, offsets,
    scratch, sums, source,
):  # fmt: skip
    """The sums of a thread's share of the blocks, at the kept weights."""
    blocks = sizes[BLOCKS]
    in_block = sizes[INPUTS] * sizes[HEIGHT] * sizes[WIDTH] * LANES
    out_block = sizes[OUTPUTS] * sizes[OUT_PLANE]
    for j in range(len(sums)):
        sums[j] = 0.0
    for job in range(thread * jobs // threads, (thread + 1) * jobs // threads):
        block = first_block + job * blocks
        _sum_blocks(
            x, block * in_block, slope, block * out_block, sizes, bands, runs, inward, outward, counted, starts,
            offsets, scratch, sums, source,
        )  # fmt: skip


@compiled(parallel=True)
def add_weight_sums(
    x, slope, first_block, jobs, sizes, bands, runs, inward, outward, counted, starts, offsets, scratch, sums, slots,
    out,
):  # fmt: skip
    """Add the sums of input times gradient at the kept weights to `out`.

    Thread t finds those of its share of the blocks, in sums[t]; the sum of weight j is at slots[j].
    """
    threads = len(sums)
    for thread in prange(threads):
        sum_share(
            x, slope, first_block, jobs, thread, threads, sizes, bands, runs, inward, outward, counted, starts,
            offsets, scratch[thread], sums[thread], as_it_is(x),
        )  # fmt: skip
    for j in prange(len(slots)):
        total = np.float32(0.0)
        for thread in range(threads):  # always in the same order
            total += sums[thread, slots[j]]
        out[j] += total
