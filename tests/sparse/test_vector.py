"""The vector instructions against numpy, in every width."""

import numba
import numpy as np
import pytest
import torch

from driveprune.sparse import code, vector
from driveprune.sparse.code import LANES
from driveprune.sparse.vector import FROM_BIAS, FROM_BIAS_AND_PLUS, FROM_OUTPUT, TILE, make_products, make_tile
from tests.sparse.literal import halves

WIDTHS = (4, 8, 16)
ZERO = np.float32(0)


def aligned(array):
    """A copy at an address that is a multiple of any vector's size."""
    return torch.from_numpy(array).clone().numpy()


def tile_in_python(x, offsets, values, inward, outward, out, start, bias, plus, relu, run, width, step):
    """The docstring of make_tile, literally."""
    for a in range(TILE // run):
        for b in range(run):
            for lane in range(width):
                to = outward[a] + b * step + lane
                total = {FROM_OUTPUT: out[to], FROM_BIAS: bias, FROM_BIAS_AND_PLUS: bias + plus[to]}[start]
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
    def call(x, offsets, values, bounds, inward, outward, out, step, start, bias, plus, relu):
        tile(x, offsets, values, bounds, inward, outward, 0, out, 0, step, start, bias, plus, relu, stream)

    x, plus, before = halves(500, 1), halves(1000, 2), halves(1000, 3)
    offsets, values = np.array([400, 3, 3 + width, 90, 17, 500], np.int32), halves(6, 4)
    stretches, step = TILE // run, 2 * width
    inward = np.arange(stretches, dtype=np.int64)[::-1].copy() * run * width
    outward = np.arange(stretches, dtype=np.int64) * run * step
    for start in (FROM_OUTPUT, FROM_BIAS, FROM_BIAS_AND_PLUS):
        for relu in (False, True):
            found, expected = aligned(before), before.copy()
            call(x, offsets, values, (1, 3, 5), inward, outward, found, step, start, np.float32(0.5), plus, relu)
            tile_in_python(
                x, offsets[1:-1], values[1:-1], inward, outward, expected, start, 0.5, plus, relu, run, width, step
            )
            assert np.array_equal(found, expected)  # halves and quarters: nothing is rounded
            assert not np.array_equal(found, before)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("bounds", [(0, 4, 5), (0, 0, 3), (1, 5, 5), (2, 2, 2)])
def test_a_small_tile_takes_several_weights_at_once(width, ways, bounds):
    tile = make_tile(1, 4, width=width, ways=ways)

    @numba.njit
    def call(x, offsets, values, bounds, inward, outward, out, step, start, bias, plus):
        tile(x, offsets, values, bounds, inward, outward, 0, out, 0, step, start, bias, plus, False, False)

    x, before = halves(700, 1), halves(400, 2)
    offsets, values = np.array([400, 3, 500, 90, 17], np.int32), halves(5, 3)
    found, expected, step = before.copy(), before.copy(), 2 * width
    where = np.zeros(1, np.int64)
    call(x, offsets, values, bounds, where, where, found, step, FROM_BIAS, np.float32(0.5), before)
    for t in range(4):
        places = t * width + np.arange(width)
        weights = range(bounds[0], bounds[2])
        expected[t * step : t * step + width] = 0.5 + sum(values[j] * x[offsets[j] + places] for j in weights)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 11])
def test_a_row_is_copied_and_nothing_else(count):
    @numba.njit
    def call(target, to, source, begin, count, ahead):
        vector.copy_row(target, to, source, begin, count, ahead)

    source, target = halves(200, 1), halves(200, 2)
    expected = target.copy()
    expected[5 : 5 + count * LANES] = source[17 : 17 + count * LANES]
    call(target, 5, source, 17, count, 1_000_000)  # looking ahead beyond the end does no harm
    assert np.array_equal(target, expected)


