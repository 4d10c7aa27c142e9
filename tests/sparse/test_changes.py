"""What networks do beside their layers, before they are made sparse or smaller and after: never wrong in silence."""

import copy
import random
import warnings
from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from tests.sparse.literal import assert_near, floats, masked

X = floats(5, 4)


class Drop(nn.Module):
    def forward(self, h):
        return F.dropout(h, 0.5, self.training)


class Swish(nn.Module):
    def forward(self, h):
        return h * torch.sigmoid(h)


class Net(nn.Module):
    """Three layers, and in the middle what a test is about."""

    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.middle, self.norm, self.drop = middle, nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.block, self.swish, self.more = Drop(), Swish(), nn.Sequential(nn.Tanh())
        self.register_buffer("size", torch.tensor(2.0))
        self.register_buffer("none", None)
        self.options = SimpleNamespace(inner=SimpleNamespace(k=1.5), sizes=[1.5])
        self.seen, self.dice, self._k = deque(maxlen=9), SimpleNamespace(own=random.Random(3)), 1.5

    @property
    def k(self):
        return self._k

    @k.setter
    def k(self, value):
        self._k = value

    def act(self, h):
        return h

    def forward(self, x):
        return self.c(self.middle(self, torch.relu(self.b(torch.relu(self.a(x))))))


def mask_of(net):
    weights = ("a.weight", "b.weight", "c.weight")
    return {
        n: torch.rand(net.get_parameter(n).shape, generator=torch.Generator().manual_seed(0)) < 0.6 for n in weights
    }


def sparse(net, example=X):
    return dp.sparsify(net, mask_of(net), example, layers="sparse")


def smaller(net, example=X):
    return dp.compact(net, mask_of(net), example, keep="trainable")


def agree(make, net, do, example=X):
    """Both networks give the same, or the one that was made refuses."""
    dense = masked(copy.deepcopy(net), mask_of(net))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dp.SparseWarning)
        warnings.simplefilter("ignore", dp.CompactWarning)
        made, results = make(net, example), []
        for each in (made, dense):
            torch.manual_seed(0)
            try:
                results.append(do(each))
            except (AttributeError, ValueError, RuntimeError, TypeError):
                assert each is made
                return
    assert_near(torch.as_tensor(results[0]), torch.as_tensor(results[1]), 1e-4)


def in_view(_, h):
    h = h * 1.0
    h.view(-1).clamp_(max=9.0)
    return h


def under_a_view(_, h):
    h = h * 1.0
    view = h.view(-1, 6)
    h.clamp_(max=9.0)
    return view


def without_gradient(_, h):
    with torch.no_grad():
        q = h.abs().mean() + h
    return h / (q + 1)


def hooked(_, h):
    h = h * 1.0
    if torch.is_grad_enabled():
        h.register_hook(lambda gradient: gradient * 0.1)
    return h


def counted(net, h):
    net.size.data += 1
    return h


def remembered(net, h):
    net.seen.append(1)
    return h


def evaluated(net):
    return net.eval()(X)


def trained(net):
    return net.train()(X)


def large(net):
    return net.eval()(X * 1e4)


def gradient(net):
    net.train()(X).square().sum().backward()
    return net.a.bias.grad


def input_gradient(net):
    x = X.clone().requires_grad_()
    net.train()(x).sum().backward()
    return x.grad


def size_after(net):
    return [float((net(X), net.size)[1])]


def seen_after(net):
    return [float((net(X), len(net.seen))[1])]


def rarely(net):
    net.dice.own.seed(3)
    return torch.stack([net.eval()(X) for _ in range(60)])


AS_IT_IS = {
    "in a view": (in_view, large), "under a view": (under_a_view, large), "no_grad": (without_gradient, gradient),
    "input": (without_gradient, input_gradient), "hook on a value": (hooked, gradient),
    "noise after dropout": (lambda net, h: net.drop(h) + torch.randn_like(h), trained),
    "two dropouts": (lambda net, h: net.drop(h) + F.dropout(h), trained),
    "number from a buffer": (lambda net, h: h / net.size.item() + net.size, evaluated),
    "data of a buffer": (counted, size_after), "deque": (remembered, seen_after),
    "rare branch": (lambda net, h: h * 2 if net.dice.own.random() < 0.05 else h, rarely),
}  # fmt: skip


@pytest.mark.parametrize("make", [sparse, smaller])
@pytest.mark.parametrize("case", AS_IT_IS)
def test_as_it_is(case, make):
    middle, do = AS_IT_IS[case]
    agree(make, Net(middle), do)


def patched(net):
    own = net.norm.forward
    net.norm.forward = lambda h: 3 * own(h)


