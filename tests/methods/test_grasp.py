import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import driveprune as dp
from driveprune.methods import grasp
from tests.methods import literal
from tests.nets import batch, mlp


def literal_score(net, data, temperature):
    """θ·H·g with the whole Hessian of a tiny network, entry by entry."""
    names = list(dp.prunable(net))
    weights = [dict(net.named_parameters())[name].detach() for name in names]
    flat = torch.cat([w.reshape(-1) for w in weights]).requires_grad_()
    sizes = [w.numel() for w in weights]

    def value(v):
        parts = {n: p.view(w.shape) for n, p, w in zip(names, v.split(sizes), weights, strict=True)}
        return F.cross_entropy(functional_call(net, parts, (data[0],)) / temperature, data[1])

    gradient = torch.autograd.functional.jacobian(value, flat)
    hessian = torch.autograd.functional.hessian(value, flat)
    product = (flat * (hessian @ gradient)).detach().split(sizes)
    return {n: p.view(w.shape) for n, p, w in zip(names, product, weights, strict=True)}


def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


@pytest.mark.parametrize("temperature", [1.0, 200.0])
def test_equals_the_whole_hessian(temperature):
    net, data = small(), batch(dtype=torch.float64)
    expected = literal_score(net, data, temperature)
    mask = {name: torch.ones(s.shape, dtype=torch.bool) for name, s in expected.items()}
    found = grasp.score(
        net, mask, iter([data]), loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), generator=torch.Generator(),
        temperature=temperature,
    )  # fmt: skip
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-15)
    kept = dp.prune(small(), [data], method="grasp", sparsity=0.5, knobs={"temperature": temperature})
    chosen = literal.best(expected, mask, 22)
    assert all(torch.equal(kept[name], chosen[name]) for name in chosen)


def test_batches_act_as_one():
    data = [batch(size=10, seed=0, dtype=torch.float64), batch(size=30, seed=1, dtype=torch.float64)]
    joined = [tuple(torch.cat(parts) for parts in zip(*data, strict=True))]
    masks = [
        dp.prune(mlp(dtype=torch.float64), b, method="grasp", sparsity=0.9, knobs={"batches_per_cut": len(b)})
        for b in (data, joined)
    ]
    assert literal.overlap(*masks) == 1


def test_outputs_that_are_no_tensors_need_temperature_one():
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()

        def forward(self, x):
            return {"logits": self.net(x)}

    def loss(model, b):
        return F.cross_entropy(model(b[0])["logits"], b[1])

    data = [batch(dtype=torch.float64)]
    with pytest.raises(ValueError, match="temperature=1"):
        dp.prune(Pair(), data, method="grasp", sparsity=0.5, loss=loss)
    dp.prune(Pair(), data, method="grasp", sparsity=0.5, loss=loss, knobs={"temperature": 1})


def test_a_loss_that_goes_around_the_model_needs_temperature_one():
    net, data = torch.nn.Sequential(small()), [batch(dtype=torch.float64)]

    def loss(model, b):
        return F.cross_entropy(model[0](b[0]), b[1])

    with pytest.raises(ValueError, match="the loss does not call the model itself: set the knob temperature=1"):
        dp.prune(net, data, method="grasp", sparsity=0.5, loss=loss)
