import pytest
import torch

import driveprune as dp
from tests.nets import mlp


@pytest.mark.filterwarnings("ignore:nothing is left of 2.weight:driveprune.CollapseWarning")
def test_keeps_the_largest_of_all_layers_without_data():
    net = mlp()
    largest = torch.cat([w.detach().abs().reshape(-1) for w in dp.prunable(net).values()]).sort().values[-153:]
    kept = dp.prune(net, method="magnitude", sparsity=0.9)
    values = torch.cat([w[kept[name]].abs() for name, w in dp.prunable(net).items()]).sort().values
    assert torch.equal(values, largest)


def test_cuts_after_half_of_the_training_by_default():
    assert dp.methods.make_plan("magnitude", 0.9, 100, 10)[0] == dp.Train(50)
    assert dp.methods.make_plan("magnitude", 0.9, 100, 10, {"early_epochs": 2})[0] == dp.Train(20)
