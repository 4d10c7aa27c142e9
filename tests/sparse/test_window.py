"""Normalisation, ReLU and max pooling at once: as one after the other, in float64 by torch."""

import copy

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import driveprune as dp
from driveprune.sparse import blocked, window
from driveprune.sparse.blocked import HALVES, normalise, pack, unpack
from driveprune.sparse.code import LANES
from driveprune.sparse.region import Region, with_pools
from driveprune.sparse.step import Step
from tests.sparse.literal import WIDTHS, aligned, assert_near, floats, halves, masked, random_mask

NUMBERS = np.array([2, -0.5, 0.5, 1.5, 0.25], np.float32)


def in_windows(x, rows, columns, width):
    """(rows, columns, 4, width) of a plane of twice as many rows and columns."""
    return x.reshape(rows, 2, columns, 2, width).transpose(0, 2, 1, 3, 4).reshape(rows, columns, 4, width)


def routed(four, slope):
    """The gradient of each window at the first of its largest pixels, if that is above zero."""
    value = four * NUMBERS[0] + NUMBERS[1]
    first = value.argmax(2)
    return (np.arange(4)[:, None] == first[:, :, None]) * (slope * (value.max(2) > 0))[:, :, None]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_three_loops(width, stream):
    rows, columns = 3, 5
    loops = [window.make_windows(each, width) for each in (window._scale, window._slope_sums, window._slope_apply)]
    scale, sums, apply = loops

    @numba.njit
    def call(y, slope, out, dy, s):
        form, base, small = (rows, columns), width, 2 * width
        scale(y, y, out, base, small, form, s[0], s[1], s[2], s[3], s[4], stream)
        apply(y, slope, dy, base, small, form, s[0], s[1], s[2], s[3], s[4], stream)
        return sums(y, slope, dy, base, small, form, s[0], s[1], s[2], s[3], s[4], stream)

    size = rows * columns * width
    y, slope = halves(4 * size + 2 * width, 1), halves(size + 3 * width, 2)
    out, dy = aligned(np.full(size + 3 * width, 7, np.float32)), aligned(np.full(4 * size + 2 * width, 7, np.float32))
    found = call(y, slope, out, dy, NUMBERS)
    a, b, mean, first, second = NUMBERS
    four = in_windows(y[width : width + 4 * size], rows, columns, width)
    back = routed(four, slope[2 * width : 2 * width + size].reshape(rows, columns, width))
    expected = np.maximum(four * a + b, 0).max(2)
    assert np.array_equal(out[2 * width : 2 * width + size].reshape(rows, columns, width), expected)
    applied = in_windows(dy[width : width + 4 * size], rows, columns, width)
    assert np.array_equal(applied, a * (back - first - (four - mean) * second))
    assert found == (back.sum(), (back * (four - mean)).sum())
    for array, begin, count in ((out, 2 * width, size), (dy, width, 4 * size)):
        assert (np.delete(array, np.arange(begin, begin + count)) == 7).all()


@settings(max_examples=40)
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(2, 3 * LANES), st.booleans(), st.booleans()
)
def test_as_one_after_the_other(channels, height, width, count, training, affine):
    torch.manual_seed(height * width)
    norm = nn.BatchNorm2d(channels, affine=affine).train(training)
    if height // 2 and width // 2:
        x = floats(count, channels, height, width, seed=count)
        inputs = [each.requires_grad_() for each in (x.clone(), x.double())]
        norms = norm, copy.deepcopy(norm).double()
        found = unpack(normalise(pack(inputs[0]), norms[0], count, relu=True, halves=True), count, 4)
        exact = F.max_pool2d(norms[1](inputs[1]).relu(), 2)
        assert_near(found, exact)
        slope = floats(*found.shape, seed=1)
        found.backward(slope)
        exact.backward(slope.double())
        assert_near(inputs[0].grad, inputs[1].grad)
        for one, other in zip((*norms[0].parameters(), *norms[0].buffers()),
                              (*norms[1].parameters(), *norms[1].buffers()), strict=True):  # fmt: skip
            assert_near(one.grad if one.requires_grad else one, other.grad if one.requires_grad else other)


