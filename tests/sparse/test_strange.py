"""Networks that do strange things: sparse ones and smaller ones never do something else in silence."""

import copy
import os
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils._pytree import tree_leaves

import driveprune as dp
from tests import strange
from tests.sparse.literal import assert_near, floats, masked

MASKED, FLAGGED = {"mask": torch.linspace(0, 1, 6)}, {"flag": True}
CALLS = [(False, {}), (True, {}), (True, MASKED), (False, FLAGGED), (True, {}), (False, {})]


pytestmark = pytest.mark.filterwarnings("ignore:only .* of the masked weights:driveprune.SparseWarning")


def seeded(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def called(net, number, size, training, extra):
    """Outputs, the input afterwards, and gradients."""
    seeded(number)
    x = floats(size, 4, seed=number)
    net.train(training)
    net.zero_grad()
    outputs = [leaf for leaf in tree_leaves(net(x, **extra)) if isinstance(leaf, torch.Tensor)]
    if training:
        torch.stack([leaf.square().sum() for leaf in outputs if leaf.requires_grad]).sum().backward()
    return outputs, x


def check(net, twin, mask, calls, gradients=True):
    """Call after call, both networks do the same."""
    for number, (training, extra) in enumerate(calls):
        found, wanted = (called(each, number, 3 + 2 * number, training, extra) for each in (twin, net))
        assert torch.equal(found[1], wanted[1])
        for ours, theirs in zip(found[0], wanted[0], strict=True):
            assert_near(ours, theirs, 1e-4)
        if training and gradients:
            theirs = {name: parameter.grad for name, parameter in net.named_parameters()}
            largest = max(float(each.abs().max()) for each in theirs.values() if each is not None)
            for name, parameter in twin.named_parameters():
                kept = mask.get(name)
                wanted_gradient = theirs[name] if theirs[name] is None or kept is None else theirs[name][kept]
                ours = parameter.grad
                ours = ours if ours is None or kept is None or ours.dim() == 1 else ours[kept]
                if ours is None or wanted_gradient is None:
                    assert all(each is None or not each.any() for each in (ours, wanted_gradient)), name
                elif ours.numel():
                    assert_near(ours, wanted_gradient, 1e-3, 0.01 * largest)
    own = dict(twin.named_buffers())
    for name, value in net.named_buffers():
        if name in own and own[name].shape == value.shape:  # a compacted network has those that it uses
            assert_near(own[name], value, 1e-4)


def random_mask(net, seed=0):
    return {
        name: torch.rand(p.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        for name, p in net.named_parameters()
        if name.endswith("weight") and p.dim() == 2
    }


def sparse_is_the_same(plan, output, *, layers="sparse"):
    net = strange.Strange(plan, output)
    mask = random_mask(net)
    dense = masked(net, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dp.SparseWarning)
        fast = dp.sparsify(net, mask, floats(2, 4), layers=layers)
        check(dense, fast, mask, CALLS)
    back = dp.densify(fast)
    check(dense, back, mask, CALLS[:2])


def smaller_is_the_same(plan, output, keep):
    net = strange.Strange(plan, output)
    mask = random_mask(net)
    mask["layers.0.weight"][:, 2:4] = False
    mask["first.weight"][2:4] = False
    dense = masked(net, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dp.CompactWarning)
        small = dp.compact(net, mask, floats(2, 4), keep=keep)
    kind = {"function": [(False, {}), (False, {})], "trainable": [(False, {}), (True, {}), (False, {})]}[keep]
    check(dense, small, mask, kind, gradients=False)


@settings(max_examples=40, deadline=None)
@given(strange.plans, strange.outputs)
def test_sparse(plan, output):
    sparse_is_the_same(plan, output)


@pytest.mark.parametrize("quirk", strange.QUIRKS)
def test_each_quirk(quirk):
    sparse_is_the_same(["relu", quirk, "relu"], "two")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(strange.plans, strange.outputs)
def test_many_more(plan, output):
    sparse_is_the_same(plan, output)


@pytest.mark.parametrize("keep", ["function", "trainable"])
@settings(max_examples=20, deadline=None)
@given(plan=strange.plans, output=strange.outputs)
def test_smaller(plan, output, keep):
    smaller_is_the_same(plan, output, keep)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["function", "trainable"])
@settings(max_examples=200, deadline=None)
@given(plan=strange.plans, output=strange.outputs)
def test_many_more_smaller(plan, output, keep):
    smaller_is_the_same(plan, output, keep)


SAID = {
    "noise": "draws random numbers of torch", "branch": "draws random numbers of Python",
    "numpy_branch": "draws random numbers of numpy", "generator": "changes generator at each call",
    "count": "writes into count", "mean": "writes into mean", "calls": "changes calls at each call",
    "into_input": "writes into its input", "no_grad": "another gradient", "mode": "something else in training",
}  # fmt: skip


@pytest.mark.parametrize("quirk", SAID)
def test_why_a_network_runs_layer_by_layer_is_said(quirk):
    net = strange.Strange([quirk], "one")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = dp.sparsify(net, random_mask(net), floats(2, 4), layers="sparse")
    assert any(SAID[quirk] in line for line in dp.explain(fast).fallbacks)
    said = [str(each.message) for each in caught if issubclass(each.category, dp.SparseWarning)]
    assert (quirk == "mode") != any(SAID[quirk] in line for line in said)


def plain(plan=("relu", "scale")):
    net = strange.Strange(list(plan), "one").eval()
    mask = random_mask(net)
    return masked(net, mask), dp.sparsify(net, mask, floats(2, 4), layers="sparse")


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def set_scale(net):
    net.scale = 3.0


def replace_a_module(net):
    net.norm = Doubled()


def change_a_number(net):
    net.norm.eps = 3.0


def hook(net):
    net.norm.register_forward_hook(lambda module, args, output: output + 1)


CHANGES = {
    set_scale: "attribute scale", replace_a_module: "norm is another module", change_a_number: "norm.eps is 3.0",
    hook: "norm has a hook",
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_later_acts(change):
    dense, fast = plain(["norm", "scale"])
    for net in (dense, fast):
        change(net)
    with pytest.warns(dp.SparseWarning, match=CHANGES[change]):
        found = fast(floats(5, 4))
    assert_near(found, dense(floats(5, 4)))
    assert_near(copy.deepcopy(fast)(floats(5, 4)), dense(floats(5, 4)))
    assert any(CHANGES[change] in line for line in dp.explain(fast).fallbacks)


def test_a_sparse_layers_geometry_is_settled():
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    fast = dp.sparsify(net, {"0.weight": torch.rand(4, 3, 3, 3) < 0.5}, floats(1, 3, 6, 6), layers="sparse")
    with pytest.raises(AttributeError, match="stride of a sparse layer cannot be changed"):
        fast[0].stride = (2, 2)


def test_attributes_come_back():
    net = strange.Strange(["calls", "remembered"], "one")
    with pytest.warns(dp.SparseWarning):
        fast = dp.sparsify(net, random_mask(net), floats(2, 4), layers="sparse")
    for _ in range(6):
        fast(floats(2, 4))
    back = dp.densify(fast)
    assert (back.calls, len(back.seen)) == (fast.calls, len(fast.seen)) == (6, 6)
    assert net.calls == 0


def test_a_smaller_network_refuses_what_would_have_no_effect():
    net = strange.Strange(["scale", "masked"], "one").eval()
    small = dp.compact(net, random_mask(net), floats(2, 4))
    for each in (small, copy.deepcopy(small)):
        with pytest.raises(AttributeError, match="scale was read when this network was made"):
            each.scale = 2.0
        with pytest.raises(ValueError, match="mask was None in the example"):
            each(floats(2, 4), MASKED["mask"])
        assert_near(each(floats(7, 4)), masked(net, random_mask(net))(floats(7, 4)))


def test_a_network_that_decides_by_the_number_of_examples():
    net = strange.Strange(["batch_size"], "one").eval()
    dense = masked(net, random_mask(net))
    with pytest.warns(dp.CompactWarning, match="x has 4 rows, but the code of this network decides by their number"):
        small = dp.compact(net, random_mask(net), floats(2, 4))
    for size in (2, 5):
        assert_near(small(floats(size, 4)), dense(floats(size, 4)))


class Restless(nn.Module):
    """It differs from call to call whatever the seeds are."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x):
        noise = float.fromhex("0x" + os.urandom(6).hex()) / 2**48
        return self.a(x) + (noise if float(x.detach().sum()) > -1e9 else 0)


def test_a_network_that_differs_from_itself_stays_dense():
    net = Restless()
    mask = random_mask(net)
    with pytest.warns(dp.SparseWarning, match="with the same seeds it differs from itself"):
        fast = dp.sparsify(net, mask, floats(2, 4), layers="sparse")
    assert [each.computed_by for each in dp.explain(fast).layers] == ["torch, with zeros"]
    assert torch.equal(fast.a.weight, masked(net, mask).a.weight)


class Reads(nn.Module):
    """Untraceable, and its code uses a layer's weight beside calling the layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.relu(self.a(x))
        if float(h.detach().sum()) > -1:
            h = h @ self.b.weight + self.b(h) * self.c.weight.detach().std()
        return self.c(h)


def test_layers_whose_weights_are_read_stay_dense():
    net = Reads()
    mask = random_mask(net)
    with pytest.warns(dp.SparseWarning, match=r"uses b.weight, c.weight beside calling the layer"):
        fast = dp.sparsify(net, mask, floats(2, 4), layers="sparse")
    found = {each.name: each.computed_by for each in dp.explain(fast).layers}
    assert found["a.weight"] == "a sparse layer"
    assert found["b.weight"] == found["c.weight"] == "torch, with zeros"
    check(masked(net, mask), fast, mask, [(False, {}), (True, {})])
