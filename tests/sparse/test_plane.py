"""Loops over planes against numpy, in every width."""

import numba
import numpy as np
import pytest

from driveprune.sparse import plane
from driveprune.sparse.code import LANES
from tests.sparse.literal import WIDTHS, aligned, halves

ZERO = np.float32(0)


@pytest.mark.parametrize("width", WIDTHS)
def test_loops_return_two_sums(width):
    loop = plane.make_loop(plane._deviations, width=width)

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
    loop = getattr(plane, name)

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
        return plane.scale_relu(a, a, a, out, 0, len(a), one, zero, zero, zero, zero, False)

    a, out = np.array([np.nan, -1, 2, -np.inf, np.inf, 0, -0.0, 3] * 2, np.float32), np.empty(16, np.float32)
    call(a, out, np.float32(1), ZERO)
    assert np.array_equal(out, np.array([np.nan, 0, 2, 0, np.inf, 0, 0, 3] * 2, np.float32), equal_nan=True)
