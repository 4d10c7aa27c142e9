import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driveprune import traced
from driveprune.graph import Inputs, inputs_of


class InPlace(nn.Module):
    """Writes into its tensors in every way that there is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        y += 1
        F.relu(y, inplace=True)
        y.mul_(2)
        torch.relu_(y)
        return self.second(y)


def test_writing_in_place_is_undone():
    net = InPlace()
    found = traced.trace(net)
    x = torch.randn(3, 4)
    assert torch.equal(found(x), net(x))
    values = traced.values(found, inputs_of(x))
    assert not torch.equal(values["first"], values["relu"])  # each node has a value of its own


def test_dropout_follows_train_and_eval():
    class Dropping(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training)

    found = traced.trace(Dropping(), training=True)
    x = torch.ones(100)
    assert torch.equal(found.eval()(x), x)
    assert not torch.equal(found.train()(x), x)


def test_what_cannot_be_traced():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    class Writer(nn.Module):
        def forward(self, x):
            y = x.clone()
            y[0] = 1
            return y

    for net in (Branch(), Writer()):
        with pytest.raises(ValueError, match="torch.fx cannot trace the network, so its channels cannot be followed"):
            traced.trace(net)


def test_live_and_needed():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    mask = {
        "0.weight": torch.tensor([[True, False], [False, False], [True, True]]),
        "2.weight": torch.tensor([[True, True, False], [False, False, False]]),
    }
    found = traced.elements(traced.trace(net), mask, inputs_of(torch.ones(1, 2)))
    assert found["_0"].live.tolist() == [[True, False, True]]
    assert found["_0"].needed.tolist() == [[True, True, False]]
    assert found["_2"].live.tolist() == [[True, False]]


def test_kernels_count_as_a_whole():
    kept = torch.zeros(2, 1, 3, 3, dtype=torch.bool)
    kept[1, 0, 2, 2] = True
    assert traced.by_channels({"w": kept})["w"].flatten(1).sum(1).tolist() == [0, 9]


def test_arguments_by_name_and_default():
    class Two(nn.Module):
        def forward(self, a, b, c=2.0):
            return a * b + c

    found = traced.trace(Two())
    assert traced.arguments(found.graph, inputs_of({"b": 3, "a": 1})) == [1, 3, 2.0]
    assert traced.arguments(found.graph, Inputs((1,), {"c": 5, "b": 3})) == [1, 3, 5]
    with pytest.raises(ValueError, match="lacks the network's input 'b'"):
        traced.arguments(found.graph, inputs_of({"a": 1}))
