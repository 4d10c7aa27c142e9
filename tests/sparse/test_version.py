"""Inference computes with the weights as they are now, however they were changed."""

import copy

import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.sparse.version import Version
from tests.sparse.literal import assert_near, floats, spoken


@pytest.fixture(params=[False, True], ids=["sparse", "filled in"])
def network(request):
    net = spoken(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval())
    found = dp.sparsify(net, {"0.weight": floats(4, 2, 3, 3) > 0}, floats(1, 2, 6, 6), layers="sparse")
    if request.param:
        found.fill_in()
    return found


def check(network):
    expected = dp.densify(network).double()
    with torch.no_grad():
        for count in (1, 5):
            x = floats(count, 2, 6, 6)
            assert_near(network(x), expected(x.double()))


class Old(torch.optim.Optimizer):
    """As optimisers were written once."""

    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.5, fused=True),
        lambda weights: torch.optim.AdamW(weights, lr=0.5, fused=True),
        lambda weights: Old(weights, 0.5),
    ],
)
def test_optimisers_that_do_not_tell_what_they_change(network, make):
    optimizer = make(network.parameters())
    for _ in range(2):
        network(floats(5, 2, 6, 6)).square().sum().backward()
        check(network)
        optimizer.step()
        optimizer.zero_grad()
        check(network)


def test_memory_that_is_used_again(network):
    weight = network.get_parameter("0.weight")
    for _ in range(8):
        weight.data = weight.data + 1
        weight.data = weight.data + 1  # often where the first ones were
        check(network)


def test_copies_made_in_inference_mode(network):
    with torch.inference_mode():
        copied = copy.deepcopy(network)
        before = copied(floats(1, 2, 6, 6))
        assert torch.equal(before, network(floats(1, 2, 6, 6)))
        copied.get_parameter("0.weight").mul_(3)
        assert not torch.equal(before, copied(floats(1, 2, 6, 6)))


def test_a_copy_is_of_no_tensor():
    weight = torch.ones(3)
    version = Version([weight])
    assert version.is_of([weight])
    assert not copy.deepcopy(version).is_of([weight])
