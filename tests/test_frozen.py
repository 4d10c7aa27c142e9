import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from driveprune.frozen import (
    FrozenError,
    Part,
    as_followed,
    is_as_followed,
    is_still,
    lock,
    of_rows,
    snapshot,
    watched,
)


class Net(nn.Module):
    """A network whose code is given to it."""

    factor = 2.0

    def __init__(self, act):
        super().__init__()
        self.act, self.count, self.sizes = act, 0, [1, 2]
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.options = SimpleNamespace(scale=3.0)
        self.dice, self.table = random.Random(0), np.arange(3)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self):
        return self.act(self)


def look(act, leaves=()):
    net = Net(act)
    with watched(net, leaves) as reads:
        net()
    assert type(net) is Net
    return reads


def count(net):
    net.count += 1


def write(net):
    net.mean.add_(1)


def replace(net):
    net.mean = torch.ones(2)


def grow(net):
    net.sizes.append(3)


def train_a_weight(net):
    net.inner[0].weight.data = torch.zeros(2, 2)
    with torch.no_grad():
        net.inner[0].bias.mul_(2)


@pytest.mark.parametrize(("act", "said"), [
    (lambda net: torch.randn(2), "random numbers of torch"),
    (lambda net: random.random(), "random numbers of Python"),
    (lambda net: np.random.rand(), "random numbers of numpy"),
    (lambda net: net.dice.random(), "changes dice at each call"),
    (count, "changes count at each call"), (grow, "changes sizes at each call"), (write, "writes into mean"),
    (replace, "writes into mean"), (train_a_weight, "writes into inner.0.bias"),
    (lambda net: setattr(net, "new", 1), "changes new at each call"),
    (lambda net: setattr(net.inner, "new", 1), "changes inner.new at each call"),
])  # fmt: skip
def test_what_would_be_frozen_is_an_error(act, said):
    with pytest.raises(FrozenError, match=said):
        look(act)


def test_what_is_read_is_written_down_and_methods_are_not():
    reads = look(lambda net: (net.factor, net.options.scale, net.training, net.inner[0].weight, net.forward))
    data = {name for (path, name), value in reads.items() if not path and value != "of the class"}
    assert data == {"act", "factor", "options", "inner"}
    assert reads["", "factor"] == 2.0
    look(lambda net: net.table.sum())


def test_an_error_of_the_networks_code_passes_and_the_class_is_back():
    net = Net(lambda net: 1 / 0)
    with pytest.raises(ZeroDivisionError), watched(net):
        net()
    assert type(net) is Net


@pytest.mark.parametrize(("value", "change"), [
    ([1, [2]], lambda value: value[1].append(3)), ({"a": {"b": 1}}, lambda value: value["a"].update(b=2)),
    (SimpleNamespace(scale=1), lambda value: setattr(value, "scale", 2)), ({1, 2}, lambda value: value.add(3)),
    (torch.zeros(2), lambda value: value.add_(1)),
])  # fmt: skip
def test_a_snapshot_sees_what_changes_inside(value, change):
    before = snapshot(value)
    assert is_still(before, value)
    change(value)
    assert not is_still(before, value)


def test_a_snapshot_tells_other_tensors_and_arrays():
    for value in (torch.zeros(2), np.zeros(2)):
        assert is_still(snapshot(value), value)
        assert not is_still(snapshot(value), value + 1)
        assert not is_still(snapshot([value]), [value + 1])


def test_a_locked_network_refuses_what_was_read():
    net = nn.Sequential(nn.Module())
    net[0].part = nn.Linear(2, 2)
    lock(net, {("0", "scale"): 1.0, ("0.part", "in_features"): 2})
    assert type(net[0]) is Part
    with pytest.raises(AttributeError, match="scale was read when this network was made"):
        net[0].scale = 2.0
    net[0].other = 2.0
    net[0].part.in_features = 3  # a layer of torch's acts by its own numbers
    assert (net[0].other, net[0].part.in_features) == (2.0, 3)


def test_inputs_that_decide():
    assert is_as_followed(None, None)
    assert is_as_followed(True, True)
    assert not is_as_followed(1, True)
    assert not is_as_followed(torch.ones(2), None)
    assert not is_as_followed("a", "b")
    as_followed("a", "kind", "a")
    with pytest.raises(ValueError, match="mask was None in the example .* made with, and is a tensor"):
        as_followed(torch.ones(2), "mask", None)
    of_rows(torch.ones(3), "x", 3)
    with pytest.raises(ValueError, match="x has 2 rows"):
        of_rows(torch.ones(2), "x", 3)
