import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import driveprune as dp
from driveprune.integrations.torch_prune import from_torch, to_torch
from tests.nets import Recurrent, Transformer, batch, convnet, images, mlp, removed_are_zero, same, sequences, tokens
from tests.test_anywhere import Language, Shared

CASES = {
    "mlp": (mlp, batch),
    "conv": (convnet, images),
    "lstm": (Recurrent, sequences),
    "attention": (Transformer, tokens),
    "shared": (Shared, Shared.batch),
}
pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case):
    build, draw = CASES[case]
    net, (x, _) = build().eval(), draw()
    mask = dp.prune(net, method="erk", sparsity=0.7)
    names, output = list(net.state_dict()), net(x)
    weights = dict(net.named_parameters())
    to_torch(net, mask)
    assert prune.is_pruned(net)
    torch.testing.assert_close(net(x), output, rtol=0, atol=1e-6)
    found = from_torch(net)
    assert same(dict(found), dict(mask))
    assert not prune.is_pruned(net)
    assert sorted(net.state_dict()) == sorted(names)
    assert all(weights[name] is weight for name, weight in net.named_parameters())
    torch.testing.assert_close(net(x), output, rtol=0, atol=1e-6)


def test_tied_weights_are_pruned_in_both_places():
    net = Language()
    mask = dp.prune(net, method="random", sparsity=0.5, include="tokens.weight")
    to_torch(net, mask)
    assert net.head.weight_orig is net.tokens.weight_orig
    assert torch.equal(net.head.weight_mask, net.tokens.weight_mask)
    assert same(dict(from_torch(net)), dict(mask))
    assert net.head.weight is net.tokens.weight


def test_a_network_pruned_by_torch_trains_on_held():
    net = convnet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    layers = [(net[0], "weight"), (net[4], "weight"), (net[10], "weight")]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=1000)
    prune.ln_structured(net[4], "weight", amount=2, n=2, dim=0)
    x, y = images()
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    mask = from_torch(net)
    assert set(mask) == {"0.weight", "4.weight", "10.weight"}
    assert removed_are_zero(net, mask)
    dp.hold(net, optimizer, mask)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert removed_are_zero(net, mask)
    assert net[0].weight[mask["0.weight"]].any()


def test_a_bias_that_torch_has_pruned_is_in_the_mask():
    net = nn.Linear(4, 3)
    prune.random_unstructured(net, "bias", amount=1)
    assert int(from_torch(net)["bias"].sum()) == 2


def test_a_network_that_was_not_pruned():
    with pytest.raises(ValueError, match="nothing in this model was pruned by torch.nn.utils.prune"):
        from_torch(mlp())
    with pytest.raises(ValueError, match="it has no parameter '9.weight'"):
        to_torch(mlp(), {"9.weight": torch.ones(2, 2, dtype=torch.bool)})
