"""Networks that only torch.export can follow: the same layers, the same numbers, and words where nothing can."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import driveprune as dp
from driveprune import exported
from driveprune.compact import CompactWarning
from driveprune.graph import Inputs, inputs_of
from tests import zoo

TORCH = (nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.LayerNorm, nn.Embedding)


class Shapes(nn.Module):
    """Code that branches on shapes and options, with layers of its own kinds."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), zoo.NormAct(8)
        self.fc, self.drop, self.head = nn.Linear(8, 12), nn.Dropout(0.3), nn.Linear(12, 4)

    def forward(self, x, mask=None, **options):
        size, channels, *_ = x.shape
        if channels != 3 or options.get("refuse"):
            raise ValueError("three channels")
        h = F.max_pool2d(self.bn(self.conv(x)), 2)
        h = h.view(size, 8, -1).mean(-1)
        return self.head(self.drop(F.relu(self.fc(h)))), h[:, 2:, ...]


def test_layers_are_found_again_and_the_numbers_are_the_same():
    torch.manual_seed(0)
    net = Shapes().eval()
    x = torch.randn(5, 3, 6, 6)
    found = exported.trace(net, inputs_of(x[:1]))
    called = [str(node.target) for node in found.graph.nodes if node.op == "call_module"]
    assert called == ["conv", "bn", "fc", "head"]
    assert type(found.get_submodule("bn")) is nn.BatchNorm2d
    assert type(net.bn) is zoo.NormAct
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in net.named_parameters()]
    for ours, theirs in zip(found(x), net(x), strict=True):
        assert torch.equal(ours, theirs)


def test_a_graph_for_both_modes_has_the_noise_and_the_statistics_of_training():
    torch.manual_seed(0)
    net = Shapes().train()
    x = torch.randn(5, 3, 6, 6)
    found = exported.trace(net, inputs_of(x[:2]), training=True).train()
    for mode in (True, False):
        answers = []
        for each in (net.train(mode), found.train(mode)):
            torch.manual_seed(1)
            answers.append(each(x))
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    assert torch.equal(net.bn.running_mean, found.get_buffer("bn.running_mean"))
    assert net.bn.num_batches_tracked == found.get_buffer("bn.num_batches_tracked") == 1


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "segformer", "resnet"])
def test_networks_of_transformers_become_smaller_and_compute_the_same(name):
    animal = zoo.made(name)
    animal.net.eval()
    mask = {each: torch.ones_like(w, dtype=torch.bool) for each, w in dp.prunable(animal.net).items()}
    for each, dead in DEAD.items():
        if each in mask:
            mask[each][dead] = False
    found = exported.trace(animal.net, Inputs((), animal.first))
    assert not [node for node in found.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    small = dp.compact(animal.net, mask, animal.first)
    assert isinstance(small, fx.GraphModule)
    assert small.gains.weights[1] < small.gains.weights[0]
    assert small.gains.activations[1] < small.gains.activations[0]
    dp.apply(animal.net, mask)
    ours, theirs = small(**animal.batch), animal.net(**animal.batch)
    assert type(ours) is type(theirs)
    for a, b in zip(zoo.outputs(ours), zoo.outputs(theirs), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


DEAD = {
    "bert.encoder.layer.0.intermediate.dense.weight": slice(5),
    "model.layers.0.mlp.up_proj.weight": slice(5),
    "vit.layers.0.mlp.fc1.weight": slice(5),
    "decode_head.linear_fuse.weight": slice(5),
    "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight": slice(3),
}


class Deciding(nn.Module):
    """Decides by the values of its input."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        if x.sum() > 0:
            return self.fc(x)
        return -self.fc(x)


def test_what_stops_it_is_said_with_its_line_and_the_network_comes_back_as_it_was():
    net = Deciding()
    mask = {"fc.weight": torch.eye(3, dtype=torch.bool)}
    with pytest.warns(CompactWarning) as caught:
        small = dp.compact(net, mask, torch.ones(1, 3))
    (warning,) = caught
    said = str(warning.message)
    assert "the network is not made smaller" in said
    assert "test_exported.py" in said
    assert "in forward: `if x.sum() > 0:`" in said
    assert "It works as it is, with its zeros" in said
    assert type(small) is Deciding
    dp.apply(net, mask)
    assert all(torch.equal(small(x), net(x)) for x in (torch.ones(2, 3), -torch.ones(2, 3)))


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def test_inputs_and_outputs_that_cannot_be_written_down_are_named():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return Pair(self.fc(x["a"]), x["b"])

    with pytest.raises(ValueError, match="its input x is a dict of tensors"):
        exported.trace(Several(), Inputs(({"a": torch.ones(2, 3), "b": torch.ones(2)},), {}))

    class Any(nn.Linear):
        def forward(self, *xs):
            return super().forward(xs[0])

    with pytest.raises(ValueError, match="it takes any number of inputs"):
        exported.trace(Any(3, 3), inputs_of(torch.ones(2, 3)))


def test_what_an_option_decides_is_as_in_the_example():
    net = Shapes().eval()
    found = exported.trace(net, Inputs((torch.randn(2, 3, 6, 6),), {"mask": None}))
    assert next(node.target for node in found.graph.nodes if node.op == "placeholder") == "x"
    assert torch.equal(found(torch.ones(4, 3, 6, 6))[0], net(torch.ones(4, 3, 6, 6))[0])
    with pytest.raises(ValueError, match="it does not list its input refuse"):
        exported.trace(net, Inputs((torch.randn(2, 3, 6, 6),), {"refuse": False}))
