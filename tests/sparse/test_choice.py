"""Which layers torch computes: a measurement, made once, that changes nothing else."""

import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.sparse import choice
from driveprune.sparse.layers import SparseLayer, sparse_layer
from tests.sparse.literal import assert_near, floats


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch):
    monkeypatch.setattr(choice, "_measured", {})
    monkeypatch.setattr(choice, "WORTH_MEASURING", 0)


def layer(density, outputs=20, inputs=30):
    kept = torch.rand(outputs, inputs, generator=torch.Generator().manual_seed(0)) < density
    return sparse_layer(nn.Linear(inputs, outputs), kept)


def clock(monkeypatch, dense, sparse):
    """Measurements come out as said."""
    seconds = iter([dense, sparse])
    monkeypatch.setattr(choice, "_seconds", lambda work: next(seconds))


def test_clearly_sparse_layers_are_not_measured(monkeypatch):
    clock(monkeypatch, 0.0, 1.0)
    assert not choice.is_dense_faster(layer(0.1), torch.Size([1, 30]))
    assert not choice._measured


def test_tiny_layers_are_not_measured(monkeypatch):
    clock(monkeypatch, 0.0, 1.0)
    monkeypatch.setattr(choice, "WORTH_MEASURING", 20 * 30 * choice.BATCH + 1)
    assert not choice.is_dense_faster(layer(0.9), torch.Size([1, 30]))
    monkeypatch.setattr(choice, "WORTH_MEASURING", 20 * 30 * choice.BATCH)
    assert choice.is_dense_faster(layer(0.9), torch.Size([1, 30]))


@pytest.mark.parametrize(("dense", "expected"), [(0.5, True), (0.84, True), (0.86, False), (2.0, False)])
def test_the_faster_one_is_chosen(monkeypatch, dense, expected):
    clock(monkeypatch, dense, 1.0)
    assert choice.is_dense_faster(layer(0.9), torch.Size([1, 30])) is expected


def test_a_shape_is_measured_once(monkeypatch):
    clock(monkeypatch, 0.5, 1.0)
    for batch in (1, 64):
        assert choice.is_dense_faster(layer(0.9), torch.Size([batch, 30]))
    assert len(choice._measured) == 1


def test_a_measurement_changes_nothing():
    one = layer(0.9)
    before, state = one.weight.clone(), torch.get_rng_state()
    assert choice.is_dense_faster(one, torch.Size([1, 30])) in {True, False}
    assert torch.equal(one.weight, before)
    assert one.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_layers_are_measured_too():
    one = layer(0.9).requires_grad_(False)
    with torch.no_grad():
        assert choice.is_dense_faster(one, torch.Size([1, 30])) in {True, False}


@pytest.mark.parametrize("shape", [(3, 30), (3, 5, 30), (3, 5, 2, 30)])
def test_networks_whose_layers_are_dense(monkeypatch, shape):
    monkeypatch.setattr("driveprune.sparse.network.is_dense_faster", lambda layer, shape: True)
    monkeypatch.setattr("driveprune.sparse.network.NO_SLOWER", 1e9)
    net = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4))
    mask = {name: torch.rand(net.get_parameter(name).shape) < 0.9 for name in ("0.weight", "2.weight")}
    found = dp.sparsify(net, mask, floats(*shape))
    dense = dp.densify(found)
    layers = [module for module in found.modules() if isinstance(module, SparseLayer)]
    assert [each.dense for each in layers] == [len(shape) == 2] * 2
    x = floats(*shape)
    assert_near(found(x), dense(x))
    found(x).square().sum().backward()
    dense(x).square().sum().backward()
    assert_near(layers[0].weight.grad, dense[0].weight.grad[mask["0.weight"]])
    never = dp.sparsify(net, mask, floats(*shape), layers="sparse")
    assert not any(module.dense for module in never.modules() if isinstance(module, SparseLayer))
