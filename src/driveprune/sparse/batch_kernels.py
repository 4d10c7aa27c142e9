"""The loops for inference of a batch, compiled by numba: see `driveprune.sparse.batch`."""

from __future__ import annotations

from numba import prange

from driveprune.compiled import compiled
from driveprune.sparse.code import LANES
from driveprune.sparse.kernels import as_it_is, correlate_blocks, no_moments
from driveprune.sparse.plane_kernels import max_pool_plane, scale_plane
from driveprune.sparse.team import report, take, wait
from driveprune.sparse.tiling import SIZES
from driveprune.sparse.vector import copy_vector

LAYER, AFFINE, MAX_POOL, MEAN, COPY = range(5)

FIELDS = {
    name: number
    for number, name in enumerate(
        (
            "kind", "input", "output", "plus", "relu", "stream", "channels", "height", "width", "rows", "columns",
            "kernel_rows", "kernel_columns", "row_stride", "column_stride", "top", "left", "first", "outputs", "bias",
            "scale", "first_block", "parts", "sizes", "bands", "bands_end", "runs", "runs_end", "tiles", "tiles_end",
            "starts", "starts_end", "offsets", "offsets_end", "weights", "weights_end",
        )
    )
}  # fmt: skip
(
    KIND, INPUT, OUTPUT, PLUS, RELU, STREAM, CHANNELS, HEIGHT, WIDTH, ROWS, COLUMNS, KERNEL_ROWS, KERNEL_COLUMNS,
    ROW_STRIDE, COLUMN_STRIDE, TOP, LEFT, FIRST, OUTPUTS, BIAS, SCALE, FIRST_BLOCK, PARTS, TABLE, BANDS, BANDS_END,
    RUNS, RUNS_END, TILES, TILES_END, STARTS, STARTS_END, OFFSETS, OFFSETS_END, WEIGHTS, WEIGHTS_END,
) = FIELDS.values()  # fmt: skip

_INPUTS, _HEIGHT, _WIDTH, _OUTPUTS, _OUT_PLANE, _BLOCKS = (
    SIZES[name] for name in ("inputs", "height", "width", "outputs", "out_plane", "blocks")
)


@compiled()
def _layer(arena, step, tables, weights, scratch, piece):
    """One piece of a layer: some blocks of images, and a part of the outputs."""
    all_sizes, all_bands, all_runs, all_inward, all_outward, all_starts = tables
    offsets, values, bias = weights
    sizes = all_sizes[step[TABLE]]
    tiles, kept = slice(step[TILES], step[TILES_END]), slice(step[WEIGHTS], step[WEIGHTS_END])
    blocks, outputs, parts = sizes[_BLOCKS], sizes[_OUTPUTS], step[PARTS]
    block = step[FIRST_BLOCK] + piece // parts * blocks
    low, high = piece % parts * outputs // parts, (piece % parts + 1) * outputs // parts
    has_plus = step[PLUS] >= 0
    correlate_blocks(
        arena[step[INPUT] :], block * sizes[_INPUTS] * sizes[_HEIGHT] * sizes[_WIDTH] * LANES, arena[step[OUTPUT] :],
        block * outputs * sizes[_OUT_PLANE], arena[step[PLUS] if has_plus else 0 :], values[kept],
        bias[step[BIAS] : step[BIAS] + outputs], low, high, sizes, all_bands[step[BANDS] : step[BANDS_END]],
        all_runs[step[RUNS] : step[RUNS_END]], all_inward[tiles], all_outward[tiles],
        all_starts[step[STARTS] : step[STARTS_END]], offsets[step[OFFSETS] : step[OFFSETS_END]], scratch,
        has_plus, step[RELU] != 0, step[STREAM] != 0,
        as_it_is(arena), no_moments(arena),
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
def work(arenas, steps, items, tables, weights, all_scratch, all_counters, thread):
    """Take pieces of a crew's work, rows (step, low, high, what must be done before), until there are none."""
    crew = thread % len(arenas)
    arena, counters, scratch = arenas[crew], all_counters[crew], all_scratch[thread]
    while True:
        number = take(counters)
        if number >= len(items):
            return
        item = items[number]
        step = steps[item[0]]
        wait(counters, item[3])
        if step[KIND] == LAYER:
            for piece in range(item[1], item[2]):
                _layer(arena, step, tables, weights, scratch, piece)
        else:
            _planes(arena, step, weights[2], item[1], item[2])
        report(counters)


@compiled(parallel=True)
def work_together(arenas, steps, items, tables, weights, all_scratch, all_counters):
    """The same by all threads."""
    for thread in prange(len(all_scratch)):
        work(arenas, steps, items, tables, weights, all_scratch, all_counters, thread)
