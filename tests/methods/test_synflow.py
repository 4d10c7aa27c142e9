import copy

import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.methods import synflow
from tests.methods import literal
from tests.nets import batch, convnet, images, mlp


def literal_score(model, mask, x):
    """Absolute values written into a float64 copy, all-ones input, evaluation mode, gradient times weight."""
    net = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
    net(torch.ones(1, *x.shape[1:], dtype=torch.float64)).sum().backward()
    return {name: dict(net.named_parameters())[name].grad * dict(net.named_parameters())[name] for name in mask}


def scores(net, data):
    mask = {name: torch.ones(w.shape, dtype=torch.bool) for name, w in dp.prunable(net).items()}
    loss = dp.gradients.cross_entropy
    return synflow.score(net, mask, iter([data]), loss=loss, generator=torch.Generator()), mask


@pytest.mark.parametrize(("build", "draw"), [(mlp, batch), (convnet, images)])
def test_equals_a_literal_evaluation(build, draw):
    net, data = build(), draw()
    if build is convnet:
        net.train()(data[0])  # running statistics that are not the initial ones
    found, mask = scores(net, data)
    expected = literal_score(net, mask, data[0])
    for name in mask:
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-12, atol=0)


def test_masks_equal_a_literal_loop():
    net = convnet()
    expected = literal.iterate(
        copy.deepcopy(net), [images()], 0.95, 20,
        lambda model, theta, mask, data: literal_score(masked(model, theta, mask), mask, data[0]),
    )[-1]  # fmt: skip
    kept = dp.prune(net, [images()], method="synflow", sparsity=0.95, knobs={"cuts": 20})
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


def masked(model, theta, mask):
    net = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in dp.prunable(net).items():
            weight.copy_(theta[name] * mask[name])
    return net


@pytest.mark.parametrize("seed", range(3))
def test_layers_share_the_flow_equally_without_biases(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 20, bias=False), nn.ReLU(), nn.Linear(20, 4, bias=False),
    )  # fmt: skip
    found, _ = scores(net, images())
    sums = [float(score.sum()) for score in found.values()]
    assert sums == pytest.approx([sums[0]] * 4, rel=1e-12)


def test_no_layer_is_emptied_while_weights_are_left_for_it():
    net = mlp(bias=False)
    kept = dp.prune(net, [batch()], method="synflow", sparsity=0.99)
    assert all(k.any() for k in kept.values())


def test_the_model_is_only_read():
    net = convnet()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    scores(net, images())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


class SharedAndTied(nn.Module):
    """A module under two names, and a weight in two modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(6, 6)
        self.again = nn.Sequential(self.block, nn.BatchNorm1d(6))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.block.weight
        self.leave = nn.Linear(6, 3)

    def forward(self, x):
        return self.leave(self.tied(self.again(self.block(x))))


def test_shared_modules_and_tied_weights():
    net = SharedAndTied()
    before = dict(net.named_parameters())
    found, mask = scores(net, batch())
    expected = literal_score(net, mask, batch()[0])
    assert set(mask) == {"block.weight", "leave.weight"}
    for name in mask:
        torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-12, atol=0)
    assert all(after is before[name] for name, after in net.named_parameters())