def test_every_other_number():
    @numba.njit
    def call(target, to, source, begin):
        vector.every_other(target, to, source, begin)

    source, target = halves(100, 1), halves(100, 2)
    expected = target.copy()
    expected[7 : 7 + LANES] = source[3 : 3 + 2 * LANES : 2]
    call(target, 7, source, 3)
    assert np.array_equal(target, expected)


def test_a_tile_without_weights_is_its_start():
    tile = make_tile(1, 8)

    @numba.njit
    def call(x, offsets, values, bounds, where, out, bias):
        tile(x, offsets, values, bounds, where, where, 0, out, 0, LANES, FROM_BIAS, bias, out, False, False)

    out = np.zeros(TILE * LANES, np.float32)
    call(out, np.zeros(1, np.int32), np.ones(1, np.float32), (0, 0, 0), np.zeros(1, np.int64), out, np.float32(1.5))
    assert (out == 1.5).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("run", [8, 4, 1])
def test_products_count_each_stretch_once(width, run):
    products = make_products(TILE // run, run, width=width)

    @numba.njit
    def call(x, offsets, inward, outward, counted, slope, step, sums):
        products(x, offsets, 4, 8, inward, outward, counted, 0, slope, 0, step, sums)

    stretches = TILE // run
    x, slope = halves(600, 1), halves(600, 2)
    offsets = np.array([9, 9, 9, 9, 0, 5, 31, 200], np.int32)
    inward = outward = np.arange(stretches, dtype=np.int64) * run * width
    counted = np.array([1] * max(1, stretches - 1) + [0] * 8, np.float32)
    sums = halves(8, 3)
    expected = sums.copy()
    for j in range(4, 8):
        for a in range(max(1, stretches - 1)):
            k = inward[a] + np.arange(run * width)
            expected[j] += (x[offsets[j] + k] * slope[k]).sum()
    call(x, offsets, inward, outward, counted, slope, width, sums)
    assert np.array_equal(sums, expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_loops_return_two_sums(width):
    loop = vector.make_loop(vector._deviations, width=width)

    @numba.njit
    def call(a, base, count, s):
        return loop(a, a, a, a, base, count, s, s, s, s, s, False)

    a = halves(96, 1)
    total, squares = call(a, 16, 64, np.float32(0.5))
    assert total == (a[16:80] - 0.5).sum()
    assert squares == ((a[16:80] - 0.5) ** 2).sum()
    assert call(a, 16, 0, np.float32(0.5)) == (0.0, 0.0)


def clipped(condition, value):
    return np.where(condition > 0, value, ZERO)


LOOPS = {
    "scale": lambda a, b, c, s: (a * s[0] + s[1], 0, 0),
    "scale_relu": lambda a, b, c, s: (clipped(a * s[0] + s[1], a * s[0] + s[1]), 0, 0),
    "scale_plus": lambda a, b, c, s: (a * s[0] + s[1] + b, 0, 0),
    "scale_plus_relu": lambda a, b, c, s: (clipped(a * s[0] + s[1] + b, a * s[0] + s[1] + b), 0, 0),
    "slope_sums": lambda a, b, c, s: (None, a.sum(), (a * (b - s[2])).sum()),
    "slope_sums_input": lambda a, b, c, s: (
        None, clipped(b * s[0] + s[1], a).sum(), clipped(b * s[0] + s[1], a * (b - s[2])).sum(),
    ),
    "slope_sums_output": lambda a, b, c, s: (clipped(c, a), clipped(c, a).sum(), clipped(c, a * (b - s[2])).sum()),
    "slope_apply": lambda a, b, c, s: (s[0] * (a - s[3] - (b - s[2]) * s[4]), 0, 0),
    "slope_apply_input": lambda a, b, c, s: (
        s[0] * (clipped(b * s[0] + s[1], a) - s[3] - (b - s[2]) * s[4]), 0, 0,
    ),
    "sum_slope": lambda a, b, c, s: (None, a.sum(), 0),
    "clip_slope": lambda a, b, c, s: (clipped(c, a), clipped(c, a).sum(), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("stream", [False, True])
def test_elementwise_loops(name, stream):
    loop = getattr(vector, name)

    @numba.njit
    def call(a, b, c, out, base, count, s):
        return loop(a, b, c, out, base, count, s[0], s[1], s[2], s[3], s[4], stream)

    count = 3 * LANES
    a, b, c, s = halves(80, 1), halves(80, 2), halves(80, 3), np.array([2, -0.5, 0.5, 1.5, 0.25], np.float32)
    out = aligned(np.full(80, 7, np.float32))
    part = slice(LANES, LANES + count)
    sums = call(a, b, c, out, LANES, count, s)
    expected, *totals = LOOPS[name](a[part], b[part], c[part], s)
    assert list(sums) == totals
    assert np.array_equal(out[part], np.full(count, 7, np.float32) if expected is None else expected)
    assert (np.delete(out, np.r_[part]) == 7).all()


def test_relu_lets_nan_pass():
    @numba.njit
    def call(a, out, one, zero):
        return vector.scale_relu(a, a, a, out, 0, len(a), one, zero, zero, zero, zero, False)

    a, out = np.array([np.nan, -1, 2, -np.inf, np.inf, 0, -0.0, 3] * 2, np.float32), np.empty(16, np.float32)
    call(a, out, np.float32(1), ZERO)
    assert np.array_equal(out, np.array([np.nan, 0, 2, 0, np.inf, 0, 0, 3] * 2, np.float32), equal_nan=True)


def test_copies_zeros_and_the_larger():
    @numba.njit
    def call(target, source):
        vector.copy_vector(target, 0, source, 1)
        vector.clear_vector(target, LANES)
        vector.max_vector(target, 2 * LANES, source, 0)

    source, target = halves(4 * LANES, 1), halves(4 * LANES, 2)
    source[3], target[2 * LANES + 1] = np.nan, np.nan
    before = target.copy()
    call(target, source)
    assert np.array_equal(target[:LANES], source[1 : LANES + 1], equal_nan=True)
    assert not target[LANES : 2 * LANES].any()
    expected = np.maximum(before[2 * LANES : 3 * LANES], source[:LANES])
    assert np.array_equal(target[2 * LANES : 3 * LANES], expected, equal_nan=True)
    assert np.array_equal(target[3 * LANES :], before[3 * LANES :])


def test_windows_of_two_by_two():
    @numba.njit
    def call(target, source):
        vector.halve_vectors(target, 1, source, 3, 50)

    source, target = halves(100, 1), halves(2 * LANES, 2)
    source[5], source[52] = np.nan, np.nan
    before = target.copy()
    call(target, source)
    windows = np.stack([source[begin : begin + 2 * LANES].reshape(LANES, 2) for begin in (3, 50)])
    assert np.array_equal(target[1 : LANES + 1], windows.max((0, 2)), equal_nan=True)
    assert np.isnan(target[2])
    assert np.array_equal(target[LANES + 1 :], before[LANES + 1 :])
    assert target[0] == before[0]


def test_a_gradient_is_routed_once():
    @numba.njit
    def call(slopes, best, source, target):
        for place in range(0, len(source), LANES):
            vector.route_vector(slopes, 0, best, 0, source, place, target)

    source = np.tile(np.array([1, 3, 3, 2], np.float32).repeat(LANES), 1)
    best, slopes = np.full(LANES, 3, np.float32), np.arange(1, LANES + 1, dtype=np.float32)
    target = np.zeros(4 * LANES, np.float32)
    call(slopes, best, source, target)
    assert np.array_equal(target.reshape(4, LANES).sum(1), [0, LANES * (LANES + 1) / 2, 0, 0])
    assert not slopes.any()


def test_the_width_is_one_that_is_known():
    assert code.lanes() in WIDTHS
    assert code.lanes() == LANES
