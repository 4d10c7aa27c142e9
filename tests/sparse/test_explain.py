"""What a sparse network runs on is said: each masked weight, by what, and why; and what was measured."""

import json

import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.sparse.choice import Measured
from driveprune.sparse.made import made_of
from tests.sparse.literal import Residual, floats, random_mask, spoken


class Zoo(nn.Module):
    """A layer of each kind that is no sparse one, and a large one that is."""

    def __init__(self):
        super().__init__()
        self.known = nn.Conv2d(4, 64, 3, padding=1)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.grouped = nn.Conv2d(64, 8, 1, groups=4)
        self.reflect = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.lines = nn.Conv1d(8, 8, 3, padding=1)
        self.volumes = nn.Conv3d(1, 1, 3, padding=1)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hooked = nn.Linear(8, 8)
        self.hooked.register_forward_hook(lambda *_: None)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.own = Own(8, 8)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(8, 8))])

    def forward(self, x):
        x = self.up(self.reflect(self.grouped(self.depthwise(self.known(x))))).flatten(2)
        x = self.volumes(self.lines(x)[:, None, None])[:, 0, 0].mT
        x = self.attention(*[self.lstm(x)[0]] * 3)[0]
        return self.own(self.second(self.first(self.hooked(x)))) @ self.parts[0]


class Own(nn.Linear):
    pass


REASONS = {
    "known.weight": "", "depthwise.weight": "a depthwise convolution", "grouped.weight": "a convolution in 4 groups",
    "reflect.weight": "a convolution with reflect padding",
    "up.weight": "ConvTranspose2d of torch is not a layer that the sparse kernels know",
    "lines.weight": "Conv1d of torch is not a layer that the sparse kernels know",
    "volumes.weight": "Conv3d of torch is not a layer that the sparse kernels know",
    "lstm.weight_ih_l0": "nn.LSTM reads its weights itself", "lstm.weight_hh_l0": "nn.LSTM reads its weights itself",
    "attention.in_proj_weight": "nn.MultiheadAttention reads its weights itself",
    "attention.out_proj.weight": "nn.MultiheadAttention reads the weights of its layers itself",
    "hooked.weight": "the layer has hooks", "first.weight": "a shared weight: it is second.weight, too",
    "own.weight": "Own is a class of its own, made from nn.Linear: it may do something else",
    "parts.0": "only the weights of linear layers and convolutions can be sparse",
}  # fmt: skip


def test_every_masked_weight_has_its_reason():
    net = Zoo().eval()
    mask = {name: torch.rand(net.get_parameter(name).shape) < 0.5 for name in REASONS}
    with pytest.warns(dp.SparseWarning, match="of the masked weights"):
        fast = dp.sparsify(net, mask, floats(1, 4, 6, 6), layers="sparse")
    found = dp.explain(fast)
    assert {each.name: each.reason for each in found.layers} == REASONS
    assert {each.name for each in found.layers if each.computed_by != "torch, with zeros"} == {"known.weight"}
    kinds = {each.name: each.kind for each in found.layers}
    assert (kinds["lstm.weight_hh_l0"], kinds["own.weight"], kinds["known.weight"]) == ("LSTM", "Own", "Conv2d")
    assert found.layers[0].density == pytest.approx(float(mask["known.weight"].float().mean()))
    text = str(found)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "Conv3d of torch" in " ".join(text.split())


def test_regions_and_sparse_layers():
    net = spoken(Residual().eval())
    fast = dp.sparsify(net, random_mask(net, 0.9), floats(1, 3, 8, 8), layers="sparse")
    found = dp.explain(fast)
    assert {each.computed_by for each in found.layers} == {"region 0"}
    assert found.sparse_share == 1
    assert "sparse kernels" in str(found)
    shared = nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Linear(2, 2))
    fast = dp.sparsify(shared, random_mask(shared, 0.3), floats(1, 4), layers="sparse")
    assert [each.computed_by for each in dp.explain(fast).layers] == ["region 0", "a sparse layer"]


def test_times_and_choices_are_shown_and_go_to_json(monkeypatch):
    monkeypatch.setattr("driveprune.sparse.choice.timed", lambda jobs: {"dense": 0.001, "sparse": 0.002})
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    fast = dp.sparsify(net, random_mask(net, 0.5), floats(1, 4))
    made_of(fast).fallbacks = ("its code differs in training",)
    found = dp.explain(fast)
    assert found.timings[0] == Measured("inference", 1, {"dense": 0.001, "sparse": 0.002}, "dense")
    assert {each.reason for each in found.layers} == {"the network as a whole is faster so, by a measurement"}
    text = str(found)
    assert "inference: torch, zeros filled in" in text
    assert "batch 32: torch 1 ms, sparse 2 ms" in text
    assert "fallback: its code differs" in text
    assert json.loads(json.dumps(found.to_json()))["timings"][2]["seconds"] == {"dense": 0.001, "sparse": 0.002}
    assert found.to_json()["fallbacks"] == ("its code differs in training",)


def test_one_warning_if_most_of_the_masked_weights_are_not_sparse():
    net = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(8, 6))
    mask = random_mask(net, 0.5)
    with pytest.warns(dp.SparseWarning, match=r"only 33% of the masked weights .*dp\.explain") as seen:
        dp.sparsify(net, mask, floats(1, 4, 3))
    assert len(seen) == 1
    assert seen[0].filename == __file__
    dp.sparsify(net, {"2.weight": mask["2.weight"]}, floats(1, 4, 3), layers="sparse")  # and none here


def test_a_network_without_sparse_layers():
    net = nn.Sequential(nn.Conv1d(4, 8, 3))
    with pytest.warns(dp.SparseWarning, match="only 0%"):
        fast = dp.sparsify(net, random_mask(net, 0.5), floats(1, 4, 3))
    found = dp.explain(fast)
    assert (found.sparse_share, found.inference, found.timings) == (0, "dense", ())
    assert "the sparse kernels\n" not in str(found)


def test_ordinary_networks_have_nothing_to_explain():
    with pytest.raises(TypeError, match="explain takes a network that sparsify made, got Linear"):
        dp.explain(nn.Linear(2, 2))
