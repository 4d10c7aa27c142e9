"""Two layers in a row as one step: the same numbers as one after the other, and as torch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import driveprune as dp
from driveprune.sparse import batch, wide
from driveprune.sparse.batch_kernels import FIELDS, PAIR
from driveprune.sparse.code import LANES
from driveprune.sparse.pair_kernels import row_of
from driveprune.sparse.pairs import LEAST_ROW, fit, follower, pay
from driveprune.sparse.region import FEW
from driveprune.sparse.step import Step
from driveprune.sparse.tiling import SIZES, row_by_row
from tests.sparse.literal import assert_near, floats, layer_of, masked, random_mask, spoken


class Two(nn.Module):
    """Two convolutions; the second one with another tensor that is added to it, with a pool, or alone."""

    def __init__(self, channels, kernels, stride=(1, 1), pad=True, dilation=1, end="relu"):
        super().__init__()
        inputs, middle, outputs = channels
        one, two = kernels
        self.a = nn.Conv2d(inputs, middle, one, stride, [(k - 1) // 2 for k in one])
        padding = [dilation * (k - 1) // 2 for k in two] if pad else 0
        self.b = nn.Conv2d(middle, outputs, two, 1, padding, dilation)
        self.aside = nn.Conv2d(inputs, outputs, 1, stride)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (middle, outputs))
        self.end = end

    def forward(self, x):
        y = self.norms[1](self.b(F.relu(self.norms[0](self.a(x)))))
        if self.end == "plus":
            return F.relu(y + self.aside(x))
        return F.max_pool2d(F.relu(y), 2) if self.end == "halves" else y


def said(net, mask, x, together: bool | None = True):
    """What a network says, and how many pairs it is done in; its scratch is full of what is no number before."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(batch, "pay", pay if together is None else lambda *_: together)
        sparse = dp.sparsify(net, mask, x[:1], layers="sparse")
        first = sparse(x)
        parts = [
            part
            for region in sparse.regions.values()
            for made in region._known.values()
            for part in getattr(made, "_parts", ())
        ]
        for memory in (each for part in parts for each in part._free):
            memory.scratch.fill(float("nan"))
        found = sparse(x)
    assert torch.equal(found, first)
    return found, sum(int((part._steps[:, FIELDS["kind"]] == PAIR).sum()) for part in parts)


def check(net, mask, x, pairs):
    found, count = said(net, mask, x)
    assert count == pairs
    apart, none = said(net, mask, x, together=False)
    assert none == 0
    assert_near(found, apart, 2e-6)
    assert_near(found, masked(net, mask).double()(x.double()))


@st.composite
def cases(draw):
    """Networks of two layers, and a size of images."""
    size = [draw(st.integers(1, 20)), draw(st.integers(8, 40))]
    kernels = st.sampled_from([(1, 1), (3, 3), (3, 3), (5, 3), (1, 5)])
    net = Two(
        [draw(st.integers(1, 20)) for _ in range(3)],
        (draw(kernels), draw(kernels)),
        draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (3, 1)])),
        dilation=draw(st.sampled_from([1, 1, 2])),
        end=draw(st.sampled_from(["relu", "plus", "halves"])),
    )
    return net, size


