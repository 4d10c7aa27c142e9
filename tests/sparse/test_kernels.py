"""The sparse convolution, forward and back, against a literal evaluation in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from driveprune.sparse import blocked, kernels, tiling
from driveprune.sparse.blocked import Kernel, max_pool, pack, unpack
from driveprune.sparse.code import LANES, LINE
from tests.sparse.literal import assert_near, convolved, floats, layer_of


@st.composite
def cases(draw):
    """Shapes, strides, paddings, dilations, densities with empty rows and channels, and batches."""
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (5, 5), (7, 7), (1, 3), (5, 2)]))
    stride = draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (1, 2), (3, 1)]))
    padding = draw(st.tuples(*[st.integers(0, 4)] * 2))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 3)]))
    outputs, inputs = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(outputs, inputs, *kernel, generator=generator) >= draw(
        st.sampled_from([0.0, 0.5, 0.9, 0.98, 0.999, 1.0])
    )
    if draw(st.booleans()):
        kept[draw(st.integers(0, outputs - 1))] = False
        kept[:, draw(st.integers(0, inputs - 1))] = False
    least = [max(1, (k - 1) * d + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    size = [low + draw(st.integers(0, 10)) for low in least]
    return kept, layer_of(kept, stride, padding, dilation), size, draw(st.integers(1, 130)), seed


def check(kept, layer, size, batch, seed):
    x = floats(batch, layer.inputs, *size, seed=seed)
    values, bias = floats(int(kept.sum()), seed=seed + 1), floats(layer.outputs, seed=seed + 2)
    exact = [each.double().requires_grad_() for each in (x, values, bias)]
    expected = convolved(exact[0], kept, exact[1], exact[2], layer)
    slope = floats(*expected.shape, seed=seed + 3)
    expected.backward(slope.double())
    kernel, packed, back = Kernel(layer), pack(x), pack(slope)
    assert_near(unpack(kernel.output(packed, values, bias), batch, 4), expected)
    assert_near(unpack(kernel.input_gradient(back, values, tuple(size)), batch, 4), exact[0].grad)
    assert_near(kernel.weight_gradient(packed, back), exact[1].grad)
    dx, dvalues = kernel.both_gradients(packed, back, values)
    assert_near(unpack(dx, batch, 4), exact[0].grad)
    assert_near(dvalues, exact[1].grad)
    others = floats(*x.shape, seed=seed + 5)
    both, _ = kernel.both_gradients(packed, back, values, plus=pack(others))
    for found in (kernel.input_gradient(back, values, tuple(size), plus=pack(others)), both):
        assert_near(unpack(found, batch, 4), exact[0].grad + others)
    plus = floats(*expected.shape, seed=seed + 4)
    found = kernel.output(packed, values, None, plus=pack(plus), relu=True)
    assert_near(unpack(found, batch, 4), (convolved(x, kept, values, None, layer) + plus).relu())


@settings(max_examples=200)
@given(cases())
def test_forward_and_both_gradients(case):
    check(*case)


@pytest.mark.slow
@settings(max_examples=1500)
@given(cases())
def test_forward_and_both_gradients_at_length(case):
    check(*case)


@pytest.mark.parametrize("batch", [3 * LANES + 1, 4 * LANES])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])  # in one group of inputs, in several
def test_four_blocks_of_one_pixel(batch, density):
    kept = torch.rand(30, 900, 1, 1, generator=torch.Generator().manual_seed(1)) < density
    check(kept, layer_of(kept), (1, 1), batch, 5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "size", "stride", "padding"),
    [
        ((96, 80, 3, 3), (9, 9), (1, 1), (1, 1)),  # input channels in groups
        ((40, 300, 1, 1), (1, 1), (1, 1), (0, 0)),  # a linear layer
        ((16, 64, 3, 3), (40, 33), (2, 2), (1, 1)),  # bands of rows
        ((12, 130, 3, 3), (19, 21), (1, 1), (1, 1)),  # a ring of rows
        ((12, 70, 5, 3), (17, 19), (1, 1), (4, 0)),  # a ring of five, with rows of the gradient that are no pixels
        ((6, 5, 3, 3), (2, 2), (1, 1), (1, 1)),  # several blocks in a tile
    ],
)
def test_pieces_of_all_sizes(shape, size, stride, padding, threads):
    torch.set_num_threads(threads)
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    check(kept, layer_of(kept, stride, padding), size, 2 * LANES + 3, 5)


def test_the_same_bits_every_time():
    torch.set_num_threads(2)
    kept = torch.rand(24, 24, 3, 3, generator=torch.Generator().manual_seed(1)) < 0.2
    layer = layer_of(kept, padding=(1, 1))
    x, slope, values = pack(floats(50, 24, 8, 8)), pack(floats(50, 24, 8, 8, seed=1)), floats(int(kept.sum()))
    runs = [
        (
            kernel.output(x, values, None),
            kernel.input_gradient(slope, values, (8, 8)),
            kernel.weight_gradient(x, slope),
        )
        for kernel in (Kernel(layer) for _ in range(4))
    ]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_an_empty_layer_is_its_bias():
    layer = layer_of(torch.zeros(3, 2, 3, 3, dtype=torch.bool), padding=(1, 1))
    kernel, bias = Kernel(layer), torch.tensor([1.0, -2.0, 0.5])
    out = unpack(kernel.output(pack(floats(5, 2, 4, 4)), torch.empty(0), bias), 5, 4)
    assert torch.equal(out, bias.view(1, 3, 1, 1).expand(5, 3, 4, 4))
    assert not kernel.input_gradient(pack(floats(5, 3, 4, 4)), torch.empty(0), (4, 4)).any()
    assert kernel.weight_gradient(pack(floats(5, 2, 4, 4)), pack(floats(5, 3, 4, 4))).shape == (0,)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(4, 12), st.integers(1, 20))
def test_max_pooling(kernel, stride, pad, size, batch):
    pad = min(pad, kernel // 2)
    x = floats(batch, 3, size, size + 1, seed=size).mul(2).round()  # with ties
    expected_x, found_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = F.max_pool2d(expected_x, kernel, stride, pad)
    found = unpack(max_pool(pack(found_x), (kernel,) * 2, (stride,) * 2, (pad,) * 2), batch, 4)
    assert torch.equal(found, expected)
    slope = floats(*expected.shape)
    expected.backward(slope)
    found.backward(slope)
    assert_near(found_x.grad, expected_x.grad, 1e-6)


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 7), (5, 7)])
@pytest.mark.parametrize("stream_bytes", [0, 1 << 30])
def test_max_pooling_of_windows_side_by_side(size, stream_bytes, monkeypatch):
    monkeypatch.setattr(blocked, "STREAM_BYTES", stream_bytes)
    x = floats(9, 3, *size).mul(2).round()
    expected_x, found_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = F.max_pool2d(expected_x, 2)
    found = unpack(max_pool(pack(found_x), (2, 2), (2, 2), (0, 0)), 9, 4)
    assert torch.equal(found, expected)
    slope = floats(*expected.shape)
    expected.backward(slope)
    found.backward(slope)
    assert torch.equal(found_x.grad, expected_x.grad)


def test_max_pooling_of_nan():
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 1, 1] = np.nan
    found = unpack(max_pool(pack(x), (2, 2), (2, 2), (0, 0)), 1, 4)
    assert found.isnan().tolist() == [[[[True, False]]]]


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
@pytest.mark.parametrize("make", [tiling.forward, tiling.backward])
@pytest.mark.parametrize(("padding", "blocks"), [(0, 1), (1, 1), (2, 3)])
def test_tiles_look_ahead_at_what_the_next_band_reads(stride, make, padding, blocks, monkeypatch):
    monkeypatch.setattr(tiling, "SCRATCH_BYTES", 1)
    tables = make(layer_of(torch.ones(4, 3, 3, 3) > 0, stride, (padding, padding)), 12, 16, blocks)
    channels, height, width, deep = (
        int(tables.sizes[tiling.SIZES[n]]) for n in ("inputs", "height", "width", "rows")
    )
    rows = [[y for y in range(first, first + deep) if 0 <= y < height] for first, *_ in tables.bands.tolist()]
    assert len(rows) > 1
    for band, (_, first, end, *_) in enumerate(tables.bands.tolist()):
        tiles = range(tables.runs[first, 2], tables.runs[end - 1, 3])
        shares = [kernels.ahead_of(0, tables.sizes, tables.bands, band, tables.runs, t) for t in tiles]
        found = [place for begin, lines in shares for place in range(begin, begin + lines * LINE)]
        if band + 1 < len(rows):
            wanted = sorted(set(rows[band + 1]) - set(rows[band]))
        else:
            wanted = [blocks * channels * height + y for y in rows[0]]
        expected = [y * width * LANES + k for y in wanted for k in range(width * LANES)]
        assert found[: len(expected)] == expected
        assert len(found) < len(expected) + LINE  # whole lines


def test_a_band_that_is_all_of_an_image_has_nothing_ahead():
    tables = tiling.forward(layer_of(torch.ones(1, 1, 3, 3) > 0, padding=(1, 1)), 8, 8, 1)
    assert len(tables.bands) == 1
    assert kernels.ahead_of(0, tables.sizes, tables.bands, 0, tables.runs, 0)[1] == 0
