"""A batch in one call: the same numbers as step by step, and as torch."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import driveprune as dp
from driveprune.sparse import batch, blocked
from driveprune.sparse.code import LANES
from driveprune.sparse.region import FEW
from tests.sparse.literal import Residual, assert_near, floats, masked, spoken
from tests.sparse.test_kernels import cases


def in_one_call(network, x):
    """What a network says, and that it was in one call."""
    with torch.no_grad():
        found = network(x)
    for region in network.regions.values():
        assert any(isinstance(each, batch.BatchRegion) for each in region._known.values())
    return found


@settings(max_examples=100)
@given(cases(), st.integers(FEW + 1, 40), st.booleans(), st.booleans(), st.booleans())
def test_any_layer_with_what_follows(case, count, norm, relu, pool):
    kept, layer, size, _, seed = case
    torch.manual_seed(seed)
    conv = nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.padding, layer.dilation)
    after = [*([nn.BatchNorm2d(layer.outputs)] if norm else []), *([nn.ReLU()] if relu else [])]
    after += [nn.MaxPool2d(2)] if pool and min(layer.size(*size)) > 1 else []
    net = spoken(nn.Sequential(conv, *after).eval(), seed)
    mask = {"0.weight": kept}
    x = floats(count, layer.inputs, *size, seed=seed)
    found = in_one_call(dp.sparsify(net, mask, x[:1], layers="sparse"), x)
    assert_near(found, masked(net, mask).double()(x.double()))


class Several(nn.Module):
    """Values that are needed late, twice, or under another name; two outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(n, 6, 3, padding=1) for n in (3, 6, 12))
        self.norm, self.drop = nn.BatchNorm2d(6), nn.Dropout(0.5)
        self.head = nn.Linear(6 * 4, 5)

    def forward(self, x):
        first = self.drop(self.a(x))
        second = F.relu(self.norm(self.b(first)) + first)
        both = self.c(torch.cat([second, first], 1))
        small = F.max_pool2d(both + second, 2).relu()
        return self.head(torch.flatten(small, 1)), both


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("stream_bytes", [0, 1 << 30])
def test_values_are_kept_as_long_as_they_are_needed(threads, stream_bytes, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr(batch, "STREAM_BYTES", stream_bytes)
    monkeypatch.setattr(batch, "PIECE", 1)
    net = spoken(Several().eval())
    mask = {name: floats(*p.shape) > 0.3 for name, p in net.named_parameters() if p.dim() > 1}
    sparse = dp.sparsify(net, mask, floats(1, 3, 4, 4), layers="sparse")
    for count in (FEW + 1, 16, 33):
        x = floats(count, 3, 4, 4, seed=count)
        for found, exact in zip(in_one_call(sparse, x), masked(net, mask).double()(x.double()), strict=True):
            assert_near(found, exact)
            assert found.is_contiguous()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2])
def test_batches_that_threads_share_out(threads, blocks, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr(batch, "BLOCKS", blocks)
    net = spoken(Several().eval())
    mask = {name: floats(*p.shape) > 0.3 for name, p in net.named_parameters() if p.dim() > 1}
    sparse, exact = dp.sparsify(net, mask, floats(1, 3, 4, 4), layers="sparse"), masked(net, mask).double()
    alone = blocks * LANES * 2
    for count in (alone - LANES, alone - 1, alone, alone + 1, 2 * alone + LANES, 3 * alone - 1):
        x = floats(count, 3, 4, 4, seed=count)
        for _ in range(2):  # memory that was used before
            for found, expected in zip(in_one_call(sparse, x), exact(x.double()), strict=True):
                assert_near(found, expected)


def test_what_each_thread_takes_alone():
    torch.set_num_threads(2)
    net = nn.Sequential(nn.Conv2d(2, 3, 3)).eval()
    sparse = dp.sparsify(net, {"0.weight": floats(3, 2, 3, 3) > 0}, floats(1, 2, 5, 5), layers="sparse")
    alone = batch.BLOCKS * LANES * 2
    for count, parts in ((alone - LANES, [1]), (alone - 1, [2]), (alone, [2]), (2 * alone + 1, [2, 2, 1])):
        sparse.regions["region_0"]._known = {}
        in_one_call(sparse, floats(count, 2, 5, 5))
        (made,) = sparse.regions["region_0"]._known.values()
        assert [part._crews for part in made._parts] == parts


@pytest.mark.parametrize("size", [(9, 11), (8, 8)])
def test_residual_networks(size, monkeypatch):
    monkeypatch.setattr(blocked, "STREAM_BYTES", 0)
    net = spoken(Residual().eval())
    mask = {name: floats(*p.shape) > 1 for name, p in net.named_parameters() if p.dim() > 1}
    sparse = dp.sparsify(net, mask, floats(1, 3, *size), layers="sparse")
    x = floats(21, 3, *size)
    expected = masked(net, mask).double()(x.double())
    assert_near(in_one_call(sparse, x), expected)
    assert_near(sparse(x), expected)  # step by step


def test_results_do_not_share_memory_with_the_next():
    net = nn.Sequential(nn.Conv2d(1, 1, 1)).eval()
    sparse = dp.sparsify(
        net, {"0.weight": torch.ones(1, 1, 1, 1, dtype=torch.bool)}, floats(1, 1, 1, 1), layers="sparse"
    )
    first = in_one_call(sparse, floats(16, 1, 1, 1))
    copy = first.clone()
    in_one_call(sparse, floats(16, 1, 1, 1, seed=1))
    assert torch.equal(first, copy)


def test_few_sizes_are_kept():
    net = nn.Sequential(nn.Conv2d(2, 3, 3)).eval()
    sparse = dp.sparsify(net, {"0.weight": floats(3, 2, 3, 3) > 0}, floats(1, 2, 5, 5), layers="sparse")
    for count in range(1, 30):
        in_one_call(sparse, floats(FEW + count, 2, 5, 5))
    assert len(sparse.regions["region_0"]._known) < 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_in_a_worker_that_was_forked():
    """As those of a DataLoader, which have one thread each."""
    found = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0"]


FORKED = """
import os, torch
import driveprune as dp

torch.set_num_threads(2)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)).eval()
sparse = dp.sparsify(net, {"0.weight": torch.ones(1, 1, 1, 1) > 0}, torch.ones(1, 1, 1, 1), layers="sparse")
with torch.no_grad():
    sparse(torch.ones(9, 1, 1, 1))
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        close = torch.allclose(sparse(torch.ones(9, 1, 1, 1)), net(torch.ones(9, 1, 1, 1)))
        os._exit(0 if close else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("size", [(8, 8), (8, 12), (6, 10), (7, 8), (32, 32), (2, 4)])
@pytest.mark.parametrize("density", [0.02, 0.3])  # one group of inputs, and several
@pytest.mark.parametrize("threads", [1, 2])
def test_layers_whose_output_is_halved(size, density, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    net = spoken(nn.Sequential(nn.Conv2d(90, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU(), nn.MaxPool2d(2)).eval())
    mask = {"0.weight": torch.rand(7, 90, 3, 3) < density}
    sparse = dp.sparsify(net, mask, floats(1, 90, *size), layers="sparse")
    x = floats(2 * LANES + 1, 90, *size)
    assert_near(in_one_call(sparse, x), masked(net, mask).double()(x.double()))
