"""Steps of a region: what belongs together is done together, and nothing else."""

import copy
import operator
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from driveprune.sparse.blocked import Kernel
from driveprune.sparse.region import fused
from driveprune.sparse.step import Step
from tests.nets import DenseLike, InceptionLike, UNetLike
from tests.sparse.literal import Residual, assert_near, assert_same_gradients, floats, masked, random_mask, spoken


def layer(name, output):
    return Step("layer", (name,), output)


def norm(name, output):
    return Step("norm", (name,), output, norm=nn.BatchNorm2d(1))


def relu(name, output):
    return Step("relu", (name,), output, relu=True)


def test_a_layer_takes_all_that_follows():
    steps = [layer("x", "a"), norm("a", "b"), layer("x", "s"), Step("add", ("b", "s"), "c"), relu("c", "d")]
    found = fused(steps, {"d"})
    assert [(each.kind, each.output, each.plus, each.relu) for each in found] == [
        ("layer", "b", None, False), ("layer", "d", "b", True),
    ]  # fmt: skip
    assert found[0].norm is steps[1].norm


def test_what_others_need_stays_by_itself():
    steps = [layer("x", "a"), relu("a", "b"), Step("add", ("a", "b"), "c")]
    assert [each.kind for each in fused(steps, {"c"})] == ["layer", "relu", "add"]
    assert [each.output for each in fused([layer("x", "a"), relu("a", "b")], {"a", "b"})] == ["a", "b"]


def test_a_value_plus_itself():
    steps = [layer("x", "a"), Step("add", ("a", "a"), "b")]
    assert [each.kind for each in fused(steps, {"b"})] == ["layer", "add"]


def test_a_norm_after_a_sum_or_a_clip_is_a_step_of_its_own():
    steps = [layer("x", "a"), Step("add", ("a", "x"), "b"), norm("b", "c")]
    assert [each.kind for each in fused(steps, {"c"})] == ["layer", "norm"]
    steps = [layer("x", "a"), relu("a", "b"), norm("b", "c")]
    assert [each.kind for each in fused(steps, {"c"})] == ["layer", "norm"]


class Calls(nn.Module):
    """One convolution and then whatever a function does."""

    def __init__(self, after):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.after = after

    def forward(self, x):
        return self.after(self, x)


INSIDE = {
    "itself": lambda m, x: operator.add(*[m.conv(x)] * 2),
    "both branches": lambda m, x: m.conv(x) + m.other(x),
    "both branches, relu": lambda m, x: m.relu(m.norm(m.conv(x)) + m.other(x)),
    "norm of a sum": lambda m, x: m.norm(m.conv(x) + m.other(x)),
    "in place": lambda m, x: m.relu(m.conv(x)) + m.conv(x),
    "augmented": lambda m, x: operator.iadd(m.conv(x), m.other(x)).relu_(),
    "the same layer twice": lambda m, x: m.conv(x) + m.norm(m.conv(F.relu(x))),
    "the same norm twice": lambda m, x: torch.cat([m.norm(m.conv(x)), m.norm(m.other(x))], dim=1),
    "cat from the end": lambda m, x: torch.cat((m.conv(x), x, m.other(x)), -3),
    "methods": lambda m, x: m.conv(x).relu().add(m.other(x)).flatten(1),
    "functions": lambda m, x: torch.flatten(F.max_pool2d(torch.relu(m.conv(x)), 2, stride=1, padding=1), start_dim=1),
    "average": lambda m, x: F.adaptive_avg_pool2d(m.conv(x), (2, 3)).flatten(start_dim=1),
    "several outputs": lambda m, x: (m.conv(x), m.relu(m.other(x))),
}
OUTSIDE = {
    "number": lambda m, x: m.conv(x) + 1,
    "alpha": lambda m, x: torch.add(m.conv(x), m.other(x), alpha=0.3),
    "broadcast": lambda m, x: m.conv(x) + F.adaptive_avg_pool2d(m.other(x), 1),
    "batch": lambda m, x: m.conv(x) + m.other(x).mean(0, keepdim=True),
    "cat of images": lambda m, x: torch.cat([m.conv(x), m.other(x)]),
    "cat of rows": lambda m, x: torch.cat([m.conv(x), m.other(x)], 2),
    "flat pixels": lambda m, x: m.conv(x).flatten(2),
    "all flat": lambda m, x: m.conv(x).flatten(),
    "ceil": lambda m, x: F.max_pool2d(m.conv(x), 2, ceil_mode=True),
    "transposed": lambda m, x: m.conv(x.transpose(2, 3)).transpose(2, 3),
    "batch moved": lambda m, x: m.conv(x).transpose(0, 1),
    "sliced": lambda m, x: m.conv(x)[:, :2] + m.other(x)[:, 2:],
}


