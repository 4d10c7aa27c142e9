"""One image at a time: the same numbers as side by side, and as torch."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import driveprune as dp
from driveprune.sparse import flat, flat_kernels
from driveprune.sparse.code import LANES
from driveprune.sparse.region import FEW
from tests.sparse.literal import Residual, assert_near, floats, masked, spoken
from tests.sparse.test_blocked import without_shift
from tests.sparse.test_kernels import cases


def one_by_one(network, x):
    """What the flat path says, and that it was taken."""
    with torch.no_grad():
        found = network(x)
    assert all(
        any(isinstance(each, flat.FlatRegion) for each in region._known.values())
        for region in network.regions.values()
    )
    return found


@settings(max_examples=150)
@given(cases(), st.integers(1, FEW), st.booleans(), st.booleans())
def test_any_layer_with_what_follows(case, batch, norm, relu):
    kept, layer, size, _, seed = case
    torch.manual_seed(seed)
    conv = nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.padding, layer.dilation)
    after = [*([nn.BatchNorm2d(layer.outputs)] if norm else []), *([nn.ReLU()] if relu else [])]
    net = spoken(nn.Sequential(conv, *after).eval(), seed)
    mask = {"0.weight": kept}
    x = floats(batch, layer.inputs, *size, seed=seed)
    found = one_by_one(dp.sparsify(net, mask, x[:1], layers="sparse"), x)
    assert_near(found, masked(net, mask).double()(x.double()))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("part", [6, 20])  # each thread has a part of all channels, or some channels
def test_flat_blocked_and_dense_agree(threads, part, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr(flat, "TEAM_WORK", 0)
    monkeypatch.setattr(flat, "ITEM_WORK", 1)
    monkeypatch.setattr(flat, "LEAST_PART", part)
    net = spoken(Residual().eval())
    mask = {name: floats(*p.shape) > 1 for name, p in net.named_parameters() if p.dim() > 1}
    sparse = dp.sparsify(net, mask, floats(1, 3, 17, 19), layers="sparse")
    x = floats(FEW + 1, 3, 17, 19)
    expected = masked(net, mask).double()(x.double())
    with torch.no_grad():
        assert_near(sparse(x), expected)
    assert_near(sparse(x), expected)
    assert_near(one_by_one(sparse, x[:1]), expected[:1])
    assert_near(one_by_one(sparse, x[1:]), expected[1:])


@pytest.mark.parametrize(
    "steps",
    [
        [nn.MaxPool2d(3, 2, 1)],
        [nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, padding=1)],
        [nn.MaxPool2d((2, 3), (1, 2))],
        [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)],
        [nn.Flatten(), nn.Dropout(0.5), nn.Linear(6 * 63, 5), nn.BatchNorm1d(5)],
        [nn.ReLU(), nn.BatchNorm2d(6), nn.Identity()],
        [nn.BatchNorm2d(6, affine=False), nn.ReLU(), without_shift(nn.BatchNorm2d(6))],
        [nn.Conv2d(6, 4, 1, stride=2), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 5, 1, stride=2)],
    ],
)
def test_steps(steps):
    torch.manual_seed(0)
    net = spoken(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *steps).eval())
    mask = {name: floats(*p.shape) > 0.3 for name, p in net.named_parameters() if p.dim() > 1}
    x = floats(2, 3, 7, 9)
    sparse = dp.sparsify(net, mask, x[:1], layers="sparse")
    assert_near(one_by_one(sparse, x), masked(net, mask).double()(x.double()))


@pytest.mark.parametrize("columns", [31, 32, 33, 46])
def test_pooling_of_wide_images_leaves_the_border_zero(columns):
    net = spoken(nn.Sequential(nn.Conv2d(3, 6, 1), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, padding=1)).eval())
    mask = {name: floats(*p.shape) > -1 for name, p in net.named_parameters() if p.dim() > 1}
    x = floats(1, 3, 6, columns)
    sparse = dp.sparsify(net, mask, x, layers="sparse")
    assert_near(one_by_one(sparse, x), masked(net, mask).double()(x.double()))


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3)])
def test_steps_that_are_not_known_go_side_by_side(pool):
    net = nn.Sequential(nn.Conv2d(3, 6, 3), pool).eval()
    mask = {"0.weight": floats(6, 3, 3, 3) > 0.3}
    sparse = dp.sparsify(net, mask, floats(1, 3, 9, 9), layers="sparse")
    with torch.no_grad():
        assert_near(sparse(floats(1, 3, 9, 9)), masked(net, mask)(floats(1, 3, 9, 9)))
    assert list(sparse.regions["region_0"]._known.values()) == [None]


def test_changed_weights_are_seen():
    net = spoken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval())
    mask = {"0.weight": floats(4, 3, 3, 3) > 0}
    sparse = dp.sparsify(net, mask, floats(1, 3, 6, 6), layers="sparse")
    x = floats(1, 3, 6, 6)

    def check():
        for images in (x, x.expand(9, 3, 6, 6)):
            with torch.no_grad():
                assert_near(sparse(images), dp.densify(sparse).double()(images.double()))

    check()
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.5)
    sparse(x).square().sum().backward()
    optimizer.step()
    check()
    sparse.load_state_dict({key: value * 2 for key, value in sparse.state_dict().items()})
    check()
    sparse.load_state_dict({key: value / 3 for key, value in sparse.state_dict().items()}, assign=True)
    check()
    weight = sparse.get_parameter("0.weight")
    weight.data = weight.data + 1
    check()
    with torch.no_grad():
        sparse.get_submodule("1").running_mean += 1
    check()
    sparse.train()
    sparse(floats(8, 3, 6, 6))  # moves the statistics
    sparse.eval()
    check()


def test_nothing_is_read_behind_the_end():
    net = nn.Sequential(nn.Conv2d(1, 1, (1, 3), dilation=(1, 200))).eval()
    sparse = dp.sparsify(net, {"0.weight": torch.ones(1, 1, 1, 3) > 0}, floats(1, 1, 1, 401), layers="sparse")
    assert_near(one_by_one(sparse, floats(1, 1, 1, 401)), net.double()(floats(1, 1, 1, 401).double()))
    (region,) = sparse.regions["region_0"]._known.values()
    steps, _, _, _, offsets, _ = region._tables
    layer = next(step for step in steps if step[flat_kernels.KIND] == flat_kernels.LAYER)
    last = layer[flat_kernels.INPUT] + offsets.max() + layer[flat_kernels.VECTORS] * LANES
    assert last <= region._size


def test_layers_of_the_same_stride_have_their_input_sorted_once():
    net = spoken(Residual().eval())
    mask = {name: floats(*p.shape) > 0 for name, p in net.named_parameters() if p.dim() > 1}
    sparse = dp.sparsify(net, mask, floats(1, 3, 9, 11), layers="sparse")
    one_by_one(sparse, floats(1, 3, 9, 11))
    kinds = [
        region._tables[0][:, flat_kernels.KIND].tolist()
        for each in sparse.regions.values()
        for region in each._known.values()
    ]
    assert sum(each.count(flat_kernels.SPREAD) for each in kinds) == 1  # for 3×3 and for 1×1


def test_offsets_that_would_be_too_long(monkeypatch):
    monkeypatch.setattr(flat, "LARGEST", 100)
    net = nn.Sequential(nn.Conv2d(3, 6, 3)).eval()
    mask = {"0.weight": floats(6, 3, 3, 3) > 0.3}
    sparse = dp.sparsify(net, mask, floats(1, 3, 9, 9), layers="sparse")
    with torch.no_grad():
        assert_near(sparse(floats(1, 3, 9, 9)), masked(net, mask)(floats(1, 3, 9, 9)))
    assert list(sparse.regions["region_0"]._known.values()) == [None]


def test_rows_of_very_deep_networks():
    pitches = [flat._Pitch(length) for length in range(5_000)]
    for first, second in pairwise(pitches):
        first.join(second)
    assert {pitch.length for pitch in (pitches[0], pitches[-1])} == {4_999}
