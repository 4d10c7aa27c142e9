"""Tiles that find the moments of their sums on the way, against numpy."""

import numba
import numpy as np
import pytest

from driveprune.sparse.code import LANES
from driveprune.sparse.ends import MOMENT_VECTORS, make_tile_with_moments
from driveprune.sparse.plane_kernels import join_moments
from tests.sparse.literal import WIDTHS, aligned, halves


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("stretches", "run"), [(1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("has_sums", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tile_and_its_moments(width, stretches, run, has_sums, stream):
    tile = make_tile_with_moments(stretches, run, width=width)

    @numba.njit
    def call(x, bias, offsets, values, inward, outward, counted, out, moments, is_first):
        tile(
            x, 800, has_sums, bias, offsets, values, (1, 3, 5), inward, outward, counted, 2, out, 32, 2 * width,
            stream, moments, 3, is_first,
        )  # fmt: skip

    x, values = halves(1000, 1), halves(6, 2)
    offsets = np.array([9, 30, 30 + width, 4, 77, 9], np.int32)
    inward = np.array([0, 0, *range(0, 40 * stretches, 40)], np.int64)
    outward = np.array([0, 0, *range(0, 2 * run * width * stretches, 2 * run * width)], np.int64)
    count = max(1, stretches - 1)
    counted = np.array([0, 0] + [1] * count + [0] * (stretches - count), np.float32)
    out, moments = aligned(halves(500, 3)), halves(200, 4)
    sums = np.full((stretches, run, width), 0.5, np.float32)
    if has_sums:
        sums = x[800 : 800 + sums.size].reshape(sums.shape).copy()
    for j in range(1, 5):
        for a in range(stretches):
            sums[a] += values[j] * x[offsets[j] + inward[2 + a] :][: run * width].reshape(run, width)
    expected, expected_moments = out.copy(), moments.copy()
    for t, vector in enumerate(sums.reshape(-1, width)):
        expected[32 + 2 * t * width :][:width] = vector
    three = expected_moments[3 : 3 + MOMENT_VECTORS * width].reshape(MOMENT_VECTORS, width)
    for number in range(2):  # the first tile, then another one with the same sums
        call(x, np.float32(0.5), offsets, values, inward, outward, counted, out, moments, number == 0)
        apart = sums[:count] - sums[0, 0]
        three[0] = sums[0, 0]
        three[1] = apart.sum((0, 1)) * (number + 1)
        three[2] = (apart * apart).sum((0, 1)) * (number + 1)
        assert np.array_equal(out, expected)
        assert np.array_equal(moments, expected_moments)  # halves and quarters: nothing is rounded


@pytest.mark.parametrize("last", [1, 3, LANES])
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_moments_are_joined(last, far):
    """Images that are none do not count; a mean that is large beside the deviation does no harm."""
    rng = np.random.default_rng(0)
    blocks, channels, pixels = 3, 2, 50
    numbers = (far + rng.standard_normal((blocks, channels, pixels, LANES))).astype(np.float32)
    shift = numbers[:, :, :1]
    apart = numbers - shift
    sums = np.stack([shift[:, :, 0], apart.sum(2), (apart * apart).sum(2)], 2).reshape(-1)
    images = numbers.transpose(1, 0, 3, 2).reshape(channels, -1, pixels)[:, : (blocks - 1) * LANES + last]
    for c in range(channels):
        mean, variance = join_moments(sums, c, blocks, channels, pixels, last)
        assert mean == pytest.approx(images[c].mean(dtype=np.float64), rel=1e-7, abs=1e-7)
        assert variance == pytest.approx(images[c].var(dtype=np.float64), rel=1e-5)
