import numpy as np
import pytest
import torch
from torch import nn

from driveprune import traced
from driveprune.channels import _matched, follow
from driveprune.graph import inputs_of


def space_of(net, x):
    found = traced.trace(net)
    return follow(found, traced.values(found, inputs_of(x)), traced.depends_on_input(found))


def same(space, first, second) -> bool:
    return np.array_equal(space.roots(first), space.roots(second))


def test_a_chain_of_layers():
    space = space_of(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.ones(1, 4))
    assert same(space, space.tensors["0.weight"][0], space.tensors["2.weight"][1])
    assert same(space, space.tensors["0.weight"][0], space.tensors["0.bias"][0])
    pinned = set(space.pinned_roots())
    assert set(space.roots(space.tensors["0.weight"][1])) <= pinned  # the input
    assert set(space.roots(space.tensors["2.weight"][0])) <= pinned  # the output
    assert not set(space.roots(space.tensors["0.weight"][0])) & pinned


def test_flatten_repeats_and_concatenation_chains():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(1, 2, 1), nn.Conv2d(1, 3, 1), nn.Linear(5 * 4, 2)

        def forward(self, x):
            return self.c(torch.cat([self.a(x), self.b(x)], 1).flatten(1))

    space = space_of(Net(), torch.ones(1, 1, 2, 2))
    chained = np.concatenate([space.tensors["a.weight"][0], space.tensors["b.weight"][0]])
    assert same(space, np.repeat(chained, 4), space.tensors["c.weight"][1])


def test_sums_join_and_tied_weights_are_one():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 4)
            self.d = nn.Linear(4, 4)
            self.d.weight = self.c.weight
            self.e = nn.Linear(4, 1)

        def forward(self, x):
            return self.e(self.d(self.c(self.a(x) + self.b(x))))

    space = space_of(Net(), torch.ones(2, 3))
    assert same(space, space.tensors["a.weight"][0], space.tensors["b.weight"][0])
    assert space.tensors["c.weight"] is space.tensors["d.weight"]
    assert same(space, space.tensors["c.weight"][0], space.tensors["c.weight"][1])


def test_what_is_not_known_pins():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(torch.fft.fft(self.a(x)).real)

    space = space_of(Net(), torch.ones(2, 3))
    assert set(space.roots(space.tensors["a.weight"][0])) <= set(space.pinned_roots())


def test_sizes_that_are_asked_for_and_used_as_numbers_pin():
    class Net(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.a, self.b, self.scale = nn.Linear(3, 4), nn.Linear(4, 2), scale

        def forward(self, x):
            y = self.a(x)
            return self.b(y / y.shape[1] if self.scale else y.view(y.shape[0], y.shape[1]))

    for scale in (True, False):
        space = space_of(Net(scale), torch.ones(2, 3))
        pinned = set(space.roots(space.tensors["a.weight"][0])) <= set(space.pinned_roots())
        assert pinned == scale


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ((2, 3), (2, 3), [([0], [0]), ([1], [1])]),
        ((1, 4, 2, 2), (1, 16), [([0], [0]), ([1, 2, 3], [1])]),
        ((2, 6), (2, 2, 3), [([0], [0]), ([1], [1, 2])]),
        ((2, 3), (6,), [([0, 1], [0])]),
        ((4, 1, 1), (4,), [([0], [0]), ([1, 2], [])]),
        ((4,), (4, 1, 1), [([0], [0]), ([], [1, 2])]),
    ],
)
def test_dimensions_are_matched(before, after, wanted):
    assert _matched(before, after) == wanted