@pytest.mark.parametrize("name", [*INSIDE, *OUTSIDE])
def test_calls_mean_the_same(name):
    net = spoken(Calls({**INSIDE, **OUTSIDE}[name]).eval())
    mask = {each: floats(4, 3, 3, 3, seed=3) > 0.3 for each in ("conv.weight", "other.weight")}
    sparse = dp.sparsify(net, mask, floats(1, 3, 7, 5), layers="sparse")
    exact = masked(net, mask).double()
    for count in (1, 2, 9):
        for learns in (False, True):
            with torch.set_grad_enabled(learns):
                found, expected = sparse(floats(count, 3, 7, 5)), exact(floats(count, 3, 7, 5).double())
            pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
            for a, b in pairs:
                assert_near(a, b)
    kinds = {step.kind for region in sparse.regions.values() for step in region.steps}
    assert "layer" in kinds


@pytest.mark.parametrize("name", INSIDE)
def test_calls_that_are_known_make_one_region(name):
    net = Calls(INSIDE[name])
    mask = {each: floats(4, 3, 3, 3, seed=3) > 0.3 for each in ("conv.weight", "other.weight")}
    sparse = dp.sparsify(net, mask, floats(2, 3, 7, 5), layers="sparse")
    assert len(sparse.regions) == 1
    names = {str(node.target) for node in sparse.graph.nodes if node.op not in {"placeholder", "output"}}
    assert names - {"<built-in function getitem>"} == set(sparse.regions)


@pytest.mark.parametrize("name", INSIDE)
def test_calls_have_the_same_gradients(name):
    """In training; no value of these nets is so close to zero that rounding decides a clip."""
    net = spoken(Calls(INSIDE[name]).train())
    mask = {each: floats(4, 3, 3, 3, seed=3) > 0.3 for each in ("conv.weight", "other.weight")}
    sparse = dp.sparsify(net, mask, floats(2, 3, 7, 5), layers="sparse")
    exact = masked(net, mask).double()
    found_x, exact_x = floats(11, 3, 7, 5).requires_grad_(), floats(11, 3, 7, 5).double().requires_grad_()
    found, expected = sparse(found_x), exact(exact_x)
    if isinstance(found, tuple):
        found, expected = found[0] + found[1], expected[0] + expected[1]
    assert_near(found, expected)
    slope = floats(*found.shape)
    found.backward(slope)
    expected.backward(slope.double())
    assert_near(found_x.grad, exact_x.grad, 1e-4)
    assert_same_gradients(sparse, exact, mask)
    for key, value in exact.named_buffers():
        assert_near(sparse.get_buffer(key), value)


class Added(nn.Module):
    """A layer whose input is added to its output, before or after a norm."""

    def __init__(self, with_norm):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if with_norm else nn.Identity()

    def forward(self, x):
        x = self.conv(x).relu()
        return self.norm(self.other(x)).add(x).relu()


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.7])
def test_a_layer_plus_its_own_input(with_norm, density):
    net = spoken(Added(with_norm).train())
    mask = {"conv.weight": floats(4, 3, 3, 3) > 0, "other.weight": torch.rand(4, 4, 3, 3) < density}
    sparse = dp.sparsify(net, mask, floats(2, 3, 7, 5), layers="sparse")
    exact = masked(net, mask).double()
    found, expected = sparse(floats(11, 3, 7, 5)), exact(floats(11, 3, 7, 5).double())
    assert_near(found, expected)
    slope = floats(*found.shape)
    found.backward(slope)
    expected.backward(slope.double())
    assert_same_gradients(sparse, exact, mask)


