"""The loops for inference of a batch, compiled by numba: see `driveprune.sparse.batch`."""

from __future__ import annotations

from numba import prange

from driveprune.compiled import compiled
from driveprune.sparse.code import LANES
from driveprune.sparse.kernels import as_it_is, correlate_blocks, no_moments
from driveprune.sparse.pair_kernels import clear_row, clear_sides, move_on, row_of
from driveprune.sparse.plane_kernels import max_pool_plane, scale_plane
from driveprune.sparse.team import begin, report
from driveprune.sparse.tiling import SIZES
from driveprune.sparse.vector import copy_vector
from driveprune.sparse.wide_kernels import image_by_rows, pack_planes

LAYER, AFFINE, MAX_POOL, MEAN, COPY, PAIR, BY_ROWS, PACK = range(8)

FIELDS = {
    name: number
    for number, name in enumerate(
        (
            "kind", "input", "output", "plus", "relu", "stream", "channels", "height", "width", "rows", "columns",
            "kernel_rows", "kernel_columns", "row_stride", "column_stride", "top", "left", "first", "outputs", "bias",
            "scale", "first_block", "parts", "sizes", "bands", "bands_end", "runs", "runs_end", "tiles", "tiles_end",
            "starts", "starts_end", "offsets", "offsets_end", "weights", "weights_end", "between", "advance",
        )
    )
}  # fmt: skip
(
    KIND, INPUT, OUTPUT, PLUS, RELU, STREAM, CHANNELS, HEIGHT, WIDTH, ROWS, COLUMNS, KERNEL_ROWS, KERNEL_COLUMNS,
    ROW_STRIDE, COLUMN_STRIDE, TOP, LEFT, FIRST, OUTPUTS, BIAS, SCALE, FIRST_BLOCK, PARTS, TABLE, BANDS, BANDS_END,
    RUNS, RUNS_END, TILES, TILES_END, STARTS, STARTS_END, OFFSETS, OFFSETS_END, WEIGHTS, WEIGHTS_END,
    BETWEEN, ADVANCE,
) = FIELDS.values()  # fmt: skip

_INPUTS, _HEIGHT, _WIDTH, _OUTPUTS, _OUT_PLANE, _BLOCKS, _ROWS = (
    SIZES[name] for name in ("inputs", "height", "width", "outputs", "out_plane", "blocks", "rows")
)


@compiled()
def _bands(x, x_base, out, out_base, plus, step, tables, weights, scratch, low, high, stream, bands, some):
    """The outputs `low` to `high` of a layer, in `some` (first, end) bands."""
    all_sizes, _, all_runs, all_inward, all_outward, all_starts = tables
    offsets, values, bias = weights
    sizes = all_sizes[step[TABLE]]
    tiles, kept = slice(step[TILES], step[TILES_END]), slice(step[WEIGHTS], step[WEIGHTS_END])
    correlate_blocks(
        x, x_base, out, out_base, plus, values[kept], bias[step[BIAS] : step[BIAS] + sizes[_OUTPUTS]], low, high,
        sizes, bands, all_runs[step[RUNS] : step[RUNS_END]], all_inward[tiles], all_outward[tiles],
        all_starts[step[STARTS] : step[STARTS_END]], offsets[step[OFFSETS] : step[OFFSETS_END]], scratch,
        step[PLUS] >= 0, step[RELU] != 0, stream, some, as_it_is(x), no_moments(x),
    )  # fmt: skip


@compiled()
def _layer(arena, step, tables, weights, scratch, piece):
    """One piece of a layer: some blocks of images, and a part of the outputs."""
    sizes = tables[0][step[TABLE]]
    outputs, parts = sizes[_OUTPUTS], step[PARTS]
    block = step[FIRST_BLOCK] + piece // parts * sizes[_BLOCKS]
    low, high = piece % parts * outputs // parts, (piece % parts + 1) * outputs // parts
    _bands(
        arena[step[INPUT] :], block * sizes[_INPUTS] * sizes[_HEIGHT] * sizes[_WIDTH] * LANES, arena[step[OUTPUT] :],
        block * outputs * sizes[_OUT_PLANE], arena[max(0, step[PLUS]) :], step, tables, weights, scratch, low, high,
        step[STREAM] != 0, tables[1][step[BANDS] : step[BANDS_END]], (0, step[BANDS_END] - step[BANDS]),
    )  # fmt: skip


@compiled()
def _pair(arena, first, second, tables, weights, scratch, block):
    """Two layers in a row for one block of images."""
    sizes, bands = tables[0][second[TABLE]], tables[1][second[BANDS] : second[BANDS_END]]
    between, advance = scratch[second[BETWEEN] :], second[ADVANCE]
    row = top = bands[0, 0]
    clear_sides(between, sizes)
    for band in range(len(bands)):
        if band > 0:
            move_on(between, sizes, advance)
        while row < bands[band, 0] + sizes[_ROWS]:
            if 0 <= row < sizes[_HEIGHT]:
                _first_row(arena, first, tables, weights, scratch, between, block, row)
            else:
                clear_row(between, sizes, row_of(row - top, sizes[_ROWS], advance))
            row += 1
        _second_band(arena, second, tables, weights, between, block, band)


