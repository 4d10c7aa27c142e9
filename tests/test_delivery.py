import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.delivery import gained


def test_what_was_gained(tmp_path):
    net = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 3))
    mask = dp.prune(net, method="erk", sparsity=0.98)
    dp.save(tmp_path / "net", net, mask)
    found = gained(net, mask, torch.zeros(1, 20), tmp_path / "net")
    assert found["bytes of the file"] == (4 * (20 * 200 + 200 + 600 + 3), (tmp_path / "net").stat().st_size)
    assert found["weights"] == (4600, 92)
    assert found["multiply-adds of the compacted network"][0] == 4600
    assert found["multiply-adds of the compacted network"][1] < 2000
    dense, small = found["milliseconds a call, ONNX Runtime, batch 1"]
    assert dense > 0
    assert small > 0


@pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
def test_a_network_that_cannot_be_traced_has_its_size_at_least(tmp_path):
    class Untraceable(nn.Linear):
        def forward(self, x):
            return super().forward(x) if len(x) else x

    net = nn.Sequential(Untraceable(5, 5))
    mask = dp.prune(net, method="magnitude", sparsity=0.5)
    dp.save(tmp_path / "net", net, mask)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net

        def forward(self, x):
            return self.inner(x) if x.sum() > 0 else x

    whole = Outer()
    found = gained(whole, {f"inner.{name}": kept for name, kept in mask.items()}, torch.ones(1, 5), tmp_path / "net")
    assert found.keys() == {"bytes of the file", "weights"}


def test_inputs_by_name(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 30), nn.Linear(30, 5)

        def forward(self, x, y):
            return {"sum": self.second(self.first(x).relu()) + y}

    net = Sum()
    mask = dp.prune(net, method="erk", sparsity=0.9)
    dp.save(tmp_path / "net", net, mask)
    found = gained(net, mask, {"y": torch.ones(1, 5), "x": torch.ones(1, 5)}, tmp_path / "net")
    assert min(found["milliseconds a call, ONNX Runtime, batch 1"]) > 0
