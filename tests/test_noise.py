"""Dropout's noise must be torch's own, and so must what is drawn after it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driveprune import noise

PLAIN = nn.Dropout(0.5)


def both(module, *shapes, before=0, seed=0):
    """What torch and we draw for some shapes one after the other, and what is drawn after them."""
    found = []
    for draw in (
        lambda shape: module(torch.ones(shape)),
        lambda shape: noise.dropout_of_ones(module, shape, torch.ones(1)),
    ):
        torch.manual_seed(seed)
        torch.randint(2, (before,))  # one word of the generator each
        found.append([draw(shape) for shape in shapes] + [torch.rand(5), torch.randn(20)])
    return found


def test_this_torch_is_known():
    assert noise._torch_draws_alike()


@settings(max_examples=80, deadline=None)
@given(
    p=st.floats(0.001, 0.999),
    counts=st.lists(st.integers(1, 2_000), min_size=1, max_size=4),
    before=st.integers(0, 1_300),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_numbers_are_torchs(p, counts, before, seed):
    torchs, ours = both(nn.Dropout(p), *[(count,) for count in counts], before=before, seed=seed)
    assert all(torch.equal(a, b) for a, b in zip(torchs, ours, strict=True))


def test_words_are_left_over_as_torch_leaves_them():
    for before in (0, 1, 2, 311, 623, 624, 625):  # an odd word, the last one, none
        for count in (1, 311, 312, 313, 624):
            torchs, ours = both(PLAIN, (count,), before=before)
            assert all(torch.equal(a, b) for a, b in zip(torchs, ours, strict=True)), (before, count)


def test_both_values_are_drawn():
    found = noise.dropout_of_ones(nn.Dropout(0.25), (100, 30), torch.ones(1))
    assert found.shape == (100, 30)
    assert set(found.unique().tolist()) == {0.0, (1 / torch.tensor(0.75)).item()}
    assert abs((found > 0).float().mean() - 0.75) < 0.05


@pytest.mark.parametrize(
    "module", [nn.Dropout(0.0), nn.Dropout(1.0), nn.Dropout(0.5).eval(), nn.Dropout2d(0.5), nn.AlphaDropout(0.5)]
)
def test_other_modules_draw_by_themselves(module):
    torchs, ours = both(module, (4, 3, 2, 2))
    assert all(torch.equal(a, b) for a, b in zip(torchs, ours, strict=True))


def test_other_types_are_torchs():
    torch.manual_seed(0)
    expected = PLAIN(torch.ones(50, dtype=torch.float64))
    torch.manual_seed(0)
    found = noise.dropout_of_ones(PLAIN, (50,), torch.ones(1, dtype=torch.float64))
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)


def test_another_generator_is_noticed(monkeypatch):
    monkeypatch.setattr(noise, "_BITS", 24)  # as if torch drew another number of bits
    noise._torch_draws_alike.cache_clear()
    try:
        assert not noise._torch_draws_alike()
        torchs, ours = both(PLAIN, (500,))
        assert all(torch.equal(a, b) for a, b in zip(torchs, ours, strict=True))
    finally:
        noise._torch_draws_alike.cache_clear()