@settings(max_examples=60)
@given(cases(), st.integers(FEW + 1, 70), st.sampled_from([0.0, 0.5, 0.9, 0.99]), st.integers(0, 999), st.booleans())
def test_any_pair(case, count, sparsity, seed, team):
    net, size = case
    torch.set_num_threads(2 if team else 1)
    net = spoken(net.eval(), seed)
    mask = random_mask(net, sparsity, seed)
    mask["b.weight"][0] = mask["a.weight"][-1] = False
    x = floats(count, net.a.in_channels, *size, seed=seed)
    with torch.no_grad():
        if min(net.b(net.a(x[:1])).shape[2:]) < 2:  # nothing to pool
            net.end = "relu"
    found, _ = said(net, mask, x)
    apart, none = said(net, mask, x, together=False)
    assert none == 0
    assert_near(found, apart, 2e-6)
    assert_near(found, masked(net, mask).double()(x.double()))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("end", ["relu", "plus", "halves"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("density", [0.02, 0.4])  # one group of inputs, and several
def test_pairs_of_wide_layers(threads, end, stride, density):
    torch.set_num_threads(threads)
    net = spoken(Two((30, 40, 40), ((3, 3), (3, 3)), (stride, stride), end=end).eval())
    x = floats(2 * LANES * threads + 2 * LANES - 1, 30, 16 * stride, 16 * stride)
    check(net, random_mask(net, 1 - density), x, 1 if threads == 1 else 2)


def test_the_same_sums_in_the_same_order():
    torch.set_num_threads(1)
    net = spoken(Two((70, 64, 64), ((3, 3), (3, 3)), end="plus").eval())
    mask, x = random_mask(net, 0.8), floats(LANES, 70, 32, 32)
    (found, pairs), (apart, none) = said(net, mask, x, together=None), said(net, mask, x, together=False)
    assert (pairs, none) == (1, 0)
    assert torch.equal(found, apart)


@pytest.mark.parametrize(("height", "pad"), [(2, True), (3, True), (5, False), (6, False), (9, False)])
@pytest.mark.parametrize("end", ["relu", "halves"])
def test_few_rows(height, pad, end):
    torch.set_num_threads(1)
    rows = height if pad else height - 4
    end = "relu" if rows < 2 else end  # nothing to pool
    net = spoken(Two((3, 5, 4), ((3, 3), (5, 3)), pad=pad, end=end).eval())
    x = floats(LANES + 3, 3, height, 16 if pad else 18)
    check(net, random_mask(net, 0.5), x, 1 if end == "relu" or rows % 2 == 0 else 0)


class Chain(nn.Module):
    """Four layers in a row, of which the second one's output is needed again, and a fifth."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(n, 6, 3, padding=1) for n in (3, 6, 6, 6, 6))

    def forward(self, x):
        first = F.relu(self.layers[1](self.layers[0](x)))
        second = self.layers[2](first)
        return self.layers[4](F.relu(self.layers[3](second) + first))


@pytest.mark.parametrize("count", [FEW + 1, 2 * LANES, 5 * LANES])
def test_longer_chains(count, monkeypatch):
    monkeypatch.setattr(wide, "LEAST_LAYERS", 99)  # all of them side by side
    torch.set_num_threads(1)
    net = spoken(Chain().eval())
    check(net, random_mask(net, 0.5), floats(count, 3, 16, 16), 2)


def test_threads_share_a_block_of_images():
    torch.set_num_threads(2)
    net = spoken(Two((3, 4, 4), ((3, 3), (3, 3))).eval())
    check(net, random_mask(net, 0.5), floats(LANES, 3, 16, 16), 0)


def test_where_rows_are():
    assert [row_of(number, 3, 3) for number in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [row_of(number, 4, 2) for number in range(8)] == [0, 1, 2, 3, 2, 3, 2, 3]
    assert [row_of(number, 7, 4) for number in range(13)] == [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4]


def test_who_follows():
    a, b = (Step("layer", (name,), after) for name, after in (("x", "y"), ("y", "z")))
    assert follower(a, [a, b], 1) is b
    assert follower(a, [a, b], 2) is None
    assert follower(a, [a, Step("relu", ("y",), "z")], 1) is None
    assert follower(a, [a, Step("layer", ("x",), "z", plus="y")], 1) is None
    assert follower(Step("layer", ("x",), "y", plus="x"), [b], 1) is None
    assert follower(Step("layer", ("x",), "y", halves=True), [b], 1) is None


def test_what_fits_and_pays():
    kept = torch.ones(2, 2, 3, 3, dtype=torch.bool)
    same, fewer, strided = layer_of(kept, padding=(1, 1)), layer_of(kept), layer_of(kept, (2, 2), (1, 1))
    assert fit(same, same, (5, 8), halves=False)
    assert not fit(same, same, (5, 8), halves=True)  # an odd number of rows
    assert not fit(same, strided, (16, 16), halves=False)
    assert fit(strided, same, (16, 16), halves=True)
    assert not fit(same, fewer, (9, 9), halves=False)  # less than a tile
    long, odd, small = (5, LEAST_ROW // 2), (5, LEAST_ROW // 2 + 6), (5, LEAST_ROW // 2 - 8)
    assert pay(same, same, long)
    assert not pay(same, same, odd)
    assert not pay(same, same, small)
    assert not pay(same, fewer, long)


def test_rows_of_a_stride_that_stay():
    """A ring of three rows, of which two are new each time."""
    kept = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    tiling = row_by_row(layer_of(kept, (2, 2), (1, 1)), 8, 16, 1)
    assert tiling.sizes[SIZES["rows"]] == 3
    assert tiling.bands[:, [0, 3, 4]].tolist() == [[-1, 0, 0], [1, 1, 2], [3, 1, 1], [5, 1, 0]]