def test_images_that_fill_up_the_last_block_send_nothing_back():
    y = pack(floats(LANES + 3, 2, 4, 4)).requires_grad_()
    normalise(y, nn.BatchNorm2d(2), LANES + 3, relu=True, halves=True).sum().backward()
    assert not y.grad[1, ..., 3:].any()
    assert y.grad[1, ..., :3].any()


def test_nan_is_the_largest():
    x = floats(LANES, 1, 2, 4)
    x[0, 0, 1, 1] = np.nan
    found = unpack(normalise(pack(x), nn.BatchNorm2d(1), LANES, relu=True, halves=True), LANES, 4)
    assert found.isnan().all()  # of the mean, too


def test_only_halving_pools_after_a_clipped_normalisation_are_joined():
    norm = Step("norm", ("x",), "a", norm=nn.BatchNorm2d(3), relu=True)
    pool = Step("max_pool", ("a",), "b", numbers=HALVES)
    joined = with_pools([norm, pool], ("b",), training=True)
    assert [(step.kind, step.output, step.halves) for step in joined] == [("norm", "b", True)]
    others = [
        ([norm, Step("max_pool", ("a",), "b", numbers=((3, 3), (2, 2), (1, 1)))], ("b",)),
        ([norm, pool], ("a", "b")),  # somebody else wants what is pooled
        ([norm, pool, Step("relu", ("a",), "c", relu=True)], ("b", "c")),
        ([Step("norm", ("x",), "a", norm=nn.BatchNorm2d(3)), pool], ("b",)),  # no ReLU
        ([Step("norm", ("x",), "a", norm=nn.BatchNorm2d(3), relu=True, plus="y"), pool], ("b",)),
        ([Step("relu", ("x",), "a", relu=True), pool], ("b",)),
    ]
    for steps, outputs in others:
        assert with_pools(steps, outputs, training=True) == steps
    assert with_pools([norm, pool], ("b",), training=False) == [norm, pool]


def test_for_inference_pools_are_joined_with_layers():
    layer, pool = Step("layer", ("x",), "a"), Step("max_pool", ("a",), "b", numbers=HALVES)
    joined = with_pools([layer, pool], ("b",), training=False)
    assert [(step.kind, step.output, step.halves) for step in joined] == [("layer", "b", True)]
    added = Step("layer", ("x",), "a", plus="y")
    assert with_pools([added, pool], ("b",), training=False) == [added, pool]


@pytest.mark.parametrize("size", [(8, 8), (9, 8)])
@pytest.mark.parametrize("in_two_calls", [False, True])
def test_a_network_learns_the_same(size, in_two_calls, monkeypatch):
    used = []
    if not in_two_calls:
        monkeypatch.setattr(Region, "_course", lambda *_: None)
    monkeypatch.setattr(blocked._NormaliseAndHalve, "apply", counted(used, blocked._NormaliseAndHalve.apply))
    torch.manual_seed(1)
    block = [nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *block, nn.Conv2d(6, 5, 3, padding=1), nn.Flatten())
    mask = random_mask(net, 0.5)
    sparse = dp.sparsify(copy.deepcopy(net), mask, floats(1, 3, *size), layers="sparse").train()
    exact, x = masked(net, mask).double().train(), floats(2 * LANES + 3, 3, *size)
    for _ in range(3):
        for each, images in ((sparse, x), (exact, x.double())):
            each(images).square().mean().backward()
        assert_near(sparse(x), exact(x.double()))
    assert bool(used) == (size[0] % 2 == 0 and not in_two_calls)
    assert_near(dict(sparse.named_parameters())["1.weight"].grad, exact[1].weight.grad)
    assert_near(dict(sparse.named_buffers())["1.running_var"], exact[1].running_var)


def counted(used, function):
    def call(*args):
        used.append(1)
        return function(*args)

    return call
