import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import driveprune as dp
from driveprune.mask import kept_count
from driveprune.methods.erk import allocation
from tests.nets import convnet, images

SHAPES = st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=4), min_size=1, max_size=6)


@given(SHAPES, st.floats(0, 0.999))
def test_the_sum_is_exact_and_no_layer_overflows(shapes, sparsity):
    mask = {str(i): torch.ones(shape, dtype=torch.bool) for i, shape in enumerate(shapes)}
    kept = allocation(mask, sparsity)
    assert sum(kept.values()) == kept_count(sum(m.numel() for m in mask.values()), sparsity)
    assert all(0 <= kept[name] <= m.numel() for name, m in mask.items())


def test_by_hand():
    """Shares 30 : 60 of 90 kept weights, no layer full."""
    mask = {"a": torch.ones(10, 20), "b": torch.ones(20, 40)}
    assert allocation(mask, 0.91) == {"a": 30, "b": 60}


def test_what_a_full_layer_cannot_take_goes_to_the_others():
    mask = {"small": torch.ones(2, 2), "a": torch.ones(10, 20), "b": torch.ones(20, 40)}
    assert allocation(mask, 1 - 904 / 1004) == {"small": 4, "a": 200, "b": 700}


def test_densities_follow_the_formula():
    net = convnet()
    kept = dp.prune(net, [images()], method="erk", sparsity=0.9)
    sums = {name: sum(m.shape) for name, m in kept.items()}
    factor = 162 / sum(sums.values())
    for name, mask in kept.items():
        assert int(mask.sum()) == pytest.approx(sums[name] * factor, abs=1)
