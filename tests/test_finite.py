"""Losses that are not finite: seen at the step, and traced to where it began."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from driveprune.finite import Losses, first_not_finite, origin

NAN, INF = float("nan"), float("inf")


def test_the_mean_leaves_out_what_is_not_finite_and_a_row_of_it_is_told_of():
    losses = Losses(torch.device("cpu"), patience=3)
    for step, loss in enumerate([1.0, NAN, INF, 4.0, -INF, NAN], 1):
        losses.add(torch.tensor(loss), step)
        assert losses.broken() is None
    assert losses.mean(6) == 2.5
    again = Losses(torch.device("cpu"), patience=3)
    again.load(losses.state())
    assert again.mean(6) == 2.5
    for step in (7, 8):
        losses.add(torch.tensor(INF), step)
        assert losses.broken() == 5  # where the row began, and so it stays
    losses.begin()
    losses.add(torch.tensor(3.0), 9)
    assert (losses.mean(1), losses.broken()) == (3.0, 5)


def test_the_first_tensor_that_is_not_finite():
    tensors = {"a": torch.ones(2), "n": torch.arange(3), "b": torch.tensor([1, INF]), "c": torch.tensor(NAN)}
    assert first_not_finite(tensors) == "b"
    assert first_not_finite({"a": torch.ones(2), "n": torch.arange(3)}) is None
    assert first_not_finite({}) is None


class Root(nn.Module):
    def forward(self, x):
        return (x - 1e9).sqrt()


class Large(nn.Module):
    def forward(self, x):
        return {"first": x, "second": [x * 1e38 * 1e38]}


class Second(nn.Module):
    def forward(self, found):
        return found["second"][0] - found["second"][0] + found["first"]


def net(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), *between, nn.ReLU(), nn.Linear(8, 3))


def as_bytes(model):
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def where(model, x, loss=cross_entropy):
    batch = (x, torch.tensor([0, 1, 2, 0]))
    before = as_bytes(model)
    found = origin(model, batch, lambda: loss(model(batch[0]), batch[1]))
    assert as_bytes(model) == before  # the running means, too
    assert all(not module._forward_hooks for module in model.modules())
    return found


def test_where_it_began():
    x = torch.randn(4, 5)
    assert where(net(), x) is None
    assert where(net(), x.index_fill(0, torch.tensor([2]), NAN)) == (
        "the batch itself holds NaN, in batch[0], example 2: look at the data"
    )
    assert where(net(Root()), x) == "it begins in the output of 2 (Root), which holds NaN"
    assert where(net(Large(), Second()), x) == "it begins in the output of 2 (Large), which holds infinity"
    broken = net()
    broken[3].weight.data[0, 0] = NAN
    assert where(broken, x) == "the weights 3.weight hold NaN"
    found = where(net(), x.index_fill(0, torch.tensor([3]), INF))
    beside = "the batch itself holds infinity, in batch[0], example 3"
    assert found == f"it begins in the output of 0 (Linear), which holds NaN; {beside}"
    found = where(net(), x, lambda output, y: (output - output).log().sum())
    assert found == "all modules' outputs are finite: it begins in the loss itself"


def test_it_is_said_if_it_cannot_be_found():
    calls = []

    def fails(output, y):
        calls.append(1)
        raise KeyError("x")

    assert where(net(), torch.randn(4, 5), fails).startswith("where it began is not known: computed once more")
    assert calls == [1]


def test_a_frozen_weight_may_be_infinite():
    model = net()
    model.register_parameter("masked", nn.Parameter(torch.full((3,), -INF), requires_grad=False))
    assert where(model, torch.randn(4, 5)) is None


@pytest.mark.parametrize("batch", [{"x": [torch.ones(2), torch.tensor([[1.0], [NAN]])]}, torch.tensor(NAN)])
def test_batches_of_any_shape(batch):
    found = origin(net(), batch, lambda: torch.tensor(NAN))
    expected = "batch['x'][1], example 1" if isinstance(batch, dict) else "batch"
    assert found == f"the batch itself holds NaN, in {expected}: look at the data"