@compiled()
def _first_row(arena, step, tables, weights, scratch, between, block, row):
    """A row of the first layer of a pair to where the second one reads it."""
    sizes = tables[0][step[TABLE]]
    _bands(
        arena[step[INPUT] :], block * sizes[_INPUTS] * sizes[_HEIGHT] * sizes[_WIDTH] * LANES, between, 0, arena,
        step, tables, weights, scratch, 0, sizes[_OUTPUTS], False, tables[1][step[BANDS] : step[BANDS_END]],
        (row, row + 1),
    )  # fmt: skip


@compiled()
def _second_band(arena, step, tables, weights, between, block, band):
    """A band of the second layer of a pair, whose rows are all there.

    What is fetched meanwhile is the next row of the tensor that is added, if it has as many as the input.
    """
    sizes, bands = tables[0][step[TABLE]], tables[1][step[BANDS] : step[BANDS_END]]
    out_base = block * sizes[_OUTPUTS] * sizes[_OUT_PLANE]
    plus, row = arena[max(0, step[PLUS]) :], sizes[_WIDTH] * LANES
    alike = sizes[_INPUTS] == sizes[_OUTPUTS] and sizes[_OUT_PLANE] == sizes[_HEIGHT] * row
    some = (band, band + 1)
    if step[PLUS] < 0 or not alike:
        bands, some = bands[band : band + 1], (0, 1)
    _bands(
        plus, out_base - row, arena[step[OUTPUT] :], out_base, plus, step, tables, weights, between, 0,
        sizes[_OUTPUTS], step[STREAM] != 0, bands, some,
    )  # fmt: skip


@compiled()
def _planes(arena, step, bias, low, high):
    """Planes `low` to `high` of a step that works on each channel of each block by itself."""
    channels, height, width = step[CHANNELS], step[HEIGHT], step[WIDTH]
    plane = height * width * LANES
    kernel, stride = (step[KERNEL_ROWS], step[KERNEL_COLUMNS]), (step[ROW_STRIDE], step[COLUMN_STRIDE])
    for p in range(low, high):
        c = p % channels
        to = step[OUTPUT] + (p // channels * step[OUTPUTS] + step[FIRST] + c) * step[ROWS] * step[COLUMNS] * LANES
        source = step[INPUT] + p * plane
        if step[KIND] == MAX_POOL:
            max_pool_plane(
                arena, source, arena, to, height, width, step[ROWS], step[COLUMNS], kernel, stride,
                (step[TOP], step[LEFT]), step[STREAM] != 0,
            )  # fmt: skip
        elif step[KIND] == MEAN:
            for lane in range(LANES):
                arena[to + lane] = 0.0
            for k in range(0, plane, LANES):
                for lane in range(LANES):
                    arena[to + lane] += arena[source + k + lane]
            for lane in range(LANES):
                arena[to + lane] /= height * width
        elif step[KIND] == AFFINE:
            has_plus = step[PLUS] >= 0
            other = arena[step[PLUS] + p * plane if has_plus else 0 :]
            scale_plane(
                arena[source:], other, arena[to:], 0, plane, bias[step[SCALE] + c], bias[step[BIAS] + c], has_plus,
                step[RELU] != 0, step[STREAM] != 0,
            )  # fmt: skip
        else:
            for k in range(0, plane, LANES):
                copy_vector(arena, to + k, arena, source + k)


@compiled()
def work(arenas, steps, items, tables, weights, all_scratch, all_counters, wide, thread):
    """Take pieces of a crew's work, rows (step, low, high, what must be done before), until there are none."""
    crew = thread % len(arenas)
    arena, counters, scratch = arenas[crew], all_counters[crew], all_scratch[thread]
    number = begin(items, counters)
    while number < len(items):
        item = items[number]
        step = steps[item[0]]
        if step[KIND] == LAYER:
            for piece in range(item[1], item[2]):
                _layer(arena, step, tables, weights, scratch, piece)
        elif step[KIND] == PAIR:
            for block in range(item[1], item[2]):
                _pair(arena, step, steps[item[0] + 1], tables, weights, scratch, block)
        elif step[KIND] == BY_ROWS:
            for image in range(item[1], item[2]):
                image_by_rows(wide, thread, crew, image)
        elif step[KIND] == PACK:
            pixels = step[HEIGHT] * step[WIDTH]
            pack_planes(wide[3][crew], arena, step[OUTPUT], step[CHANNELS], pixels, item[1], item[2])
        else:
            _planes(arena, step, weights[2], item[1], item[2])
        report(counters)
        number = begin(items, counters)


@compiled(parallel=True)
def work_together(arenas, steps, items, tables, weights, all_scratch, all_counters, wide):
    """The same by all threads."""
    for thread in prange(len(all_scratch)):
        work(arenas, steps, items, tables, weights, all_scratch, all_counters, wide, thread)
