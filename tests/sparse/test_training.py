"""A training step in two calls is the one that is done step by step."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import driveprune as dp
from driveprune.sparse import training_kernels as kernels
from driveprune.sparse.code import LANES
from driveprune.sparse.memory import MEMORY
from driveprune.sparse.region import Region
from driveprune.sparse.training import TrainingRegion
from tests.sparse.literal import assert_near, assert_same_gradients, floats, masked, random_mask


class Block(nn.Module):
    """Two layers and a way around them: as it is, or through a layer of its own."""

    def __init__(self, inputs, outputs, stride=1, clipped=True):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.around = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.last = nn.ReLU() if clipped else nn.Identity()

    def forward(self, x):
        return self.last(self.second(torch.relu(self.first(x))) + self.around(x))


class Around(nn.Module):
    """One layer and a way around it."""

    def __init__(self, channels):
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        return torch.relu(self.inside(x) + x)


def layer(inputs, outputs, *after, size=3, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), *after
    )


NETS = {
    "pools": lambda: nn.Sequential(
        layer(3, 8, nn.MaxPool2d(2)), layer(8, 9), layer(9, 6, nn.MaxPool2d(2)), nn.Flatten(), nn.Linear(24, 5)
    ),
    "residual": lambda: nn.Sequential(
        layer(3, 8), Block(8, 8), Block(8, 12, 2), Block(12, 12, clipped=False), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(12, 5),
    ),
    "around one layer": lambda: nn.Sequential(
        layer(3, 8), Around(8), Around(8), layer(8, 4), nn.Flatten(), nn.Linear(256, 5)
    ),
    "normalised on the way": lambda: nn.Sequential(
        layer(3, 8), layer(8, 9, stride=2), nn.Conv2d(9, 7, 3, padding=1), nn.BatchNorm2d(7), nn.Conv2d(7, 6, 1),
        nn.BatchNorm2d(6), layer(6, 4, size=5), nn.Flatten(), nn.Linear(64, 5),
    ),
    "linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(192, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.BatchNorm1d(12),
        nn.ReLU(), nn.Linear(12, 5),
    ),
    "without normalisation": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(8, 6, 2), nn.ReLU(),
        nn.MaxPool2d(2, 1, 1), nn.Flatten(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5),
    ),
}  # fmt: skip


def sparse_of(name, sparsity, seed=0):
    torch.manual_seed(seed)
    net = NETS[name]().train()
    mask = random_mask(net, sparsity, seed)
    return net, mask, dp.sparsify(copy.deepcopy(net), mask, floats(1, 3, 8, 8), layers="sparse").train()


def learnt(net, x, in_two_calls, steps=1):
    """Outputs of the last step, gradients of inputs and parameters, and the state after it."""
    calls, course = [], Region._course
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "_course", lambda *args: calls.append(course(*args)) or calls[-1])
        if not in_two_calls:
            patch.setattr(Region, "_course", lambda *_: None)
        x = x.clone().requires_grad_()
        for _ in range(steps):
            out = net(x)
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    assert bool(calls) == in_two_calls
    assert all(isinstance(each, TrainingRegion) for each in calls)
    gradients = {"x": x.grad, **{name: each.grad for name, each in net.named_parameters()}}
    return out.detach(), gradients, net.state_dict()


@pytest.mark.parametrize("name", NETS)
@settings(max_examples=8, deadline=None)
@given(
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 0.99]), count=st.integers(2, 3 * LANES + 2),
    threads=st.sampled_from([1, 2]), seed=st.integers(0, 9),
)  # fmt: skip
def test_the_same_as_step_by_step(name, sparsity, count, threads, seed):
    torch.set_num_threads(threads)
    _, mask, net = sparse_of(name, sparsity, seed)
    if not any(each.any() for each in mask.values()):
        return
    x = floats(count, 3, 8, 8)
    assert_alike(learnt(copy.deepcopy(net), x, True), learnt(copy.deepcopy(net), x, False))


def assert_alike(found, expected):
    """Equal up to rounding; gradients against the largest one."""
    assert_near(found[0], expected[0], 1e-6)
    largest = max(float(each.abs().max()) for each in expected[1].values() if each.numel())
    for key in expected[1]:
        assert_near(found[1][key], expected[1][key], 1e-5, scale=largest)
    for key in expected[2]:
        assert_near(found[2][key], expected[2][key], 1e-5)


@pytest.mark.parametrize("name", NETS)
def test_the_same_as_dense_in_double_precision(name):
    net, mask, sparse = sparse_of(name, 0.7)
    x = floats(2 * LANES + 5, 3, 8, 8)
    exact = masked(net, mask).double()
    learnt(sparse, x, True)
    out = exact(x.double())
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    assert_same_gradients(sparse, exact, mask)


def test_values_that_only_layers_need_are_not_written():
    def normalising(name):
        *_, net = sparse_of(name, 0.5)
        found, make = [], TrainingRegion.__init__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainingRegion, "__init__", lambda *args: make(*args) or found.append(args[0]))
            net(floats(20, 3, 8, 8)).sum().backward()
        kinds = found[0]._forward[0][:, kernels.KIND].tolist()
        return kinds.count(kernels.JOIN), kinds.count(kernels.NORM)

    assert normalising("normalised on the way") == (5, 1)  # the last one is flattened
    assert normalising("residual") == (8, 5)  # those that are added to something, or to which something is added


def test_gradients_go_back_through_normalisations_on_the_way():
    def going_back(name):
        *_, net = sparse_of(name, 0.5)
        net(floats(20, 3, 8, 8)).sum().backward()
        (region,) = _courses(net)
        kinds = region._backward[0][:, kernels.KIND].tolist()
        return [kinds.count(each) for each in (kernels.JOIN_BACK, kernels.NORM_BACK, kernels.WEIGHT_SUMS)]

    # In a pass of their own: that of the first layer, whose input needs no gradient, and that before the flattening
    assert going_back("normalised on the way") == [3, 2, 1]
    # That of the first layer, that before the mean, and that of a layer around two others, which a sum takes as it is
    assert going_back("residual") == [5, 3, 1]


def test_a_mean_that_is_large_beside_the_deviation():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 1, bias=True), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 3))
    mask = {name: torch.ones_like(each, dtype=torch.bool) for name, each in net.named_parameters() if each.dim() > 1}
    sparse = dp.sparsify(copy.deepcopy(net), mask, floats(1, 1, 6, 6), layers="sparse").train()
    x = 100 + floats(LANES + 5, 1, 6, 6)
    assert_near(sparse(x), net.double()(x.double()), 1e-4)


def test_a_layer_without_weights():
    net, mask, _ = sparse_of("residual", 0.5)
    for name in ("1.first.0.weight", "2.around.0.weight"):
        mask[name][:] = False
    sparse = dp.sparsify(copy.deepcopy(net), mask, floats(1, 3, 8, 8), layers="sparse").train()
    x = floats(LANES + 3, 3, 8, 8)
    assert_alike(learnt(copy.deepcopy(sparse), x, True), learnt(sparse, x, False))


def test_a_bias_before_a_normalisation_has_no_gradient():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU())
    sparse = dp.sparsify(net, random_mask(net, 0.3), floats(1, 3, 8, 8), layers="sparse").train()
    _, gradients, _ = learnt(sparse, floats(20, 3, 8, 8), True)
    assert not gradients["0.bias"].any()
    assert gradients["3.bias"].all()


def test_the_same_bits_every_time():
    """Three blocks of images: those of small images are done two at a time, and the rest adds to the same sums."""
    torch.set_num_threads(2)
    *_, net = sparse_of("pools", 0.5)
    x = floats(3 * LANES, 3, 8, 8)
    first = learnt(copy.deepcopy(net), x, True, steps=3)
    for _ in range(10):
        again = learnt(copy.deepcopy(net), x, True, steps=3)
        assert all(torch.equal(again[1][key], first[1][key]) for key in first[1])
        assert all(torch.equal(again[2][key], first[2][key]) for key in first[2])


def test_several_ways_there_before_one_back():
    *_, net = sparse_of("residual", 0.5)
    x, y = floats(20, 3, 8, 8), floats(20, 3, 8, 8) * 2
    alone = copy.deepcopy(net)
    for images in (y, x):
        alone(images).square().sum().backward()
    outputs = [net(images) for images in (y, x)]
    for out in reversed(outputs):
        out.square().sum().backward()
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad, 1e-5)


def test_twice_back_is_twice_the_gradient():
    *_, net = sparse_of("pools", 0.5)
    loss = net(floats(20, 3, 8, 8)).square().sum()
    loss.backward(retain_graph=True)
    once = [each.grad.clone() for each in net.parameters()]
    loss.backward()
    assert all(torch.equal(2 * a, b.grad) for a, b in zip(once, net.parameters(), strict=True))


def test_memory_is_used_again():
    *_, net = sparse_of("pools", 0.5)
    x = floats(64 * LANES, 3, 8, 8)
    losses = []
    for _ in range(4):  # what is kept of a step must not keep its memory
        losses.append(net(x).square().sum())
        losses[-1].backward()
    (region,) = _courses(net)
    assert len(MEMORY._known[region._plan.saved.size]) == 1
    assert len(MEMORY._known[region._plan.slopes.size]) == 1


def _courses(net):
    known = [each for region in net.regions.values() for each in region._known.values()]
    return [each for each in known if isinstance(each, TrainingRegion)]


@pytest.mark.parametrize("change", ["frozen", "evaluated"])
def test_what_goes_step_by_step(change):
    net, mask, sparse = sparse_of("residual", 0.5)
    dense = masked(net, mask)
    for each in (sparse, dense):
        for module in each.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(change != "frozen")
                module.train(change != "evaluated")
    x = floats(20, 3, 8, 8)
    for each in (sparse, dense):
        each(x).square().sum().backward()
    assert not _courses(sparse)
    assert_near(sparse(x), dense(x), 1e-5)


def test_nothing_that_is_not_needed_is_computed():
    """The gradient of the input is computed if it is asked for, else not."""
    *_, net = sparse_of("pools", 0.5)
    for wanted in (False, True):
        net(floats(20, 3, 8, 8).requires_grad_(wanted)).square().sum().backward()
    counts = []
    for course in _courses(net):
        steps, *_ = course._backward
        counts.append(int((steps[:, kernels.FIELDS["kind"]] == kernels.BOTH).sum()))
    assert counts == [3, 4]
