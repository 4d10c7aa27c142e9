"""The kernels compute in float32, whatever torch's default is."""

import pytest
import torch
from torch import nn

import driveprune as dp
from tests.sparse.literal import assert_near, floats, random_mask


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("training", [True, False])
def test_another_default_changes_nothing(batch, training):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
    x = floats(batch, 3, 8, 8)
    fast = dp.sparsify(net.train(training), random_mask(net, 0.5), x[:1], layers="sparse").train(training)
    expected = fast(x).detach() if training else _inferred(fast, x)
    torch.set_default_dtype(torch.float64)
    try:
        found = fast(x).detach() if training else _inferred(fast, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert_near(found, expected)


@torch.no_grad()
def _inferred(net, x):
    return net(x)
