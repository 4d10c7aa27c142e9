"""Single vectors and rows of them, against numpy."""

import numba
import numpy as np
import pytest

from driveprune.sparse import code, vector
from driveprune.sparse.code import LANES
from tests.sparse.literal import WIDTHS, halves


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


@pytest.mark.parametrize("count", [0, 1, 3, 4, 11])
@pytest.mark.parametrize("relu", [False, True])
def test_a_row_is_normalised_and_nothing_else(count, relu):
    @numba.njit
    def call(target, one, source, scale, shift):
        vector.scale_row(target, 5, source, 17, count, 1_000_000, scale, shift, relu)
        vector.scale_vector(one, 3, source, 17, scale, shift, relu)

    source, target, one = halves(200, 1), halves(200, 2), halves(40, 3)
    expected, expected_one = target.copy(), one.copy()
    scaled = -1.5 * source[17:] + 0.5
    scaled = np.maximum(scaled, 0) if relu else scaled
    expected[5 : 5 + count * LANES], expected_one[3 : 3 + LANES] = scaled[: count * LANES], scaled[:LANES]
    call(target, one, source, np.float32(-1.5), np.float32(0.5))
    assert np.array_equal(target, expected)
    assert np.array_equal(one, expected_one)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_numbers_are_dealt_in_turn(count):
    deal = vector.make_deal(count)

    @numba.njit
    def call(target, evens, odds, source, begin):
        deal(target, evens, odds, source, begin)

    source, target = halves(100, 1), halves(100, 2)
    expected = target.copy()
    expected[7 : 7 + count], expected[50 : 50 + count] = source[3 : 3 + 2 * count].reshape(-1, 2).T
    call(target, 7, 50, source, 3)
    assert np.array_equal(target, expected)
    expected[50 : 50 + count] = source[3 : 3 + 2 * count : 2]
    call(target, 50, 50, source, 3)
    assert np.array_equal(target, expected)


def test_a_square_of_vectors_is_turned():
    @numba.njit
    def call(target, to, source, begin, apart):
        vector.transpose(target, to, source, begin, apart)

    apart = LANES + 3
    source, target = halves(5 + LANES * apart, 1), halves(LANES * LANES + 9, 2)
    expected = target.copy()
    rows = source[5:].reshape(LANES, apart)[:, :LANES]
    expected[4 : 4 + LANES * LANES] = rows.T.reshape(-1)
    call(target, 4, source, 5, apart)
    assert np.array_equal(target, expected)


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


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_windows_of_two_by_two(count):
    halve = vector.make_halve(count)

    @numba.njit
    def call(target, source):
        halve(target, 1, source, 3, 50)

    source, target = halves(100, 1), halves(2 * count, 2)
    source[5], source[52] = np.nan, np.nan
    before = target.copy()
    call(target, source)
    windows = np.stack([source[begin : begin + 2 * count].reshape(count, 2) for begin in (3, 50)])
    assert np.array_equal(target[1 : count + 1], windows.max((0, 2)), equal_nan=True)
    assert np.isnan(target[2])
    assert np.array_equal(target[count + 1 :], before[count + 1 :])
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
