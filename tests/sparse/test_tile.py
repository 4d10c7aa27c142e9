"""The innermost loops of convolutions against numpy, in every width."""

import numba
import numpy as np
import pytest

from driveprune.sparse.code import LANES
from driveprune.sparse.tile import SPARE, TILE, make_products, make_sums, make_tile, make_windows
from tests.sparse.literal import WIDTHS, aligned, halves


def tile_in_python(x, offsets, values, inward, outward, out, bias, plus, has_plus, relu, run, width, step):
    """The docstring of make_tile, literally."""
    for a in range(TILE // run):
        for b in range(run):
            for lane in range(width):
                to = outward[a] + b * step + lane
                total = bias + (plus[to] if has_plus else 0)
                total += sum(
                    value * x[offset + inward[a] + b * width + lane]
                    for offset, value in zip(offsets, values, strict=True)
                )
                out[to] = max(total, 0) if relu else total


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("run", [8, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tile(width, run, stream):
    tile = make_tile(TILE // run, run, width=width)

    @numba.njit
    def call(x, offsets, values, bounds, inward, outward, out, step, bias, plus, has_plus, relu):
        tile(x, offsets, values, bounds, inward, outward, 0, out, 0, step, bias, plus, has_plus, relu, stream)

    x, plus, before = halves(500, 1), halves(1000, 2), halves(1000, 3)
    offsets, values = np.array([400, 3, 3 + width, 90, 17, 500], np.int32), halves(6, 4)
    stretches, step = TILE // run, 2 * width
    inward = np.arange(stretches, dtype=np.int64)[::-1].copy() * run * width
    outward = np.arange(stretches, dtype=np.int64) * run * step
    for has_plus in (False, True):
        for relu in (False, True):
            found, expected = aligned(before), before.copy()
            call(x, offsets, values, (1, 3, 5), inward, outward, found, step, np.float32(0.5), plus, has_plus, relu)
            tile_in_python(
                x, offsets[1:-1], values[1:-1], inward, outward, expected, 0.5, plus, has_plus, relu, run, width, step
            )
            assert np.array_equal(found, expected)  # halves and quarters: nothing is rounded
            assert not np.array_equal(found, before)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("bounds", [(0, 4, 5), (0, 0, 3), (1, 5, 5), (2, 2, 2)])
def test_a_small_tile_takes_several_weights_at_once(width, ways, bounds):
    tile = make_tile(1, 4, width=width, ways=ways)

    @numba.njit
    def call(x, offsets, values, bounds, inward, outward, out, step, bias):
        tile(x, offsets, values, bounds, inward, outward, 0, out, 0, step, bias, out, False, False, False)

    x, before = halves(700, 1), halves(400, 2)
    offsets, values = np.array([400, 3, 500, 90, 17], np.int32), halves(5, 3)
    found, expected, step = before.copy(), before.copy(), 2 * width
    where = np.zeros(1, np.int64)
    call(x, offsets, values, bounds, where, where, found, step, np.float32(0.5))
    for t in range(4):
        places = t * width + np.arange(width)
        weights = range(bounds[0], bounds[2])
        expected[t * step : t * step + width] = 0.5 + sum(values[j] * x[offsets[j] + places] for j in weights)
    assert np.array_equal(found, expected)


def test_a_tile_without_weights_is_its_start():
    tile = make_tile(1, 8)

    @numba.njit
    def call(x, offsets, values, bounds, where, out, bias):
        tile(x, offsets, values, bounds, where, where, 0, out, 0, LANES, bias, out, False, False, False)

    out = np.zeros(TILE * LANES, np.float32)
    call(out, np.zeros(1, np.int32), np.ones(1, np.float32), (0, 0, 0), np.zeros(1, np.int64), out, np.float32(1.5))
    assert (out == 1.5).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("stretches", "run", "ways"), [(1, 8, 1), (2, 4, 1), (8, 1, 1), (1, 4, 2)])
@pytest.mark.parametrize("has_sums", [False, True])
def test_products_are_added_to_sums_that_lie_side_by_side(width, stretches, run, ways, has_sums):
    add = make_sums(stretches, run, width=width, ways=ways)

    @numba.njit
    def call(x, bias, offsets, values, inward):
        add(x, 900, has_sums, bias, offsets, values, (1, 3, 5), inward, 2)

    x, values = halves(1100, 1), halves(6, 2)
    offsets = np.array([9, 30, 30 + width, 4, 77, 9], np.int32)
    inward = np.array([0, 0, *range(0, 40 * stretches, 40)], np.int64)
    expected = x.copy()
    sums = expected[900 : 900 + stretches * run * width].reshape(stretches, run * width)
    sums[:] = sums if has_sums else 0.5
    for j in range(1, 5):
        for a in range(stretches):
            sums[a] += values[j] * x[offsets[j] + inward[2 + a] :][: run * width]
    call(x, np.float32(0.5), offsets, values, inward)
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("run", [8, 4, 1])
@pytest.mark.parametrize(
    "bounds", [(4, 4, 8), (1, 1, 2), (1, 1, 3), (1, 1, 4), (0, 2, 7), (0, 4, 5), (0, 6, 6), (3, 3, 3)]
)
@pytest.mark.parametrize("repeated", [0, 1])
def test_products_count_each_stretch_once(width, run, bounds, repeated):
    products = make_products(TILE // run, run, width=width)

    @numba.njit
    def call(x, offsets, inward, outward, counted, slope, step, sums):
        products(x, offsets, bounds, inward, outward, counted, 0, slope, 0, step, sums)

    stretches = TILE // run
    count = max(1, stretches - repeated)
    x, slope = halves(600, 1), halves(600, 2)
    offsets = np.array([9, 9 + width, 7, 7 + width, 30, 30 + width, 31, 200], np.int32)
    inward = outward = np.arange(stretches, dtype=np.int64) * run * width
    counted = np.array([1] * count + [0] * 8, np.float32)
    sums = halves(8 + SPARE, 3)
    expected = sums.copy()
    for j in range(bounds[0], bounds[2]):
        for a in range(count):
            k = inward[a] + np.arange(run * width)
            expected[j] += (x[offsets[j] + k] * slope[k]).sum()
    call(x, offsets, inward, outward, counted, slope, width, sums)
    assert np.array_equal(sums, expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_sums", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_the_largest_sums_of_windows(width, has_sums, relu):
    windows = make_windows(width)

    @numba.njit
    def call(x, offsets, values, inward, outward, out, step, bias):
        windows(
            x, 700, has_sums, bias, offsets, values, (1, 3, 5), inward, outward, 2, out, 5, step, relu, False,
        )  # fmt: skip

    x, out, values = halves(1000, 1), halves(200, 2), halves(6, 3)
    offsets = np.array([9, 30, 30 + width, 4, 77, 9], np.int32)
    inward, outward = np.array([0, 0, 40, 250], np.int64), np.array([0, 0, 16, 99], np.int64)
    sums = np.full((2, 4, width), 0.5, np.float32) + (
        x[700 : 700 + 8 * width].reshape(2, 4, width) if has_sums else 0
    )
    for j in range(1, 5):
        sums += values[j] * np.stack([x[offsets[j] + inward[2 + a] :][: 4 * width] for a in range(2)]).reshape(
            sums.shape
        )
    best = sums.reshape(2, 2, 2, width).max((0, 2))
    expected = out.copy()
    for number in range(2):
        place = 5 + 16 + number * 2 * width
        expected[place : place + width] = np.maximum(best[number], 0) if relu else best[number]
    call(x, offsets, values, inward, outward, out, 2 * width, np.float32(0.5))
    assert np.array_equal(out, expected)
