"""The loops for the first layers of a batch, compiled by numba: see `driveprune.sparse.wide`."""

from __future__ import annotations

from driveprune.compiled import compiled
from driveprune.sparse.code import LANES
from driveprune.sparse.flat_kernels import piece
from driveprune.sparse.vector import copy_row, transpose


@compiled()
def _copy_planes(target, to, to_plane, source, begin, plane, planes, size):
    """Planes of so many numbers each, from one tensor to another."""
    for p in range(planes):
        here, there = to + p * to_plane, begin + p * plane
        copy_row(target, here, source, there, size // LANES, plane)
        for k in range(size - size % LANES, size):
            target[here + k] = source[there + k]


@compiled()
def image_by_rows(wide, thread, crew, number):
    """All first steps of one of a crew's images."""
    arenas, places, x, between, steps, queues, items, jobs, offsets, masks, values, bias = wide
    arena, first, last = arenas[thread], places[0], places[1]
    start, plane, channels, size = first[0], first[1], first[2], first[3]
    end, end_plane, outputs, out = last[0], last[1], last[2], last[3]
    image = crew * (between.shape[1] // (outputs * out)) + number
    if (image + 1) * channels * size > len(x):  # the last block is not full
        return
    _copy_planes(arena, start, plane, x, image * channels * size, size, channels, size)
    for step in range(len(steps)):
        for item in range(queues[step], queues[step + 1]):
            piece(arena, steps[step], items[item], jobs, offsets, masks, (values, bias))
    _copy_planes(between[crew], number * outputs * out, out, arena, end, end_plane, outputs, out)


@compiled()
def pack_planes(images, target, to, channels, pixels, low, high):
    """Planes `low` to `high` of a blocked tensor, from images that lie one after the other."""
    for p in range(low, high):
        block, c = p // channels, p % channels
        source, begin = (block * LANES * channels + c) * pixels, to + p * pixels * LANES
        for k in range(0, pixels - pixels % LANES, LANES):
            transpose(target, begin + k * LANES, images, source + k, channels * pixels)
        for k in range(pixels - pixels % LANES, pixels):
            for lane in range(LANES):
                target[begin + k * LANES + lane] = images[source + lane * channels * pixels + k]
