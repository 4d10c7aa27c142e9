"""The loops for a training step of a region, compiled by numba: see `driveprune.sparse.training`."""

from __future__ import annotations

import numpy as np
from numba import prange

from driveprune.compiled import compiled
from driveprune.sparse.both import TOTAL_VECTORS
from driveprune.sparse.both_kernels import turn_blocks
from driveprune.sparse.code import LANES
from driveprune.sparse.ends import MOMENT_VECTORS
from driveprune.sparse.kernels import as_it_is, before_normalisation, correlate_blocks, normalised, sum_share
from driveprune.sparse.plane_kernels import (
    clip_channel_backward,
    join_moments,
    max_pool_plane,
    max_pool_plane_backward,
    normalise_channel,
    normalise_channel_backward,
    normalise_channel_windows,
    normalise_channel_windows_backward,
    scale_channel,
    take_down,
    take_gradients,
)
from driveprune.sparse.team import begin, report
from driveprune.sparse.tiling import SIZES
from driveprune.sparse.vector import copy_vector

(
    GATHER, LAYER, FILL, NORM, WINDOWS, MAX_POOL, MEAN, BOTH, WEIGHT_SUMS, WEIGHT_GRADIENT, NORM_BACK,
    WINDOWS_BACK, CLIP_BACK, MAX_POOL_BACK, MEAN_BACK, ZERO, JOIN, JOIN_BACK,
) = range(18)  # fmt: skip

FIELDS = {
    name: number
    for number, name in enumerate(
        (
            "kind", "input", "output", "plus", "other", "slope", "relu", "stream", "blocks", "channels", "height",
            "width", "rows", "columns", "last", "kernel_rows", "kernel_columns", "row_stride", "column_stride", "top",
            "left", "moments", "weight", "bias", "values", "values_end", "first_block", "jobs", "parts", "sums",
            "table", "bands", "bands_end", "runs", "runs_end", "tiles", "tiles_end", "starts", "starts_end",
            "offsets", "offsets_end", "slots", "slots_end", "sums_pitch",
            "known", "source", "normed", "normed_channels", "finds_moments", "moment_sums",
            "pieces", "value", "clip", "totals", "total_rows", "before", "means", "through",
        )
    )
}  # fmt: skip
(
    KIND, INPUT, OUTPUT, PLUS, OTHER, SLOPE, RELU, STREAM, BLOCKS, CHANNELS, HEIGHT, WIDTH, ROWS, COLUMNS, LAST,
    KERNEL_ROWS, KERNEL_COLUMNS, ROW_STRIDE, COLUMN_STRIDE, TOP, LEFT, MOMENTS, WEIGHT, BIAS, VALUES, VALUES_END,
    FIRST_BLOCK, JOBS, PARTS, SUMS, TABLE, BANDS, BANDS_END, RUNS, RUNS_END, TILES, TILES_END, STARTS, STARTS_END,
    OFFSETS, OFFSETS_END, SLOTS, SLOTS_END, SUMS_PITCH,
    KNOWN, SOURCE, NORMED, NORMED_CHANNELS, FINDS_MOMENTS, MOMENT_SUMS,
    PIECES, VALUE, CLIP, TOTALS, TOTAL_ROWS, BEFORE, MEANS, THROUGH,
) = FIELDS.values()  # fmt: skip

_INPUTS, _HEIGHT, _WIDTH, _OUTPUTS, _OUT_PLANE, _BLOCKS = (
    SIZES[name] for name in ("inputs", "height", "width", "outputs", "out_plane", "blocks")
)


@compiled()
def _source(saved, step):
    """What a layer makes of its input, and the scales and shifts if that is a normalisation."""
    moments, n = saved[step[NORMED] :], step[NORMED_CHANNELS]
    return step[SOURCE], moments[3 * n :], moments[4 * n :]


