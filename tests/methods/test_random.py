import torch

import driveprune as dp
from tests.nets import mlp


def test_removes_evenly_and_by_seed():
    masks = [dp.prune(torch.nn.Linear(300, 300), method="random", sparsity=0.5, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(masks[0]["weight"], masks[1]["weight"])
    assert not torch.equal(masks[0]["weight"], masks[2]["weight"])
    halves = masks[0]["weight"].double().mean(0)
    assert halves.min() > 0.3
    assert halves.max() < 0.7


def test_does_not_depend_on_the_weights():
    masks = [dp.prune(mlp(seed), method="random", sparsity=0.9) for seed in (0, 1)]
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])
