"""Against Synaptic-Flow (Tanaka et al., 2020), whose scores are made in evaluation mode unless it is told otherwise.

Its definitions are written down here anew: masks are multiplied into weights and have gradients of their own; a cut
removes int(sparsity·n) of the n weights, those whose score is at most that of the last of them.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import driveprune as dp
from tests.methods.literal import overlap
from tests.nets import DenseLike, InceptionLike, convnet, images

NETS = {"conv": convnet, "dense": DenseLike, "inception": InceptionLike}


def trained_a_little(build, dtype):
    """With running statistics that are those of no batch."""
    net = build().to(dtype)
    with torch.no_grad():
        for seed in range(5):
            net.train()(images(seed=10 + seed, dtype=dtype)[0])
    return net


def snip_scores(net, data, mask):
    """|∂L/∂m| of masks m that are multiplied into the weights."""
    m = {name: kept.to(data[0].dtype).requires_grad_() for name, kept in mask.items()}
    weights = dict(net.named_parameters())
    output = functional_call(net, {name: weights[name].detach() * m[name] for name in m}, (data[0],))
    found = torch.autograd.grad(F.cross_entropy(output, data[1]), list(m.values()))
    return {name: g.abs() for name, g in zip(m, found, strict=True)}


def grasp_scores(net, data, mask):
    """θ·Hg: the gradient of g_stopped·g, times the weight; the output is divided by 200."""
    weights = [dict(net.named_parameters())[name] for name in mask]
    first = torch.autograd.grad(F.cross_entropy(net(data[0]) / 200, data[1]), weights)
    second = torch.autograd.grad(F.cross_entropy(net(data[0]) / 200, data[1]), weights, create_graph=True)
    product = sum((a * b).sum() for a, b in zip(first, second, strict=True))
    found = torch.autograd.grad(product, weights)
    return {name: (w * h).detach() for name, w, h in zip(mask, weights, found, strict=True)}


def synflow_scores(net, data, mask):
    """|∂R/∂θ·θ| for an input of ones, with the absolute values of all that is in the state, buffers included."""
    linear = copy.deepcopy(net)
    with torch.no_grad():
        for tensor in linear.state_dict().values():
            tensor.abs_()
    weights = dict(linear.named_parameters())
    with torch.no_grad():
        for name, kept in mask.items():
            weights[name].mul_(kept)
    linear(torch.ones_like(data[0][:1])).sum().backward()
    return {name: (weights[name].grad * weights[name]).detach().abs() for name in mask}


def cut(scores, sparsity, rounding=int):
    every = torch.cat([score.flatten() for score in scores.values()])
    count = rounding(sparsity * every.numel())
    if count < 1:
        return {name: torch.ones_like(score, dtype=torch.bool) for name, score in scores.items()}
    last = torch.kthvalue(every, count).values
    return {name: score > last for name, score in scores.items()}


def dense(net):
    return {name: torch.ones(w.shape, dtype=torch.bool) for name, w in dp.prunable(net).items()}


@pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("build", NETS)
@pytest.mark.parametrize(("method", "literal"), [("snip", snip_scores), ("grasp", grasp_scores)])
def test_in_evaluation_mode_masks_are_those_of_synaptic_flow(method, literal, build, sparsity):
    net = trained_a_little(NETS[build], torch.float64)
    data = images(dtype=torch.float64)
    expected = cut(literal(copy.deepcopy(net).eval(), data, dense(net)), sparsity)
    size = sum(kept.numel() for kept in expected.values())
    sparsity = 1 - sum(int(kept.sum()) for kept in expected.values()) / size  # with its rounding of the count
    for training in (True, False):  # whatever the model's own mode
        again = copy.deepcopy(net).train(training)
        kept = dp.prune(again, [data], method=method, sparsity=sparsity, knobs={"mode": "evaluation"})
        assert overlap(kept, expected) == 1.0
        assert again.training is training
    as_trained = dp.prune(copy.deepcopy(net), [data], method=method, sparsity=sparsity)
    assert overlap(as_trained, expected) < 1.0
    by_the_batch = copy.deepcopy(net).train()
    for module in by_the_batch.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    assert overlap(as_trained, cut(literal(by_the_batch, data, dense(net)), sparsity)) > 0.99


@pytest.mark.parametrize("method", ["drive", "force"])
def test_the_first_cut_of_the_others_in_evaluation_mode_is_that_of_snip(method):
    net = trained_a_little(convnet, torch.float64)
    data = [images(dtype=torch.float64)]
    masks = [
        dp.prune(copy.deepcopy(net), data, method=name, sparsity=0.5, knobs={"mode": "evaluation", **knobs})
        for name, knobs in (("snip", {}), (method, {"cuts": 1}))
    ]
    assert overlap(*masks) == 1.0


def test_synflow_differs_in_the_rounding_of_counts_alone():
    """As docs/method.md says: there at most one weight more is left after each cut of the path."""
    net = convnet(dtype=torch.float64)  # initial statistics: absolute values of buffers change nothing
    size, path = 1624, [1 - 0.1 ** (n / 20) for n in range(1, 21)]
    found = {}
    for rounding in (int, round):
        mask = dense(net)
        for reached in path:
            mask = cut(
                synflow_scores(copy.deepcopy(net).eval(), images(dtype=torch.float64), mask), reached, rounding
            )
            kept = sum(int(m.sum()) for m in mask.values())
            assert 0 <= kept - round((1 - reached) * size) <= (rounding is int)
        found[rounding] = mask
    ours = dp.prune(net, [images(dtype=torch.float64)], method="synflow", sparsity=0.9, knobs={"cuts": 20})
    assert overlap(ours, found[round]) == 1.0
    assert 0.95 < overlap(ours, found[int]) < 1.0
