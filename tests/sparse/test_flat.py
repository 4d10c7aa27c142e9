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
    steps, _, _, _, offsets, _ = region._flat.tables
    layer = next(step for step in steps if step[flat_kernels.KIND] == flat_kernels.LAYER)
    last = layer[flat_kernels.INPUT] + offsets.max() + layer[flat_kernels.VECTORS] * LANES
    assert last <= region._flat.size


def test_layers_of_the_same_stride_have_their_input_sorted_once():
    net = spoken(Residual().eval())
    mask = {name: floats(*p.shape) > 0 for name, p in net.named_parameters() if p.dim() > 1}
    sparse = dp.sparsify(net, mask, floats(1, 3, 9, 11), layers="sparse")
    one_by_one(sparse, floats(1, 3, 9, 11))
    kinds = [
        region._flat.tables[0][:, flat_kernels.KIND].tolist()
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


def kinds_of(sparse):
    """The kinds of all steps of a network, for one image."""
    (region,) = [each for part in sparse.regions.values() for each in part._known.values()]
    return region._flat.tables[0][:, flat_kernels.KIND].tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("size", [(8, LANES), (4, 2 * LANES), (2, 4 * LANES), (1, 8 * LANES), (16, LANES)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(3, 1, 1, 1), (1, 1, 0, 1), (3, 2, 1, 1), (1, 2, 0, 1), (5, 2, 2, 1), ((5, 3), 1, (4, 1), (2, 1)), (4, 2, 1, 1)],
)
def test_layers_by_rows(kernel, stride, padding, dilation, size, groups, threads, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr(flat, "TEAM_WORK", 0)
    monkeypatch.setattr(flat, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(flat, "FIRST_LEVEL_BYTES", 1 << 30 if groups == 1 else 1)
    net = nn.Sequential(nn.Conv2d(5, 7, kernel, stride, padding, dilation), nn.BatchNorm2d(7), nn.ReLU())
    net = spoken(net.eval())
    kept = floats(*net[0].weight.shape) > 0.3
    kept[2], kept[:, 3], kept[4, :, :, 0] = False, False, False  # an output, an input and a column with nothing left
    x = floats(1, 5, size[0] * stride, size[1] * stride)
    sparse = dp.sparsify(net, {"0.weight": kept}, x, layers="sparse")
    assert_near(one_by_one(sparse, x), masked(net, {"0.weight": kept}).double()(x.double()))
    assert flat_kernels.ROWS in kinds_of(sparse)
    assert_near(sparse(2 * x), masked(net, {"0.weight": kept}).double()(2 * x.double()))  # the borders are still zero


@pytest.mark.parametrize(
    ("size", "kernel", "padding"),
    [((8, LANES + 1), 3, 1), ((7, LANES), 3, 1), ((8, LANES), 5, 2), ((10, LANES + 2), 3, 0), ((8, 3 * LANES), 3, 1)],
)
def test_layers_not_by_rows(size, kernel, padding):
    net = nn.Sequential(nn.Conv2d(2, 3, kernel, padding=padding)).eval()
    kept = floats(*net[0].weight.shape) > 0
    sparse = dp.sparsify(net, {"0.weight": kept}, floats(1, 2, *size), layers="sparse")
    assert_near(one_by_one(sparse, floats(1, 2, *size)), masked(net, {"0.weight": kept})(floats(1, 2, *size)))
    assert flat_kernels.ROWS not in kinds_of(sparse)


class Around(nn.Module):
    """A layer whose output is added to what it and another one read, or to what only it does."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, first, padding=first // 2)
        self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        y = self.second(x) + x  # reads what it is added to
        z = self.third(y).relu() + self.third(x)
        return torch.cat([(self.second(z) + y).relu(), z], 1)


@pytest.mark.parametrize("first", [3, 5])  # 5: read as a line, which those after it can not read by rows, then
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_of_layers_by_rows(first, threads, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr(flat, "TEAM_WORK", 0)
    net = spoken(Around(first).eval())
    mask = {name: floats(*p.shape) > -0.5 for name, p in net.named_parameters() if p.dim() > 1}
    x = floats(3, 4, 16, LANES)
    sparse = dp.sparsify(net, mask, x[:1], layers="sparse")
    expected = masked(net, mask).double()(x.double())
    for _ in range(2):
        assert_near(one_by_one(sparse, x), expected)
    assert (flat_kernels.ROWS in kinds_of(sparse)) == (first == 3)


@pytest.mark.parametrize("width", [LANES, LANES - 1])  # by rows, and as a line
def test_memory_is_used_again(width):
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(12)]
    x, sizes = floats(1, 4, 16, width), []
    for count in (3, 12):
        net = nn.Sequential(*layers[:count]).eval()
        mask = {name: floats(*p.shape) > 0 for name, p in net.named_parameters() if p.dim() > 1}
        sparse = dp.sparsify(net, mask, x, layers="sparse")
        assert_near(one_by_one(sparse, x), masked(net, mask).double()(x.double()))
        sizes.append(next(iter(sparse.regions["region_0"]._known.values()))._flat.size)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("threads", [1, 2])
def test_zeros_around_rows_are_written_with_them(threads):
    torch.set_num_threads(threads)
    down, last = nn.Conv2d(3, 9, 3, stride=2, padding=1), nn.Conv2d(9, 9, (5, 3), padding=(2, 1))
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), down, last).eval()
    mask = {name: floats(*p.shape) > 0 for name, p in net.named_parameters() if p.dim() > 1}
    x = floats(1, 2, 32, 2 * LANES)
    sparse = dp.sparsify(net, mask, x, layers="sparse")
    expected = one_by_one(sparse, x)
    assert_near(expected, masked(net, mask).double()(x.double()))
    region = next(iter(sparse.regions["region_0"]._known.values()))
    region._free[0].arena[region._flat.inputs[0].size :] = torch.nan
    assert torch.equal(one_by_one(sparse, x), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_beside_its_pixel(value):
    net = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)).eval()
    mask = {"0.weight": torch.ones(1, 1, 3, 3, dtype=torch.bool)}
    x = floats(1, 1, 8, LANES)
    x[0, 0, 3, -1] = value
    sparse = dp.sparsify(net, mask, x, layers="sparse")
    assert torch.equal(one_by_one(sparse, x).isfinite(), net(x).isfinite())
