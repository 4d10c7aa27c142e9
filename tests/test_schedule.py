import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driveprune.schedule import cubic, exponential


@given(st.floats(0.001, 0.9999), st.integers(1, 200))
def test_exponential_keeps_the_same_share_at_each_cut(sparsity, cuts):
    path = exponential(sparsity, cuts)
    densities = [1.0, *(1 - s for s in path)]
    shares = [after / before for before, after in itertools.pairwise(densities)]
    assert len(path) == cuts
    assert path[-1] == sparsity
    assert shares == pytest.approx([(1 - sparsity) ** (1 / cuts)] * cuts, rel=1e-9)


@given(st.floats(0.001, 0.9999), st.integers(1, 200))
def test_cubic_rises_to_the_end(sparsity, cuts):
    path = cubic(sparsity, cuts)
    assert list(path) == sorted(path)
    assert path[-1] == sparsity


def test_by_hand():
    assert exponential(0.75, 2) == (0.5, 0.75)
    assert cubic(1 - 1 / 8, 2) == (0.875 * 0.875, 0.875)


@pytest.mark.parametrize("path", [exponential, cubic])
def test_bad_arguments(path):
    with pytest.raises(ValueError, match="number of cuts must be a whole number of at least 1, got 0"):
        path(0.9, 0)
    with pytest.raises(ValueError, match="did you mean 0.9"):
        path(90, 10)