@compiled()
def _correlate(arena, bias, step, tables, scratch, low_piece, high_piece):
    """Pieces of a layer's output: some blocks, and a part of the outputs."""
    all_sizes, all_bands, all_runs, all_inward, all_outward, all_counted, all_starts, all_offsets = tables
    sizes, tiles = all_sizes[step[TABLE]], slice(step[TILES], step[TILES_END])
    outputs, parts = sizes[_OUTPUTS], step[PARTS]
    kind, scales, shifts = _source(arena, step)
    for piece in range(low_piece, high_piece):
        job = piece // parts
        block = step[FIRST_BLOCK] + job * sizes[_BLOCKS]
        low, high = piece % parts * outputs // parts, (piece % parts + 1) * outputs // parts
        place = step[MOMENT_SUMS] + job * outputs * MOMENT_VECTORS * LANES
        correlate_blocks(
            arena[step[INPUT] :], block * sizes[_INPUTS] * sizes[_HEIGHT] * sizes[_WIDTH] * LANES,
            arena[step[OUTPUT] :], block * outputs * sizes[_OUT_PLANE], arena,
            arena[step[VALUES] : step[VALUES_END]], bias, low, high, sizes,
            all_bands[step[BANDS] : step[BANDS_END]], all_runs[step[RUNS] : step[RUNS_END]], all_inward[tiles],
            all_outward[tiles], all_starts[step[STARTS] : step[STARTS_END]],
            all_offsets[step[OFFSETS] : step[OFFSETS_END]], scratch,
            False, step[RELU] != 0, step[STREAM] != 0,
            (0, step[BANDS_END] - step[BANDS]),
            normalised(kind, scales, shifts),
            (step[FINDS_MOMENTS] != 0, all_counted[tiles], arena, place),
        )  # fmt: skip


@compiled()
def _sum_weights(saved, slopes, step, tables, scratch, thread, threads):
    """A thread's share of the sums at the kept weights."""
    all_sizes, all_bands, all_runs, all_inward, all_outward, all_counted, all_starts, all_offsets = tables
    tiles, pitch = slice(step[TILES], step[TILES_END]), step[SUMS_PITCH]
    sums = slopes[step[SUMS] + thread * pitch : step[SUMS] + (thread + 1) * pitch]
    kind, scales, shifts = _source(saved, step)
    sum_share(
        saved[step[INPUT] :], slopes[step[SLOPE] :], step[FIRST_BLOCK], step[JOBS], thread, threads,
        all_sizes[step[TABLE]], all_bands[step[BANDS] : step[BANDS_END]], all_runs[step[RUNS] : step[RUNS_END]],
        all_inward[tiles], all_outward[tiles], all_counted[tiles], all_starts[step[STARTS] : step[STARTS_END]],
        all_offsets[step[OFFSETS] : step[OFFSETS_END]], scratch, sums, normalised(kind, scales, shifts),
    )  # fmt: skip


