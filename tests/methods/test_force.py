import copy
import itertools

import pytest
import torch

import driveprune as dp
from tests.methods import literal
from tests.nets import batch, mlp

DATA = [batch(seed=seed, dtype=torch.float64) for seed in range(8)]


def force_metric(model, theta, mask, data):
    """|∂L/∂m|, which is θ·g for removed weights too: θ is not masked."""
    by_mask, _ = literal.two_gradients(model, theta, mask, data)
    return {name: g.abs() for name, g in by_mask.items()}


@pytest.mark.parametrize("seed", range(4))
def test_equals_its_own_literal_loop_and_revives(seed):
    net = mlp(seed, torch.float64)
    masks = literal.iterate(copy.deepcopy(net), DATA, 0.95, 8, force_metric, revive=True)
    revived = sum(
        int((after[name] & ~before[name]).sum()) for before, after in itertools.pairwise(masks) for name in before
    )
    assert revived > 0
    before = {name: w.detach().clone() for name, w in dp.prunable(net).items()}
    kept = dp.prune(net, DATA, method="force", sparsity=0.95, knobs={"cuts": 8})
    for name, weight in dp.prunable(net).items():
        assert torch.equal(kept[name], masks[-1][name])
        assert torch.equal(weight, before[name] * kept[name])


@pytest.mark.parametrize("seed", range(4))
def test_iterative_snip_is_its_option_and_does_not_revive(seed):
    net = mlp(seed, torch.float64)
    masks = literal.iterate(copy.deepcopy(net), DATA, 0.95, 8, literal.snip_metric)
    kept = dp.prune(net, DATA, method="force", sparsity=0.95, knobs={"cuts": 8, "revive": False})
    assert all(torch.equal(kept[name], masks[-1][name]) for name in kept)
