"""Sums over whole rows against their definition, in every width."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driveprune.sparse.rows import SIDES, TILE, make_rows
from tests.sparse.literal import halves

CALLS = {}


def call_of(across, width):
    """A compiled call."""
    if (across, width) not in CALLS:
        rows = make_rows(across, width=width)

        @numba.njit
        def call(arena, source, weights, bounds, to, plus, bias, flags):
            rows(arena, source, weights, bounds, to, plus, bias, flags)

        CALLS[across, width] = call
    return CALLS[across, width]


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("across", [1, 2, 4, 8])
@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 5), min_size=3, max_size=3), st.integers(0, 3), st.booleans(), st.booleans(),
    st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_a_tile_of_rows(across, width, counts, begin, has_sums, has_plus, relu, seed):
    size, row = TILE * width, across * width
    arena, values, bias = halves(6 * size, seed), halves(40, seed + 1), np.float32(0.5)
    offsets = np.random.default_rng(seed).integers(-size, size, 30).astype(np.int32)
    source, at, to, plus = 2 * size, 3, 4 * size, 5 * size
    bounds = tuple(begin + sum(counts[:n]) for n in range(4))
    expected = arena.astype(np.float64)
    for t in range(size):
        total = arena[to + t] if has_sums else bias
        for n, side in enumerate(SIDES):
            if 0 <= t % row + side < row:  # what is beside a row is zero
                total += sum(
                    values[at + j] * arena[source + offsets[j] + t + side] for j in range(*bounds[n : n + 2])
                )
        total += arena[plus + t] if has_plus else 0
        expected[to + t] = max(total, 0) if relu else total
    call_of(across, width)(arena, source, (offsets, values, at), bounds, to, plus, bias, (has_sums, has_plus, relu))
    assert np.array_equal(arena, expected)  # halves and quarters: nothing is rounded
