import copy

import pytest
import torch
from torch import nn

from driveprune.alike import difference
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
