"""Both gradients of a channel from one reading of the slope, against numpy; and what goes back through moments."""

import numba
import numpy as np
import pytest

from driveprune.sparse.both import TOTAL_VECTORS, make_both
from driveprune.sparse.code import LANES
from driveprune.sparse.tile import SPARE, TILE
from driveprune.sparse.vector import CLIPPED, COPIED, SCALED, slope_row
from tests.sparse.literal import WIDTHS, aligned, halves

OFFSETS = (400, 3, 90, 17, 33, 210, 100, 5)
"""Of weights; the second one of two neighbours is replaced by what lies beside the first."""


def both_in_python(offsets, values, inward, outward, count, arrays, base, step, has_plus, source, end, run, width):
    """The docstring of make_both, literally."""
    slope, out, plus, x, sums, before, totals = arrays
    (kind, scale, shift), (clip, has_totals, mean, at) = source, end
    for a in range(TILE // run):
        for b in range(run):
            for lane in range(width):
                to, own = base + outward[a] + b * step + lane, x[base + outward[a] + b * step + lane]
                own = own if kind == COPIED else own * scale + shift
                own = max(own, 0) if kind == CLIPPED else own
                read = [slope[offset + inward[a] + b * width + lane] for offset in offsets]
                total = sum(value * each for value, each in zip(values, read, strict=True))
                total += plus[to] if has_plus else 0
                out[to] = 0 if clip and own <= 0 else total
                if a < count:
                    sums += own * np.array(read)
                    if has_totals:
                        totals[at + lane] += out[to]
                        totals[at + width + lane] += out[to] * (before[to] - mean)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("run", [8, 4, 1])
@pytest.mark.parametrize("bounds", [(0, 2, 8), (0, 0, 7), (1, 5, 6), (0, 4, 4), (2, 2, 4), (3, 3, 3)])
@pytest.mark.parametrize(
    "flags",
    [
        (False, False, False, COPIED),
        (True, True, True, CLIPPED),
        (True, True, False, COPIED),
        (False, False, True, SCALED),
    ],
)
def test_both_gradients_of_a_tile(width, run, bounds, flags):
    has_plus, clip, has_totals, kind = flags
    both = make_both(TILE // run, run, width=width)

    @numba.njit
    def call(slope, offsets, values, inward, outward, counted, out, plus, x, sums, before, totals, scale, mean):
        both(
            slope, offsets, values, bounds, inward, outward, counted, 1, out, 32, 2 * width, plus, has_plus, False,
            x, (kind, scale, scale), sums, (clip, has_totals, before, mean, totals, 5),
        )  # fmt: skip

    stretches, step, low, high = TILE // run, 2 * width, bounds[0], bounds[2]
    count = stretches if stretches == 1 else stretches - 1  # the last stretch is a repetition
    offsets, values = np.array(OFFSETS, np.int32), halves(8, 4)
    offsets[low + 1 : bounds[1] : 2] = offsets[low : bounds[1] : 2] + width
    inward, outward = (np.arange(-1, stretches) * each for each in (run * width, run * step))
    inward[count + 1 :], outward[count + 1 :] = inward[count], outward[count]
    counted = np.array([0, *[1] * count, *[0] * (stretches - count)], np.float32)
    slope, plus, x, before = (halves(size, seed) for size, seed in ((700, 1), (400, 2), (400, 3), (400, 5)))
    out, sums, totals = aligned(halves(400, 6)), halves(8 + SPARE, 7), halves(100, 8)
    expected, expected_sums, expected_totals = out.copy(), sums.copy(), totals.copy()
    arrays = slope, expected, plus, x, expected_sums[low:high], before, expected_totals
    both_in_python(
        offsets[low:high], values[low:high], inward[1:], outward[1:], count, arrays, 32, step, has_plus,
        (kind, 0.5, 0.5), (clip, has_totals, 1.5, 5), run, width,
    )  # fmt: skip
    given = slope, offsets, values, inward, outward, counted, out, plus, x, sums, before, totals
    call(*given, np.float32(0.5), np.float32(1.5))
    assert np.array_equal(out, expected)  # halves, quarters and eighths: nothing is rounded
    assert np.array_equal(sums, expected_sums)
    assert np.array_equal(totals, expected_totals)
    assert (has_totals and (has_plus or low < high)) == (not np.array_equal(totals, halves(100, 8)))
    assert TOTAL_VECTORS == 2


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_gradient_before_a_normalisation(count):
    @numba.njit
    def call(target, source, other, scale, mean, first, second):
        slope_row(target, 3, source, 5, count, 64, other, scale, mean, first, second)

    target, source, other = (halves(300, seed) for seed in (1, 2, 3))
    expected = target.copy()
    some = slice(5, 5 + count * LANES)
    expected[3 : 3 + count * LANES] = 0.5 * (source[some] - 1.5 - (other[some] - 2.0) * 0.25)
    call(target, source, other, *map(np.float32, (0.5, 2.0, 1.5, 0.25)))
    assert np.array_equal(target, expected)
