"""The tables of the kernels: every pixel once, every offset in its scratch, and a case by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driveprune.sparse.code import LANES
from driveprune.sparse.tile import TILE
from driveprune.sparse.tiling import (
    HALF,
    RUNS,
    SIZES,
    WINDOWS,
    Layer,
    _not_a_power,
    backward,
    blocks_for,
    can_halve,
    forward,
    halved,
    ranges,
)
from tests.sparse.literal import layer_of


@st.composite
def layers(draw):
    """A layer of any kernel, stride, padding, dilation and density, with a size of image that fits."""
    kernel = draw(st.tuples(*[st.sampled_from([1, 2, 3, 5, 7])] * 2))
    stride, dilation = (draw(st.tuples(*[st.integers(1, 3)] * 2)) for _ in range(2))
    padding = draw(st.tuples(*[st.integers(0, 4)] * 2))
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 5)), *kernel
    density = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < density
    reach = [(k - 1) * d + 1 - 2 * p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    size = tuple(max(1, least) + draw(st.integers(0, 12)) for least in reach)
    return kept, layer_of(kept, stride, padding, dilation), size


def number(tiling, name):
    return int(tiling.sizes[SIZES[name]])


def turns(tiling):
    return number(tiling, "rows") if is_ring(tiling) else 1


def is_ring(tiling):
    return bool(tiling.bands[:, 3].any())


def written(tiling, blocks, channels, size):
    """How often each vector of the output is written for each class's weights, without repetitions."""
    counts = np.zeros((blocks, channels, size[0] * size[1]), int)
    for _, first, end, *_ in tiling.bands.tolist():
        for _, kind, begin, last in tiling.runs[first:end].tolist():
            run = RUNS[kind]
            for tile in range(begin, last):
                for a in range(TILE // run):
                    for b in range(run):
                        if tiling.counted[tile * TILE + a]:
                            place = tiling.outward[tile * TILE + a] + b * number(tiling, "step")
                            block, rest = divmod(int(place), channels * size[0] * size[1] * LANES)
                            assert rest < size[0] * size[1] * LANES  # in the plane of the first channel
                            counts[block, 0, rest // LANES] += 1
    return counts[:, 0]


def test_four_blocks_of_one_pixel_take_weights_in_twos():
    kept = torch.zeros(3, 8, 1, 1, dtype=torch.bool)
    kept[0, [0, 1, 3, 4, 7]] = kept[2, [2, 5]] = True
    tiling = forward(layer_of(kept), 1, 1, 4)
    assert tiling.runs[:, 1].tolist() == [HALF]
    assert tiling.starts.tolist() == [0, 4, 5, 5, 5, 7, 7]  # five weights, none, two: the fifth by itself
    assert tiling.offsets.tolist() == [c * 4 * LANES for c in (0, 1, 3, 4, 7, 2, 5)]
    assert forward(layer_of(kept), 1, 1, 3).runs[:, 1].tolist() == [RUNS.index(2), RUNS.index(1)]


@settings(max_examples=120)
@given(layers(), st.integers(1, 3))
def test_every_pixel_is_computed_once(made, blocks):
    _, layer, size = made
    out = layer.size(*size)
    for make, channels, pixels in ((forward, layer.outputs, out), (backward, layer.inputs, size)):
        tiling = make(layer, *size, blocks)
        assert (written(tiling, blocks, channels, pixels) == 1).all()


@settings(max_examples=120)
@given(layers(), st.integers(1, 3))
def test_what_is_read_lies_in_the_scratch(made, blocks):
    _, layer, size = made
    for make in (forward, backward):
        tiling = make(layer, *size, blocks)
        assert (tiling.offsets >= 0).all()
        assert tiling.starts[0] == 0
        assert tiling.starts[-1] * turns(tiling) == len(tiling.offsets)
        assert (np.diff(tiling.starts) >= 0).all()
        farthest = int(tiling.inward.max(initial=0)) + int(tiling.offsets.max(initial=0)) + TILE * LANES
        assert farthest <= tiling.scratch
        order = np.arange(len(layer.places)) if tiling.order is None else tiling.order
        assert sorted(set(order.tolist())) == sorted(order.tolist())


@settings(max_examples=60)
@given(layers())
def test_every_weight_has_a_sum_of_its_own(made):
    _, layer, size = made
    tiling = forward(layer, *size, 1)
    order = np.arange(len(layer.places)) if tiling.order is None else tiling.order
    assert np.array_equal(tiling.slots[order], np.arange(len(layer.places)))


@settings(max_examples=60)
@given(layers())
def test_neighbours_come_in_twos(made):
    _, layer, size = made
    for make in (forward, backward):
        tiling = make(layer, *size, 1)
        for low, middle, high in zip(tiling.starts[:-1:2], tiling.starts[1::2], tiling.starts[2::2], strict=True):
            twos, others = tiling.offsets[low:middle].reshape(-1, 2), tiling.offsets[middle:high]
            assert (twos[:, 1] == twos[:, 0] + LANES).all()
            assert (np.diff(others) != LANES).all()  # none of them could be in twos


def test_a_row_of_three_pixels_by_hand():
    """Two inputs, one output, a kernel of three columns of which two are kept, on one row of five pixels."""
    kept = torch.zeros(1, 2, 1, 3, dtype=torch.bool)
    kept[0, 0, 0, 2] = kept[0, 1, 0, 0] = True
    tiling = forward(layer_of(kept), 1, 5, 1)
    pitch = number(tiling, "channel_pitch")
    assert number(tiling, "row_pitch") == 5 * LANES
    assert pitch >= 5 * LANES
    assert tiling.offsets.tolist() == [2 * LANES, pitch]
    assert tiling.starts.tolist() == [0, 0, 2]  # neither has a neighbour
    assert tiling.order is None
    assert tiling.bands.tolist() == [[0, 0, 2, 0, 0]]
    assert tiling.runs.tolist() == [[0, 2, 0, 1], [0, 3, 1, 2]]  # two pixels side by side, then one
    assert tiling.inward.reshape(-1, TILE)[0, :4].tolist() == [0] * 4
    assert tiling.counted.reshape(-1, TILE).tolist() == [[1] + [0] * 7] * 2
    assert tiling.outward.reshape(-1, TILE)[1].tolist() == [2 * LANES] * 8


def test_a_stride_sorts_columns_by_remainder():
    kept = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    tiling = forward(layer_of(kept, stride=(1, 2)), 1, 5, 1)
    columns = number(tiling, "columns")
    assert columns == 3
    assert tiling.offsets.tolist() == [0, LANES, columns * LANES]
    assert tiling.order.tolist() == [0, 2, 1]


def test_an_image_that_is_too_small_is_an_error():
    layer = layer_of(torch.ones(1, 1, 5, 5, dtype=torch.bool), padding=(1, 1))
    assert layer.size(3, 4) == (1, 2)
    with pytest.raises(ValueError, match=r"kernel of \(5, 5\) with padding \(1, 1\) does not fit 2×4"):
        layer.size(2, 4)


def test_a_wrong_number_of_channels_is_an_error():
    with pytest.raises(ValueError, match="3 input channels was given 2"):
        Layer(1, 3, (1, 1), (1, 1), (0, 0), (1, 1), np.zeros((0, 4), np.int64)).check(2)


def test_small_images_take_several_blocks():
    assert [blocks_for(size) for size in ((1, 1), (2, 2), (2, 4), (3, 3), (32, 32))] == [8, 2, 1, 1, 1]


def test_channels_keep_off_powers_of_two():
    for lines in (8, 64, 4096):
        assert _not_a_power(lines * 16) == (lines + 1) * 16
    assert _not_a_power(LANES) == LANES
    assert _not_a_power(48) == 48


@settings(max_examples=60)
@given(layers(), st.integers(1, 3))
def test_every_window_is_computed_once(made, blocks):
    _, layer, size = made
    rows, columns = layer.size(*size)
    assert can_halve(layer, *size) == (rows % 2 == 0 and columns % 4 == 0)
    if can_halve(layer, *size):
        tiling = halved(layer, *size, blocks)
        assert (tiling.runs[:, 1] == WINDOWS).all()
        small, pitch = (rows // 2) * (columns // 2) * LANES, number(tiling, "row_pitch") * layer.stride[0]
        assert number(tiling, "out_plane") == small
        places = []
        for _, begin, end, *_ in tiling.bands.tolist():
            for tile in range(tiling.runs[begin, 2], tiling.runs[end - 1, 3]):
                above, below = tiling.inward[tile * TILE : tile * TILE + 2].tolist()
                assert below - above == pitch
                places += [tiling.outward[tile * TILE], tiling.outward[tile * TILE] + LANES]
        expected = [block * layer.outputs * small + k for block in range(blocks) for k in range(0, small, LANES)]
        assert sorted(places) == expected


def test_ranges_follow_each_other():
    ends = {"a": 2, "b": 0}
    assert ranges(ends, {"a": 3, "b": 1}) == {"a": 2, "a_end": 5, "b": 0, "b_end": 1}
    assert ranges(ends, {"a": 1}) == {"a": 5, "a_end": 6}
    assert ends == {"a": 6, "b": 1}


def test_a_ring_by_hand():
    """Three rows of the input at a time: each new one takes the place of the oldest, and all offsets turn with it."""
    kept = torch.zeros(1, 600, 3, 3, dtype=torch.bool)
    kept[0, 1, 0, 2] = kept[0, 1, 2, 0] = True
    tiling = forward(layer_of(kept, padding=(1, 1)), 5, 8, 1)
    row, pitch = number(tiling, "row_pitch"), number(tiling, "channel_pitch")
    assert number(tiling, "rows") == 3
    assert row == 10 * LANES
    assert [band[0] for band in tiling.bands.tolist()] == [-1, 0, 1, 2, 3]  # where its three rows begin
    assert [band[3:] for band in tiling.bands.tolist()] == [[0, 0], [2, 1], [2, 2], [2, 0], [2, 1]]
    above, below = pitch + 2 * LANES, pitch  # columns of the two weights
    turned = [[above, below + 2 * row], [above + row, below], [above + 2 * row, below + row]]
    assert tiling.offsets.reshape(3, 2).tolist() == turned
    assert tiling.inward.reshape(-1, TILE)[:, 0].tolist() == [0] * 5  # a tile is a whole row


@pytest.mark.parametrize(
    ("channels", "size", "stride", "ring"),
    [(600, (8, 8), 1, True), (600, (8, 7), 1, False), (600, (16, 16), 2, False), (2, (8, 8), 1, False)],
)
def test_when_a_scratch_is_a_ring(channels, size, stride, ring):
    kept = torch.ones(2, channels, 3, 3, dtype=torch.bool)
    layer = layer_of(kept, stride=(stride, stride), padding=(1, 1))
    assert is_ring(forward(layer, *size, 1)) == ring