def test_an_empty_layer_sends_no_zeros_back_if_others_send_gradients(monkeypatch):
    net = spoken(Calls(lambda m, x: m.conv(x) + m.other(x)).train())
    mask = {"conv.weight": floats(4, 3, 3, 3) > 0, "other.weight": torch.zeros(4, 3, 3, 3, dtype=torch.bool)}
    for kept in (mask, {**mask, "conv.weight": mask["other.weight"]}):  # one layer is empty, or both
        sparse = dp.sparsify(net, kept, floats(2, 3, 7, 5), layers="sparse")
        exact, found_x = masked(net, kept).double(), floats(11, 3, 7, 5).requires_grad_()
        exact_x, called = floats(11, 3, 7, 5).double().requires_grad_(), []
        for name in ("input_gradient", "both_gradients"):
            original = getattr(Kernel, name)
            monkeypatch.setattr(Kernel, name, lambda *a, f=original, n=called, **k: n.append(1) or f(*a, **k))
        sparse(found_x).square().sum().backward()
        monkeypatch.undo()
        exact(exact_x).square().sum().backward()
        assert_near(found_x.grad, exact_x.grad)
        assert len(called) == 1
        assert_same_gradients(sparse, exact, kept)


def test_no_gradient_of_the_networks_input_is_computed(monkeypatch):
    net = Calls(INSIDE["both branches"])
    mask = {each: floats(4, 3, 3, 3, seed=3) > 0.3 for each in ("conv.weight", "other.weight")}
    sparse, called = dp.sparsify(net, mask, floats(2, 3, 7, 5), layers="sparse"), []
    for name in ("input_gradient", "both_gradients"):
        monkeypatch.setattr(Kernel, name, lambda *a, **k: called.append(a))
    sparse(floats(11, 3, 7, 5)).sum().backward()
    assert not called
    assert sparse.other.weight.grad.any()


def test_sizes_that_meet_only_in_the_example():
    """Sums whose sides have one size in the example, and two later, are stretched as torch does."""
    for after in (
        lambda m, x: m.norm(m.conv(x)) + F.adaptive_avg_pool2d(x, 1)[:, :1].expand(-1, 4, -1, -1),
        lambda m, x: torch.relu(m.conv(x) + m.other(F.adaptive_avg_pool2d(x, 1))),
        lambda m, x: torch.relu(m.norm(m.other(F.adaptive_avg_pool2d(x, 1))) + m.conv(x)),
    ):
        net = spoken(Calls(after).eval())
        mask = {each: floats(4, 3, 3, 3, seed=3) > 0.3 for each in ("conv.weight", "other.weight")}
        sparse, exact = dp.sparsify(net, mask, floats(1, 3, 1, 1), layers="sparse"), masked(net, mask).double()
        for count in (1, 9):
            for learns in (True, False):
                with torch.set_grad_enabled(learns):
                    x = floats(count, 3, 6, 6)
                    assert_near(sparse(x), exact(x.double()))


@pytest.mark.parametrize("make", [DenseLike, InceptionLike, UNetLike, Residual])
def test_inference_folds_and_agrees(make):
    net = spoken(make().eval())
    mask = random_mask(net, 0.8)
    sparse, exact = dp.sparsify(net, mask, floats(1, 3, 8, 8), layers="sparse"), masked(net, mask).double()
    assert not any(region._in_training() for region in sparse.regions.values())
    for count in (1, 13):
        x = floats(count, 3, 8, 8)
        with torch.no_grad():
            assert_near(sparse(x), exact(x.double()), 2e-5)


def test_a_copy_has_modules_of_its_own():
    net = spoken(Residual().eval())
    sparse = dp.sparsify(net, random_mask(net, 0.8), floats(1, 3, 8, 8), layers="sparse")
    other = copy.deepcopy(sparse)
    x = floats(2, 3, 8, 8)
    with torch.no_grad():
        before = sparse(x)
        for weight in other.parameters():
            weight.zero_()
        assert not other(x).any()
        assert torch.equal(sparse(x), before)
    mine = {id(module) for module in other.modules()}
    assert all(
        id(step.module) in mine for region in other.regions.values() for step in region.steps if step.kind == "layer"
    )


class Hesitant(dict):
    """Lets other threads go on between a question and what is done about the answer."""

    def __contains__(self, key):
        found = super().__contains__(key)
        time.sleep(0.001)
        return found


def test_threads_with_more_sizes_than_are_kept():
    net = nn.Sequential(nn.Conv2d(1, 1, 1)).eval()
    sparse = dp.sparsify(net, {"0.weight": torch.ones(1, 1, 1, 1) > 0}, floats(1, 1, 1, 1), layers="sparse")
    sparse.regions["region_0"]._known = Hesitant()

    def call(seed):
        choose = random.Random(seed)
        with torch.no_grad():
            for _ in range(50):
                x = floats(choose.randint(4, 12), 1, 1, 1)
                assert_near(sparse(x), net(x))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))
