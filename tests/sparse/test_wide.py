"""The first layers of a batch, image by image: the same numbers as side by side, and as torch."""

import copy

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import driveprune as dp
from driveprune.sparse import wide, wide_kernels
from driveprune.sparse.batch import BatchRegion
from driveprune.sparse.code import LANES
from driveprune.sparse.step import Step
from tests.sparse.literal import assert_near, floats, halves, masked, spoken


class Deep(nn.Module):
    """Layers by rows, one with a stride and two ways around some; then one over smaller images, and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.second, self.third = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.down, self.around = nn.Conv2d(6, 5, 3, stride=2, padding=1), nn.Conv2d(6, 5, 1, stride=2)
        self.last = nn.Sequential(nn.Conv2d(5, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.linear = nn.Linear(8 * LANES, 3)

    def forward(self, x):
        x = self.first(x)
        x = (self.third(self.second(x).relu()) + x).relu()
        return self.linear(self.last((self.down(x) + self.around(x)).relu()))


SIZE = (16, 2 * LANES)


@pytest.fixture
def net():
    """A network in evaluation, and its mask."""
    found = spoken(Deep().eval())
    return found, {name: floats(*p.shape) > 0.5 for name, p in found.named_parameters() if p.dim() > 1}


def is_wide(sparse):
    """Whether the first steps are done image by image, in all that was made for batches."""
    regions = [each for part in sparse.regions.values() for each in part._known.values()]
    found = {part._wide is not None for each in regions if isinstance(each, BatchRegion) for part in each._parts}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=12)
@given(count=st.integers(LANES // 2 + 1, 130))
def test_batches_of_any_size(threads, count):
    torch.set_num_threads(threads)
    net = spoken(Deep().eval())
    mask = {name: floats(*p.shape) > 0.5 for name, p in net.named_parameters() if p.dim() > 1}
    sparse = dp.sparsify(net, mask, floats(1, 3, *SIZE), layers="sparse")
    x = floats(count, 3, *SIZE)
    with torch.no_grad():
        found = sparse(x)
        assert_near(found, masked(net, mask).double()(x.double()))
        assert torch.equal(sparse(x), found)
    assert is_wide(sparse)


def test_weights_that_change_are_seen(net):
    net, mask = net
    sparse, x = dp.sparsify(net, mask, floats(1, 3, *SIZE), layers="sparse"), floats(20, 3, *SIZE)
    with torch.no_grad():
        before = sparse(x)
        for name in ("first.0.weight", "linear.weight"):  # of either part
            sparse.get_parameter(name).mul_(1.5)
            assert not torch.allclose(sparse(x), before)
            assert_near(sparse(x), dp.densify(sparse).double()(x.double()))


def test_other_memory_formats_and_copies(net):
    net, mask = net
    sparse, x = dp.sparsify(net, mask, floats(1, 3, *SIZE), layers="sparse"), floats(20, 3, *SIZE)
    with torch.no_grad():
        expected = sparse(x)
        assert torch.equal(sparse(x.to(memory_format=torch.channels_last)), expected)
        assert torch.equal(copy.deepcopy(sparse)(x), expected)
        with torch.inference_mode():
            assert torch.equal(sparse(x), expected)


@pytest.mark.parametrize("name", ["MOST_WEIGHTS", "LEAST_LAYERS"])
def test_only_where_it_pays(name, net, monkeypatch):
    monkeypatch.setattr(wide, name, {"MOST_WEIGHTS": 1, "LEAST_LAYERS": 7}[name])
    net, mask = net
    sparse, x = dp.sparsify(net, mask, floats(1, 3, *SIZE), layers="sparse"), floats(20, 3, *SIZE)
    with torch.no_grad():
        assert_near(sparse(x), masked(net, mask).double()(x.double()))
    assert not is_wide(sparse)


def test_a_value_that_is_needed_twice_does_not_lead_over():
    layers = [nn.Conv2d(2, 2, 3, padding=1) for _ in range(6)]
    mask = {"weight": torch.ones(2, 2, 3, 3, dtype=torch.bool)}
    made = [
        dp.sparsify(nn.Sequential(each), {"0.weight": mask["weight"]}, floats(1, 2, 16, LANES)) for each in layers
    ]
    names = ["x", *"abcdef"]
    steps = [Step("layer", (names[n],), names[n + 1], made[n].get_submodule("0")) for n in range(6)]
    inputs = {"x": (2, 16, LANES)}
    first, rest, between = wide.split(steps, inputs, ("f",))
    assert (len(first), len(rest), between) == (5, 1, "e")  # a layer is left to the others
    first, rest, between = wide.split(steps, inputs, ("f", "d"))
    assert (len(first), between) == (4, "d")
    assert wide.split(steps, inputs, ("f", "c")) is None  # three layers are too few
    assert wide.split(steps, inputs, ("f", "x")) is None
    assert wide.split(steps, {**inputs, "y": (2, 16, LANES)}, ("f",)) is None
    assert wide.split(steps, {"x": (2, 16, LANES + 1)}, ("f",)) is None


@pytest.mark.parametrize("pixels", [1, LANES - 1, LANES, 3 * LANES + 5])
def test_images_side_by_side(pixels):
    blocks, channels = 2, 3

    @numba.njit
    def call(images, target, to, low, high):
        wide_kernels.pack_planes(images, target, to, channels, pixels, low, high)

    images = halves(blocks * LANES * channels * pixels, 1)
    target, planes = halves(len(images) + 8, 2), images.reshape(blocks, LANES, channels, pixels)
    expected, each = target.copy(), pixels * LANES
    packed = planes.transpose(0, 2, 3, 1).reshape(-1)
    expected[8 + each : 8 + 5 * each] = packed[each : 5 * each]
    call(images, target, 8, 1, 5)
    assert np.array_equal(target, expected)