@compiled()
def _turn(saved, slopes, step, tables, scratch, piece):
    """A piece of the way back through a layer: both gradients of some blocks, or of a part of the inputs of one."""
    all_sizes, all_bands, all_runs, all_inward, all_outward, all_counted, all_starts, all_offsets = tables
    sizes, tiles, pitch = all_sizes[step[TABLE]], slice(step[TILES], step[TILES_END]), step[SUMS_PITCH]
    outputs, parts, jobs, pieces = sizes[_OUTPUTS], step[PARTS], step[JOBS], step[PIECES]
    low, high = piece % parts * outputs // parts, (piece % parts + 1) * outputs // parts
    many = pieces // parts
    sums = slopes[step[SUMS] + piece * pitch : step[SUMS] + (piece + 1) * pitch]
    sums[:] = 0.0
    has_plus, has_totals = step[PLUS] >= 0, step[TOTALS] >= 0
    slope, y, n = slopes[step[SLOPE] :], saved[step[OTHER] :], sizes[_INPUTS]
    source = as_it_is(slope)
    if step[THROUGH] >= 0:
        through, moments = slopes[step[THROUGH] :], saved[step[MOMENTS] :]
        source = before_normalisation(moments[3 * n :], y, moments, through, through[n:])
    for job in range(piece // parts * jobs // many, (piece // parts + 1) * jobs // many):
        block = step[FIRST_BLOCK] + job * sizes[_BLOCKS]
        is_last = block + sizes[_BLOCKS] == step[BLOCKS]
        base = block * sizes[_INPUTS] * sizes[_HEIGHT] * sizes[_WIDTH] * LANES
        totals = step[TOTALS] + job * outputs * TOTAL_VECTORS * LANES
        turn_blocks(
            slope, base, source, step[LAST] if is_last else LANES, saved[step[VALUE] :],
            block * outputs * sizes[_OUT_PLANE], _source(saved, step), slopes[step[OUTPUT] :],
            slopes[step[PLUS] if has_plus else 0 :], has_plus, step[STREAM] != 0,
            slopes[step[VALUES] : step[VALUES_END]], low, high, sizes, all_bands[step[BANDS] : step[BANDS_END]],
            all_runs[step[RUNS] : step[RUNS_END]], all_inward[tiles], all_outward[tiles], all_counted[tiles],
            all_starts[step[STARTS] : step[STARTS_END]], all_offsets[step[OFFSETS] : step[OFFSETS_END]], scratch,
            sums, (step[CLIP] != 0, has_totals, saved[step[BEFORE] :], saved[step[MEANS] :], slopes, totals),
        )  # fmt: skip


@compiled()
def _join_back(saved, slopes, gradients, step, low, high):
    """What goes back through the moments of channels `low` to `high`, from the totals found on the way."""
    n, rows = step[CHANNELS], step[TOTAL_ROWS]
    dweight, dbias = gradients[step[WEIGHT] :], gradients[step[BIAS] :]
    firsts, seconds = slopes[step[THROUGH] :], slopes[step[THROUGH] + n :]
    _, _, inverse, _, _ = _moments_of(saved, step)
    count = ((step[BLOCKS] - 1) * LANES + step[LAST]) * step[HEIGHT] * step[WIDTH]
    for c in range(low, high):
        total, product = 0.0, 0.0
        for row in range(rows):
            begin = step[TOTALS] + (row * n + c) * TOTAL_VECTORS * LANES
            for lane in range(begin, begin + LANES):
                total += slopes[lane]
                product += slopes[lane + LANES]
        firsts[c], seconds[c] = take_gradients(c, total, product, inverse[c], count, dweight, dbias)


@compiled()
def _add_sums(slopes, gradients, step, all_slots, low, high):
    """The gradients of the kept weights `low` to `high`: the sums of all pieces, always in the same order."""
    slots = all_slots[step[SLOTS] : step[SLOTS_END]]
    for j in range(low, high):
        total = np.float32(0.0)
        for piece in range(step[PIECES]):
            total += slopes[step[SUMS] + piece * step[SUMS_PITCH] + slots[j]]
        gradients[step[WEIGHT] + j] += total


@compiled()
def _moments_of(saved, step):
    """Means, variances, inverse deviations, scales and shifts of a normalisation."""
    begin, n = step[MOMENTS], step[CHANNELS]
    return (
        saved[begin : begin + n], saved[begin + n : begin + 2 * n], saved[begin + 2 * n : begin + 3 * n],
        saved[begin + 3 * n : begin + 4 * n], saved[begin + 4 * n : begin + 5 * n],
    )  # fmt: skip


@compiled()
def _channels(saved, parameters, step, eps, low, high):
    """Channels `low` to `high` of a step forwards."""
    y, out = saved[step[INPUT] :], saved[step[OUTPUT] :]
    weight, bias = parameters[step[WEIGHT] :], parameters[step[BIAS] :]
    blocks, channels, rows, columns, last = step[BLOCKS], step[CHANNELS], step[ROWS], step[COLUMNS], step[LAST]
    relu, stream = step[RELU] != 0, step[STREAM] != 0
    plane = step[HEIGHT] * step[WIDTH] * LANES
    has_plus = step[PLUS] >= 0
    plus = saved[step[PLUS] if has_plus else 0 :]
    means, variances, inverse, scales, shifts = _moments_of(saved, step)
    for c in range(low, high):
        if step[KIND] == JOIN:
            sums = saved[step[MOMENT_SUMS] :]
            mean, variance = join_moments(sums, c, blocks, channels, plane // LANES, last)
            take_down(c, mean, variance, weight, bias, eps, means, variances, inverse, scales, shifts)
        elif step[KIND] == NORM and step[KNOWN]:
            scale_channel(c, y, plus, has_plus, scales, shifts, out, blocks, channels, plane, relu, stream)
        elif step[KIND] == NORM:
            normalise_channel(
                c, y, plus, has_plus, weight, bias, eps, out, means, variances, inverse, scales, shifts, blocks,
                channels, plane, last, relu, stream,
            )  # fmt: skip
        elif step[KIND] == WINDOWS:
            normalise_channel_windows(
                c, y, weight, bias, eps, out, means, variances, inverse, scales, shifts, blocks, channels, rows,
                columns, last, stream,
            )  # fmt: skip
        else:  # a layer without weights
            for b in range(blocks):
                base = (b * channels + c) * plane
                for k in range(base, base + plane):
                    out[k] = max(bias[c], np.float32(0.0)) if relu else bias[c]


@compiled()
def _channels_back(saved, slopes, gradients, step, low, high):
    """Channels `low` to `high` of a step backwards."""
    y, slope, dy = saved[step[INPUT] :], slopes[step[SLOPE] :], slopes[step[OUTPUT] :]
    dweight, dbias = gradients[step[WEIGHT] :], gradients[step[BIAS] :]
    blocks, channels, rows, columns, last = step[BLOCKS], step[CHANNELS], step[ROWS], step[COLUMNS], step[LAST]
    relu, stream = step[RELU] != 0, step[STREAM] != 0
    plane = step[HEIGHT] * step[WIDTH] * LANES
    clipped_plus = step[PLUS] >= 0
    out, dplus = saved[step[OTHER] :], slopes[step[PLUS] if clipped_plus else step[SLOPE] :]
    for c in range(low, high):
        if step[KIND] == CLIP_BACK:
            clip_channel_backward(c, slope, out, dy, dbias, blocks, channels, plane, relu, stream)
        elif step[KIND] == NORM_BACK:
            means, _, inverse, scales, shifts = _moments_of(saved, step)
            normalise_channel_backward(
                c, slope, y, out, clipped_plus, means, inverse, scales, shifts, dy, dplus, dweight, dbias, blocks,
                channels, plane, last, relu, True, stream,
            )  # fmt: skip
        else:
            means, _, inverse, scales, shifts = _moments_of(saved, step)
            normalise_channel_windows_backward(
                c, slope, y, means, inverse, scales, shifts, dy, dweight, dbias, blocks, channels, rows, columns,
                last, stream,
            )  # fmt: skip


@compiled()
def _mean(x, source, to, plane):
    """The mean of a plane."""
    for lane in range(LANES):
        x[to + lane] = 0.0
    for k in range(source, source + plane, LANES):
        for lane in range(LANES):
            x[to + lane] += x[k + lane]
    for lane in range(LANES):
        x[to + lane] /= plane // LANES


@compiled()
def _mean_back(slopes, source, to, plane, scratch):
    """The gradient of a plane from that of its mean."""
    for lane in range(LANES):
        scratch[lane] = slopes[source + lane] / (plane // LANES)
    for k in range(to, to + plane, LANES):
        copy_vector(slopes, k, scratch, 0)


@compiled()
def _planes(saved, slopes, step, scratch, low, high):
    """Planes `low` to `high` of a step that works on each channel of each block by itself."""
    height, width, rows, columns = step[HEIGHT], step[WIDTH], step[ROWS], step[COLUMNS]
    kernel, stride = (step[KERNEL_ROWS], step[KERNEL_COLUMNS]), (step[ROW_STRIDE], step[COLUMN_STRIDE])
    pad, stream = (step[TOP], step[LEFT]), step[STREAM] != 0
    plane, small = height * width * LANES, rows * columns * LANES
    for p in range(low, high):
        if step[KIND] == MAX_POOL:
            max_pool_plane(
                saved, step[INPUT] + p * plane, saved, step[OUTPUT] + p * small, height, width, rows, columns,
                kernel, stride, pad, stream,
            )  # fmt: skip
        elif step[KIND] == MAX_POOL_BACK:
            max_pool_plane_backward(
                saved[step[INPUT] :], p * plane, saved[step[OTHER] :], p * small, slopes[step[SLOPE] :], scratch,
                slopes[step[OUTPUT] :], stream, height, width, rows, columns, kernel, stride, pad,
            )  # fmt: skip
        elif step[KIND] == MEAN:
            _mean(saved, step[INPUT] + p * plane, step[OUTPUT] + p * LANES, plane)
        elif step[KIND] == MEAN_BACK:
            _mean_back(slopes, step[SLOPE] + p * LANES, step[OUTPUT] + p * plane, plane, scratch)
        else:  # ZERO
            for k in range(step[OUTPUT] + p * plane, step[OUTPUT] + (p + 1) * plane):
                slopes[k] = 0.0


@compiled()
def forwards(saved, parameters, steps, eps, items, tables, gather, all_scratch, counters, thread):
    """Take pieces of work, rows (step, low, high, what must be done before), until there are none."""
    scratch = all_scratch[thread]
    number = begin(items, counters)
    while number < len(items):
        item = items[number]
        step, low, high = steps[item[0]], item[1], item[2]
        if step[KIND] == GATHER:
            for j in range(low, high):
                saved[step[OUTPUT] + j] = parameters[gather[j]]
        elif step[KIND] == LAYER:
            _correlate(saved, parameters[step[BIAS] :], step, tables, scratch, low, high)
        elif step[KIND] in (MAX_POOL, MEAN):
            _planes(saved, saved, step, scratch, low, high)
        else:
            _channels(saved, parameters, step, eps[item[0]], low, high)
        report(counters)
        number = begin(items, counters)


@compiled()
def backwards(
    saved, slopes, parameters, gradients, steps, items, tables, slots, gather, all_scratch, counters, thread
):
    """The same for the gradients."""
    scratch = all_scratch[thread]
    number = begin(items, counters)
    while number < len(items):
        item = items[number]
        step, low, high = steps[item[0]], item[1], item[2]
        if step[KIND] == GATHER:
            for j in range(low, high):
                slopes[step[OUTPUT] + j] = parameters[gather[j]]
        elif step[KIND] == BOTH:
            for piece in range(low, high):
                _turn(saved, slopes, step, tables, scratch, piece)
        elif step[KIND] == JOIN_BACK:
            _join_back(saved, slopes, gradients, step, low, high)
        elif step[KIND] == WEIGHT_SUMS:
            _sum_weights(saved, slopes, step, tables, scratch, low, len(all_scratch))
        elif step[KIND] == WEIGHT_GRADIENT:
            _add_sums(slopes, gradients, step, slots, low, high)
        elif step[KIND] in (MAX_POOL_BACK, MEAN_BACK, ZERO):
            _planes(saved, slopes, step, scratch, low, high)
        else:
            _channels_back(saved, slopes, gradients, step, low, high)
        report(counters)
        number = begin(items, counters)


@compiled(parallel=True)
def forwards_together(saved, parameters, steps, eps, items, tables, gather, all_scratch, counters):
    """`forwards` by all threads."""
    for thread in prange(len(all_scratch)):
        forwards(saved, parameters, steps, eps, items, tables, gather, all_scratch, counters, thread)


@compiled(parallel=True)
def backwards_together(
    saved, slopes, parameters, gradients, steps, items, tables, slots, gather, all_scratch, counters
):
    """`backwards` by all threads."""
    for thread in prange(len(all_scratch)):
        backwards(
            saved, slopes, parameters, gradients, steps, items, tables, slots, gather, all_scratch, counters, thread
        )
