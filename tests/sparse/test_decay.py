"""Weight decay by the number of dimensions, as nanoGPT and others have it, and sparse networks."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import driveprune as dp
from tests.sparse.literal import floats, random_mask


def configure_optimizers(model, weight_decay=0.1):
    """nanoGPT's: whatever has two dimensions decays."""
    params = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    decay = [weight for weight in params.values() if weight.dim() >= 2]
    nodecay = [weight for weight in params.values() if weight.dim() < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def step(net, optimizer):
    optimizer.zero_grad()
    net(floats(5, 6)).square().sum().backward()
    optimizer.step()


def test_sparsify_takes_the_groups_over():
    net = network()
    mask = random_mask(net, 0.5)
    dp.apply(net, mask)
    optimizer = configure_optimizers(net)
    held = dp.hold(net, optimizer, mask)
    fast, moved = dp.sparsify(net, mask, floats(1, 6), optimizer, layers="sparse")
    names = {weight: name for name, weight in fast.named_parameters()}
    assert [[names[weight] for weight in group["params"]] for group in moved.param_groups] == [
        ["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias"],
    ]  # fmt: skip
    assert [group["weight_decay"] for group in moved.param_groups] == [0.1, 0.0]
    for _ in range(3):
        step(fast, moved)  # without a warning: warnings are errors here
        step(net, optimizer)
    held.release()
    for found, expected in zip(dp.densify(fast).parameters(), net.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def copies(fast):
    return fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))


def test_a_rule_that_sees_no_kept_values_is_warned_of_once():
    net = network()
    fast = dp.sparsify(net, random_mask(net, 0.5), floats(1, 6), layers="sparse")
    for each in copies(fast):
        optimizer = configure_optimizers(each)
        with pytest.warns(dp.SparseWarning, match=r"no weight of a sparse layer decays.*sparsify\(model, mask"):
            step(each, optimizer)
        step(each, optimizer)


@pytest.mark.parametrize(
    "groups",
    [
        lambda net: net.parameters(),
        lambda net: [{"params": list(net.parameters()), "weight_decay": 0.1}],
        lambda net: [{"params": [net[0].weight], "weight_decay": 0.1}, {"params": [net[2].weight]}],
        lambda net: [{"params": [net[1].weight], "weight_decay": 0.1}, {"params": [net[1].bias]}],
    ],
)
def test_other_groups_are_not_warned_of(groups):
    net = network()
    fast = dp.sparsify(net, random_mask(net, 0.5), floats(1, 6), layers="sparse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(fast, torch.optim.AdamW(groups(fast), lr=0.1, weight_decay=0.0))
    dense = network()
    step(dense, configure_optimizers(dense))
