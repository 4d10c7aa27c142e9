import copy
import random
import re

import pytest
import torch
from torch import nn

from driveprune.alike import CANNOT_RUN, difference
from driveprune.graph import inputs_of
from tests.nets import convnet, images

X = inputs_of(images()[0][:2])


def test_a_copy_is_alike_and_another_network_is_not():
    net = convnet()
    assert difference(net, copy.deepcopy(net), X, training=True) is None
    assert difference(net, convnet(seed=1), X, training=False) == "what is left of it computes something else"


@pytest.mark.parametrize(("dtype", "change", "alike"), [
    (torch.float64, 1e-12, True), (torch.float64, 1e-7, False), (torch.float32, 1e-7, True),
    (torch.float32, 1e-4, False), (torch.bfloat16, 1e-2, True), (torch.bfloat16, 0.5, False),
])  # fmt: skip
def test_rounding_of_the_networks_own_numbers_is_no_difference(dtype, change, alike):
    net = nn.Linear(3, 3).to(dtype)
    other = copy.deepcopy(net).double()
    with torch.no_grad():
        other.weight.mul_(1 + change)
        other.bias.mul_(1 + change)
    assert (difference(net, other, inputs_of(torch.ones(1, 3)), training=False) is None) == alike


def test_what_only_shows_in_training():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    other = nn.Sequential(net[0])
    inputs = inputs_of(torch.ones(4, 3))
    assert difference(net, other, inputs, training=False) is None
    assert difference(net, other, inputs, training=True) is not None


def test_another_shape_is_a_difference():
    class Longer(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, :2]

    net = nn.Linear(3, 3)
    other = Longer(3, 3)
    other.load_state_dict(net.state_dict())
    assert difference(net, other, inputs_of(torch.ones(1, 3)), training=False) is not None


class Own(nn.Module):
    """A layer, and what a function does beside it."""

    def __init__(self, act=lambda net, x: x):
        super().__init__()
        self.a, self.act = nn.Linear(3, 3), act
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.a(self.act(self, x))


def count(net, x):
    net.count += 1
    return x


def into_input(net, x):
    x.add_(1)
    return x - 1


def sometimes(net, x):
    return x + 1 if random.random() < 0.5 else x


def closed(net, x):
    net.a.bias.requires_grad_(False)
    return x


def fails(net, x):
    raise RuntimeError("not today")


@pytest.mark.parametrize(("act", "said"), [
    (count, "its buffer count becomes another one"), (into_input, "it writes into its input"),
    (sometimes, "computes something else"), (fails, "fails .RuntimeError: not today."),
    (closed, "gradient for a.bias"),
])  # fmt: skip
@pytest.mark.parametrize("kept", [None, {}])
def test_what_beside_the_output_may_differ(act, said, kept):
    net, other = Own(), Own(act)
    other.load_state_dict(net.state_dict())
    inputs = inputs_of(torch.ones(2, 3))
    assert re.search(said, difference(net, other, inputs, training=True, kept=kept))


def test_gradients_of_kept_values():
    net = Own()
    kept = torch.rand(3, 3) < 0.5
    kept[0, 0] = True
    with torch.no_grad():
        net.a.weight.mul_(kept)

    class Scaled(Own):
        def forward(self, x):
            weight = self.a.weight
            return nn.functional.linear(x, weight.detach() * 0.5 + weight * 0.5, self.a.bias)

    other = Scaled()
    other.load_state_dict(net.state_dict())
    inputs = inputs_of(torch.ones(2, 3))
    assert "another gradient for a.weight" in difference(net, other, inputs, training=True, kept={"a.weight": kept})
    assert difference(net, other, inputs, training=True) is None  # only whether there are any
    assert difference(net, copy.deepcopy(net), inputs, training=True, kept={"a.weight": kept}) is None


def test_nothing_to_compare_with():
    assert difference(Own(fails), Own(), inputs_of(torch.ones(2, 3)), training=False) == CANNOT_RUN


def test_nan_at_the_same_places_is_no_difference():
    net = Own(lambda net, x: x / torch.tensor([0.0, 1.0, 1.0]) * 0)
    assert difference(net, copy.deepcopy(net), inputs_of(torch.ones(2, 3)), training=True, kept={}) is None
    assert difference(net, Own(), inputs_of(torch.ones(2, 3)), training=False) is not None
