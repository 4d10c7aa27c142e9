import torch
from torch import nn

from driveprune import traced
from driveprune.graph import inputs_of
from driveprune.zeros import other_than_zero


def flags(net, mask, x):
    found = traced.trace(net)
    return other_than_zero(found, mask, traced.values(found, inputs_of(x)))


def test_zeros_follow_kept_weights_and_end_at_biases():
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    mask = {
        "0.weight": torch.tensor([[True, False], [False, False], [False, False]]),
        "2.weight": torch.tensor([[True, True, False], [False, True, True]]),
    }
    found = flags(net, mask, torch.ones(1, 2))
    assert found["_1"].tolist() == [[True, False, False]]
    assert found["_2"].tolist() == [[True, False]]
    assert found["_3"].tolist() == [[True, True]]


def test_normalisation_and_functions_that_are_not_zero_at_zero_are_sources():
    mask = {"0.weight": torch.zeros(2, 2, dtype=torch.bool)}
    for layer in (nn.BatchNorm1d(2), nn.Sigmoid(), nn.Softmax(1)):
        net = nn.Sequential(nn.Linear(2, 2, bias=False), layer)
        assert flags(net, mask, torch.ones(2, 2))["_1"].all()
    for layer in (nn.Tanh(), nn.GELU(), nn.Dropout()):
        net = nn.Sequential(nn.Linear(2, 2, bias=False), layer)
        assert not flags(net, mask, torch.ones(2, 2))["_1"].any()


def test_differences_do_not_cancel():
    class Net(nn.Module):
        def forward(self, x):
            return x - x

    assert flags(Net(), {}, torch.ones(1, 2))["sub"].all()
