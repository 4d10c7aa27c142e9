"""Networks that nobody here wrote, from one end of the library to the other."""

import copy

import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.graph import flow
from driveprune.methods import synflow
from tests import zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning"),
    pytest.mark.filterwarnings("ignore:not pruned. backbone.layers.0.mixer.A_log:UserWarning"),
]


class Passing(nn.Module):
    """What stands where a normalisation was: a path goes through one, but an influence goes across."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x


def without_norms(net):
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.LayerNorm) or "RMSNorm" in type(child).__name__:
                setattr(module, name, Passing(child.weight))
    return net


def _drawn(leaf):
    """Other words, or positive numbers, of the same shape."""
    return torch.rand(leaf.shape).double() if leaf.is_floating_point() else torch.randint(3, 30, leaf.shape)


def by_gradients(net, mask, batch, tries=6):
    """Which kept weights have a gradient for random inputs and weights, without what is added on the way."""
    net = copy.deepcopy(net).double().eval()
    parameters = dict(net.named_parameters())
    found = {name: torch.zeros_like(kept) for name, kept in mask.items()}
    for turn in range(tries):
        torch.manual_seed(turn)
        for name, weight in parameters.items():
            is_constant = any(word in name for word in ("bias", "position", "cls_token", "wpe"))
            if is_constant and name not in mask:
                weight.data.zero_()
            elif weight.dim() > 1:
                drawn = torch.rand_like(weight) + 0.1 if turn % 2 else torch.randn_like(weight)
                weight.data.copy_(drawn / weight[0].numel() ** 0.5 * mask.get(name, torch.ones(())))
        given = {name: _drawn(leaf) for name, leaf in batch.items()}
        loss = sum((leaf * torch.randn_like(leaf)).sum() for leaf in zoo.outputs(net(**given)))
        gradients = torch.autograd.grad(loss, [parameters[name] for name in mask], allow_unused=True)
        for name, gradient in zip(mask, gradients, strict=True):
            if gradient is not None:
                found[name] |= mask[name] & (gradient != 0)
    return found


# Where biases keep gates and attention open, the twin must say so, too; gradients without biases do not see it.
WITHOUT_BIASES = {"llama", "gemma", "t5"}


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.97])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "segformer", "t5", "gpt2", "vit", "neox", "gemma"])
def test_weights_on_a_path_are_those_that_have_an_influence(name, sparsity):
    animal = zoo.made(name)
    net = without_norms(animal.net)
    if name == "mixtral":
        net.set_experts_implementation("eager")  # the other one has no float64
    torch.manual_seed(3)
    mask = {name: torch.rand(weight.shape) >= sparsity for name, weight in dp.prunable(net).items()}
    found = flow(net, mask, animal.batch)
    wanted = by_gradients(net, mask, animal.batch)
    assert not any((wanted[name] & ~kept).any() for name, kept in found.effective.items())
    if name in WITHOUT_BIASES:
        assert all(torch.equal(wanted[name], kept) for name, kept in found.effective.items())


@pytest.mark.parametrize("name", ["llama", "mixtral", "segformer", "gpt2", "mamba"])
def test_a_budget_of_multiply_adds_is_kept(name):
    animal = zoo.made(name)
    dense = dict(animal.net.named_parameters())
    weights = dp.prunable(animal.net)
    whole = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
    found = flow(animal.net, whole, animal.batch)
    mask = dp.prune(animal.net, [animal.batch], method="snip", sparsity=0.75, loss=animal.loss, budget="macs")
    assert found.macs(mask) == pytest.approx(0.25 * found.macs(whole), rel=0.01)
    assert all(dense[name].count_nonzero() <= kept.sum() for name, kept in mask.items())


def test_multiply_adds_of_a_mixture_are_counted_by_hand():
    """Six words, width 16, four heads of 4, two of them for keys and values, three experts, two a word."""
    animal = zoo.made("mixtral")
    whole = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in dp.prunable(animal.net).items()}
    attention, router, expert = 16 * (16 + 8 + 8 + 16), 16 * 3, 3 * 16 * 24
    by_hand = 6 * (2 * (attention + router + 2 * expert) + 16 * 30)
    assert flow(animal.net, whole, animal.first).macs(whole) == by_hand


def test_synflow_of_a_mixture_is_that_of_float64():
    """The experts' product has no float64 in torch; another implementation of the same network has."""
    scores = []
    for implementation in ("grouped_mm", "eager"):
        animal = zoo.made("mixtral")
        animal.net.set_experts_implementation(implementation)
        whole = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in dp.prunable(animal.net).items()}
        generator = torch.Generator()
        scores.append(synflow.score(animal.net, whole, iter([animal.batch]), loss=animal.loss, generator=generator))
    for name, score in scores[0].items():
        assert score.dtype == torch.float64
        assert torch.allclose(score, scores[1][name], rtol=1e-10, atol=1e-12)
