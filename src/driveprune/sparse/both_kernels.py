"""The loops of the way back through a layer, both gradients at once: see `driveprune.sparse.both`."""

from __future__ import annotations

import numba
import numpy as np
from numba import prange

from driveprune.compiled import compiled
from driveprune.sparse.both import TOTAL_VECTORS, make_both
from driveprune.sparse.code import LANES
from driveprune.sparse.kernels import ahead_of, as_it_is, bounds_of, copy_band, look_ahead, look_ahead_tile
from driveprune.sparse.tile import TILE
from driveprune.sparse.tiling import SIZES
from driveprune.sparse.vector import COPIED, SLOPE, prefetch_lines

_INPUTS, _HEIGHT, _WIDTH, _OUTPUTS, _OUT_PLANE, _BLOCKS, _ROWS, _COLUMNS, _STEP = (
    SIZES[name]
    for name in ("inputs", "height", "width", "outputs", "out_plane", "blocks", "rows", "columns", "step")
)  # fmt: skip
_ROW_PITCH, _BLOCK_PITCH, _CHANNEL_PITCH = (SIZES[name] for name in ("row_pitch", "block_pitch", "channel_pitch"))

_both_1x8, _both_2x4, _both_4x2, _both_8x1 = (make_both(TILE // run, run) for run in (8, 4, 2, 1))


@numba.njit(inline="always")
def _both(kind, slope, weights, around, table, place, out, base, step, plus, has_plus, stream, x, source, sums, end):
    """Both gradients of one channel over one tile of a kind."""
    offsets, values = weights
    inward, outward, counted = table
    if kind == 0:
        _both_1x8(
            slope, offsets, values, around, inward, outward, counted, place, out, base, step, plus, has_plus, stream,
            x, source, sums, end,
        )  # fmt: skip
    elif kind == 1:
        _both_2x4(
            slope, offsets, values, around, inward, outward, counted, place, out, base, step, plus, has_plus, stream,
            x, source, sums, end,
        )  # fmt: skip
    elif kind == 2:
        _both_4x2(
            slope, offsets, values, around, inward, outward, counted, place, out, base, step, plus, has_plus, stream,
            x, source, sums, end,
        )  # fmt: skip
    else:
        _both_8x1(
            slope, offsets, values, around, inward, outward, counted, place, out, base, step, plus, has_plus, stream,
            x, source, sums, end,
        )  # fmt: skip


@numba.njit(inline="always")
def _look_ahead_tile(array, base, tile, kind, step):
    """Have a plane's part of the next tile in the cache when it is needed."""
    if step == LANES:
        look_ahead_tile(array, base, tile, kind)
    else:
        for stretch in range(1 << kind):
            for place in range(TILE >> kind):
                prefetch_lines(array, base + tile[stretch] + place * step, 1)


@compiled()
def _clear_lanes(scratch, sizes, band, last):
    """Zeros for images that are none, in the new rows of the last block of a band."""
    begin = (sizes[_BLOCKS] - 1) * sizes[_BLOCK_PITCH]
    for c in range(sizes[_INPUTS]):
        for r in range(band[3], sizes[_ROWS]):
            row = begin + c * sizes[_CHANNEL_PITCH] + (r + band[4]) % sizes[_ROWS] * sizes[_ROW_PITCH]
            for q in range(sizes[_COLUMNS]):
                for lane in range(last, LANES):
                    scratch[row + q * LANES + lane] = 0.0


@compiled()
def turn_blocks(
    slope, slope_base, source, last, x, x_base, made, out, plus, has_plus, stream, values, low, high, sizes, bands,
    runs, inward, outward, counted, starts, offsets, scratch, sums, end,
):  # fmt: skip
    """Both gradients of the channels `low` to `high` of a layer's input, of as many blocks as the tables are for.

    `source` is what is made of the slope on the way to the scratch (see `as_it_is`), `made` (kind, scales, shifts)
    what is made of the input. `last` lanes of the last block are images. The end is (clip, has_totals, what was
    normalised, its means, totals of all channels, their place), as in `make_both`.
    """
    plane, step = sizes[_OUT_PLANE], sizes[_STEP]
    table = inward, outward, counted
    _, scales, shifts = made
    is_made = made[0] != COPIED
    zero = np.float32(0.0)
    clip, has_totals, before, means, totals, at = end
    if has_totals:
        totals[at + low * TOTAL_VECTORS * LANES : at + high * TOTAL_VECTORS * LANES] = 0.0
    for band in range(len(bands)):
        weights = offsets[bands[band, 4] * len(values) :], values
        copy_band(slope, slope_base, sizes[_BLOCKS], sizes, bands[band], scratch, source)
        if source[0] == SLOPE and last < LANES:
            _clear_lanes(scratch, sizes, bands[band], last)
        for r in range(bands[band, 1], bands[band, 2]):
            key, kind = runs[r, 0] * sizes[_OUTPUTS], runs[r, 1]
            for t in range(runs[r, 2], runs[r, 3]):
                soon, lines = ahead_of(slope_base, sizes, bands, band, runs, t)
                next_tile = outward[min(t + 1, runs[r, 3] - 1) * TILE :]
                for c in range(low, high):
                    base = x_base + c * plane
                    look_ahead(slope, soon, lines, sizes, c - low, high - low)
                    if source[0] == SLOPE:
                        look_ahead(source[3], soon, lines, sizes, c - low, high - low)
                    _look_ahead_tile(x, base, next_tile, kind, step)
                    if has_plus:
                        _look_ahead_tile(plus, base, next_tile, kind, step)
                    if has_totals and not is_made:
                        _look_ahead_tile(before, base, next_tile, kind, step)
                    scale, shift = (scales[c], shifts[c]) if is_made else (zero, zero)
                    mean, place = means[c] if has_totals else zero, at + c * TOTAL_VECTORS * LANES
                    _both(
                        kind, scratch, weights, bounds_of(starts, key + c), table, t * TILE, out, base, step, plus,
                        has_plus, stream, x, (made[0], scale, shift), sums,
                        (clip, has_totals, before, mean, totals, place),
                    )  # fmt: skip


@compiled(parallel=True)
def turn(
    slope, x, out, plus, has_plus, stream, values, first_block, jobs, parts, sizes, bands, runs, inward, outward,
    counted, starts, offsets, scratch, sums, slots, found,
):  # fmt: skip
    """Both gradients of a layer: of its input to `out`, those at its kept weights are added to `found`.

    Row p of the sums belongs to piece p of the work: some of the `jobs`, or one of the `parts` of one job. The sum of
    weight j is at slots[j].
    """
    pieces, blocks, outputs = len(sums), sizes[_BLOCKS], sizes[_OUTPUTS]
    many = pieces // parts
    for piece in prange(pieces):
        low, high = piece % parts * outputs // parts, (piece % parts + 1) * outputs // parts
        sums[piece] = 0.0
        for job in range(piece // parts * jobs // many, (piece // parts + 1) * jobs // many):
            block = first_block + job * blocks
            turn_blocks(
                slope, block * sizes[_INPUTS] * sizes[_HEIGHT] * sizes[_WIDTH] * LANES, as_it_is(slope), LANES, x,
                block * outputs * sizes[_OUT_PLANE], (COPIED, values, values), out, plus, has_plus, stream, values,
                low, high, sizes, bands, runs, inward, outward, counted, starts, offsets,
                scratch[numba.get_thread_id()], sums[piece], (False, False, x, x, x, 0),
            )  # fmt: skip
    for j in prange(len(slots)):
        total = np.float32(0.0)
        for piece in range(pieces):  # always in the same order
            total += sums[piece, slots[j]]
        found[j] += total