LATER = {
    "buffer": (lambda net, h: h / net.size.item(), lambda net: net.size.fill_(5)),
    "branch by a buffer": (lambda net, h: h * 2 if net.size > 3 else h, lambda net: net.size.fill_(5)),
    "attribute with a default": (
        lambda net, h: h * getattr(net, "scale", 1.0), lambda net: setattr(net, "scale", 3.0)
    ),
    "buffer that was None": (
        lambda net, h: h if net.none is None else h * net.none,
        lambda net: setattr(net, "none", torch.full((6,), 3.0)),
    ),
    "options in options": (lambda net, h: h * net.options.inner.k, lambda net: setattr(net.options.inner, "k", 4.0)),
    "list in options": (lambda net, h: h * net.options.sizes[0], lambda net: net.options.sizes.__setitem__(0, 4.0)),
    "one more module": (lambda net, h: net.more(h), lambda net: net.more.append(nn.Tanh())),
    "another forward": (lambda net, h: net.norm(h), patched),
    "another method": (lambda net, h: net.act(h), lambda net: setattr(net, "act", lambda h: 3 * h)),
    "property": (lambda net, h: h * net.k, lambda net: setattr(net, "k", 5.0)),
    "another block": (lambda net, h: net.swish(h), lambda net: setattr(net, "swish", nn.Tanh())),
    "hook on a block": (
        lambda net, h: net.swish(h), lambda net: net.swish.register_forward_hook(lambda m, a, out: 3 * out)
    ),
    "block in training": (lambda net, h: net.block(h), lambda net: (net.eval(), net.block.train())),
    "block in evaluation": (lambda net, h: net.block(h), lambda net: (net.train(), net.block.eval())),
}  # fmt: skip
NOT_IN_A_SMALLER = {
    "options in options", "list in options", "one more module", "another forward", "branch by a buffer",
}  # fmt: skip
"""Parts that a smaller network does not have: there is nothing to change."""


@pytest.mark.parametrize(
    ("make", "case"),
    [(sparse, case) for case in LATER] + [(smaller, case) for case in LATER if case not in NOT_IN_A_SMALLER],
)
def test_changed_later(make, case):
    middle, change = LATER[case]

    def do(net):
        net.eval()(X)
        change(net)
        torch.manual_seed(0)
        return net(X)

    agree(make, Net(middle), do)


class Optional(Net):
    def forward(self, x, a=None, b=None, scale=1.0):
        h = super().forward(x.flatten(1) if x.dim() > 3 else x)
        h = h + scale.mean() if isinstance(scale, torch.Tensor) else h * scale
        h = h if a is None else h + a
        return h if b is None else h * b


class ByNumber(Net):
    def forward(self, x):
        h = super().forward(x)
        return h * 2 if x.shape[0] == 1 else h * 3 if x.shape[0] > 8 else h


THREE = torch.full((5, 1), 3.0)


@pytest.mark.parametrize("make", [sparse, smaller])
@pytest.mark.parametrize("example", [X, {"x": X, "b": THREE}, {"x": X, "scale": 2.0}])
@pytest.mark.parametrize("given", [
    {}, {"a": THREE}, {"b": THREE}, {"scale": torch.tensor(3.0)}, {"scale": 0.5}, {"a": THREE, "b": THREE},
])  # fmt: skip
def test_inputs_that_may_be_left_out(example, given, make):
    agree(make, Optional(lambda net, h: h), lambda net: net.eval()(X, **given), example)


@pytest.mark.parametrize("make", [sparse, smaller])
def test_inputs_by_place(make):
    net = Optional(lambda net, h: h)
    agree(make, net, lambda net: net.eval()(X, THREE), {"x": X, "b": THREE})


@pytest.mark.parametrize("make", [sparse, smaller])
@pytest.mark.parametrize("size", [1, 2, 5, 15])
def test_what_is_done_by_the_number_of_examples(size, make):
    agree(make, ByNumber(lambda net, h: h), lambda net: net.eval()(floats(size, 4)), X[:2])


def test_a_sparse_form_of_a_smaller_network_keeps_what_is_settled():
    net = Net(lambda net, h: h * net.k).eval()
    small = dp.compact(net, mask_of(net), X)
    fast = dp.sparsify(small, small.mask, X, layers="sparse")
    with pytest.raises(AttributeError, match="k was read when this network was made"):
        fast.k = 3.0


def test_generators_are_where_they_were():
    net = Net(lambda net, h: h + torch.randn(6) * random.random())
    for make in (sparse, smaller):
        torch.manual_seed(5)
        random.seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(net)
        after = float(torch.rand(())), random.random()
        torch.manual_seed(5)
        random.seed(5)
        assert after == (float(torch.rand(())), random.random())
