"""Sums along a line against numpy, in every width."""

import numba
import numpy as np
import pytest

from driveprune.sparse.line import PAIR_SUMS, SUMS, make_line, ways
from tests.sparse.literal import halves

SIZES = [
    *((vectors, 1) for vectors in range(1, SUMS + 1)),
    *((vectors, 2) for vectors in range(1, PAIR_SUMS // 2 + 1)),
]


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize(("vectors", "outputs"), SIZES)
def test_a_line(vectors, outputs, width):
    line = make_line(vectors, outputs, width=width)

    @numba.njit
    def call(arena, source, offsets, low, high, values, at, targets, masks, place, biases, has_plus, relu):
        weights = offsets, low, high, values, at
        line(arena, source, weights, targets, masks, place, biases, (has_plus, relu))

    size = vectors * width
    offsets = np.array([0, 3, 7, -5, 90, 1, 20, 33, 2, 5, 6, 8], np.int32)
    values, biases = halves(30, 4), (np.float32(0.5), np.float32(-1.5))
    masks = np.where(np.arange(300) % 5 == 2, 0, -1).astype(np.int32)
    source, targets = 10, (1000, 1300, 2000, 2300)
    for low, high in ((0, 0), (4, 12)):  # a multiple of any `ways`
        assert (high - low) % ways(vectors, outputs) == 0
        for has_plus in (False, True):
            for relu in (False, True):
                arena = halves(3000, 1)
                expected = arena.copy()
                for o in range(outputs):
                    total = np.full(size, biases[o])
                    for j in range(low, high):
                        place = source + offsets[j]
                        total += values[5 + (j - low) * outputs + o] * arena[place : place + size]
                    total += has_plus * arena[targets[2 + o] : targets[2 + o] + size]
                    total = np.maximum(total, 0) if relu else total
                    expected[targets[o] : targets[o] + size] = np.where(masks[7 : 7 + size] == 0, 0, total)
                call(arena, source, offsets, low, high, values, 5, targets, masks, 7, biases, has_plus, relu)
                assert np.array_equal(arena, expected)  # halves and quarters: nothing is rounded


def test_what_is_masked_is_zero_even_if_it_is_no_number():
    line = make_line(1, 1, width=4)

    @numba.njit
    def call(arena, offsets, values, masks, biases):
        line(arena, 0, (offsets, 0, 4, values, 0), (8, 8, 8, 8), masks, 0, biases, (False, True))

    arena = np.array([np.nan, 1, np.inf, 2, 0, 0, 0, 0, 9, 9, 9, 9], np.float32)
    masks, ones = np.array([0, -1, 0, -1], np.int32), np.ones(4, np.float32)
    call(arena, np.zeros(4, np.int32), ones, masks, (np.float32(0), np.float32(0)))
    assert arena[8:].tolist() == [0, 4, 0, 8]
