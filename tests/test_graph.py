import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import driveprune as dp
from driveprune.graph import effective_sparsity, example_of, flow
from tests.nets import Recurrent, Transformer, convnet, images, mlp, sequences, tokens


def on_a_path(masks):
    """All weights of a chain of linear layers that lie on a path, by walking every path."""
    sizes = [masks[0].shape[1], *(m.shape[0] for m in masks)]
    used = [torch.zeros_like(m) for m in masks]
    for path in itertools.product(*(range(size) for size in sizes)):
        if all(m[path[i + 1], path[i]] for i, m in enumerate(masks)):
            for i, u in enumerate(used):
                u[path[i + 1], path[i]] = True
    return used


@given(st.integers(0, 10**6), st.floats(0.05, 0.9))
def test_equals_a_walk_along_all_paths(seed, density):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    mask = {name: torch.rand(w.shape) < density for name, w in dp.prunable(net).items()}
    expected = on_a_path(list(mask.values()))
    found = flow(net, mask, torch.zeros(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(found.effective.values(), expected, strict=True))
    assert found.connected == any(bool(e.any()) for e in expected)


def everything(net):
    return {name: torch.ones(w.shape, dtype=torch.bool) for name, w in dp.prunable(net).items()}


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (mlp(), torch.zeros(1, 6)),
        (convnet(), images()[0][:1]),
        (Transformer(), tokens()[0][:1]),
        (Recurrent(), sequences()[0][:1]),
        (dp.models.resnet18(width=0.1), torch.zeros(1, 3, 32, 32)),
        (dp.models.vgg16(width=0.1), torch.zeros(1, 3, 32, 32)),
        (dp.models.alexnet(width=0.05), torch.zeros(1, 3, 32, 32)),
        (dp.models.digits_net(), torch.zeros(1, 1, 8, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(1, 3, 8)),
    ],
    ids=["mlp", "conv", "transformer", "lstm", "resnet", "vgg", "alexnet", "digits", "encoder"],
)
def test_in_a_dense_network_every_weight_counts(net, x):
    assert effective_sparsity(net, everything(net), x) == 0
    assert dp.sparsity(everything(net)) == 0


def test_channels_without_input_or_output_take_their_weights_along():
    net = convnet()
    mask = everything(net)
    mask["0.weight"][3] = False  # channel 3 has no input
    mask["4.weight"][:, 5] = False  # channel 5 has no output
    effective = flow(net, mask, images()[0][:1]).effective
    assert not effective["4.weight"][:, 3].any()
    assert not effective["0.weight"][5].any()
    lost = 27 + 27 + 2 * 16 * 9
    assert sum(int(k.sum()) for k in effective.values()) == 1624 - lost


class Gate(nn.Module):
    """Squeeze and excitation, a difference and a normalisation by hand."""

    def __init__(self):
        super().__init__()
        self.body, self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = F.gelu(self.body(x))
        h = h * torch.sigmoid(self.gate(x))
        h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-5)
        return F.log_softmax(self.head(h), -1)


def test_gates_differences_and_norms_let_paths_through():
    net = Gate()
    assert effective_sparsity(net, everything(net), torch.zeros(1, 4)) == 0
    mask = everything(net)
    mask["body.weight"][:] = False
    mask["gate.weight"][:] = False
    assert not flow(net, mask, torch.zeros(1, 4)).connected


def test_the_model_is_untouched_and_any_device_flag_or_dtype_will_do():
    net = convnet(dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert effective_sparsity(net, everything(net), images(dtype=torch.bfloat16)[0]) == 0
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


MACS = {
    "linear": (nn.Linear(5, 7), torch.zeros(1, 5), 35),
    "conv": (nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.zeros(1, 3, 8, 8), 8 * 27 * 16),
    "grouped": (nn.Conv2d(4, 8, 3, groups=4), torch.zeros(1, 4, 5, 5), 72 * 9),
    "conv1d": (nn.Conv1d(2, 3, 2), torch.zeros(1, 2, 9), 12 * 8),
    "transposed": (nn.ConvTranspose2d(3, 4, 2, stride=2), torch.zeros(1, 3, 5, 5), 48 * 25),
    "lstm": (nn.LSTM(3, 4, batch_first=True), torch.zeros(1, 6, 3), 6 * (48 + 64)),
    "attention": (Transformer(), torch.zeros(1, 5, dtype=torch.int64), 5 * (192 + 64) + 32),
}


@pytest.mark.parametrize("case", MACS)
def test_multiply_adds(case):
    net, x, expected = MACS[case]
    assert flow(net, everything(net), x).macs(everything(net)) == expected


def test_multiply_adds_of_the_papers_networks():
    """Counted by hand from the shapes: ResNet-18 at 32×32 has 0.5554 G multiply-adds."""
    net = dp.models.resnet18()
    macs = flow(net, everything(net), torch.zeros(1, 3, 32, 32)).macs(everything(net))
    assert macs == 555_422_720


def warn_of(net, mask, data):
    """The warning that a cut to this mask gives."""

    def score(model, m, batches, *, loss, generator):
        return {name: kept.float() for name, kept in mask.items()}

    size = sum(m.numel() for m in mask.values())
    sparsity = 1 - sum(int(m.sum()) for m in mask.values()) / size
    with pytest.warns(dp.CollapseWarning) as caught:
        dp.prune(net, [data], method=score, sparsity=sparsity)
    assert len(caught) == 1
    return str(caught[0].message)


def test_an_emptied_shortcut_is_harmless():
    net = dp.models.resnet18(4, width=0.1)
    mask = everything(net)
    mask["5.shortcut.0.weight"][:] = False
    message = warn_of(net, mask, images(pixels=16))
    assert "nothing is left of 5.shortcut.0.weight" in message
    assert "paths around it remain" in message


def test_an_emptied_layer_of_a_chain_is_not():
    net = convnet()
    mask = everything(net)
    mask["4.weight"][:] = False
    message = warn_of(net, mask, images())
    assert "no path is left from input to output" in message
    assert "empty: 4.weight" in message


def test_a_network_can_be_cut_without_an_empty_layer():
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    mask = everything(net)
    mask["0.weight"][2:] = False
    mask["2.weight"][:, :2] = False
    message = warn_of(net, mask, (torch.randn(5, 6), torch.randint(3, (5,))))
    assert "no path is left" in message
    assert "empty" not in message


def test_networks_that_cannot_be_followed_are_pruned_all_the_same():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            return self.fc(x)

    with pytest.warns(dp.CollapseWarning, match="could not be followed: float32 only"):
        kept = dp.prune(Stubborn(), [(torch.randn(5, 6), torch.randint(3, (5,)))], method="snip", sparsity=0.5)
    assert int(kept["fc.weight"].sum()) == 9
    with pytest.raises(TypeError, match="float32 only"):
        effective_sparsity(Stubborn(), kept, torch.zeros(1, 6))


class GraphNet(nn.Module):
    """A graph convolution: nodes, and a matrix of edges that is as long as their list."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, edges):
        return edges @ self.second(F.relu(edges @ self.first(x)))


def nodes(size=9):
    edges = torch.rand(size, size, generator=torch.Generator().manual_seed(0))
    return torch.randn(size, 4), edges / edges.sum(1, keepdim=True), torch.randint(3, (size,))


def loss_of_nodes(net, batch):
    return F.cross_entropy(net(*batch[:2]), batch[2])


def test_a_graph_is_taken_as_a_whole():
    net, batch = GraphNet(), nodes()
    x, edges = example_of(net, batch, loss_of_nodes).args
    assert torch.equal(x, batch[0])
    assert torch.equal(edges, batch[1])
    assert flow(net, everything(net), example_of(net, batch, loss_of_nodes)).macs(everything(net)) == 9 * (32 + 24)
    for method in ("synflow", "snip"):
        for budget in ("weights", "macs"):
            kept = dp.prune(
                GraphNet(), [batch], method=method, sparsity=0.5, loss=loss_of_nodes, knobs=None, budget=budget
            )
            assert sum(int(m.sum()) for m in kept.values()) == 28
    assert dp.preview(net, [batch], sparsity=0.5, loss=loss_of_nodes, show=False).not_followed is None


class Beside(nn.Module):
    """A network whose examples see each other: by attention, by what they have in common, or as a set."""

    def __init__(self, how):
        super().__init__()
        self.fc, self.how = nn.Linear(6, 3), how

    def forward(self, x):
        return self.how(self.fc(x))


OF_A_BATCH = {
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h),
    "centred": lambda h: h - h.mean(0),
    "set": lambda h: h.mean(0, keepdim=True),
    "pairs": lambda h: h @ h.T,
}
BY_EXAMPLE = {
    "plain": lambda h: h,
    "noise": lambda h: h + torch.randn_like(h),
    "several": lambda h: {"a": [h, torch.ones(5)], "loss": h.mean()},
    "nothing": lambda h: h * float("nan"),
}


@pytest.mark.parametrize("kind", [*OF_A_BATCH, *BY_EXAMPLE])
def test_one_example_is_taken_only_where_it_can_stand_alone(kind):
    net = Beside({**OF_A_BATCH, **BY_EXAMPLE}[kind])
    x, state = torch.randn(7, 6), torch.get_rng_state()
    (taken,) = example_of(net, (x, x), lambda net, batch: net(batch[0])).args
    assert len(taken) == (7 if kind in OF_A_BATCH else 1)
    assert torch.equal(state, torch.get_rng_state())


def test_finding_an_example_leaves_no_trace_and_is_tried_once():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
            self.register_buffer("calls", torch.zeros(()))
            self.forwards = 0

        def forward(self, x):
            self.calls += 1
            self.forwards += 1
            return self.norm(self.fc(x))

    net = Counting()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for _ in range(5):
        (taken,) = example_of(net, (torch.randn(7, 6), torch.randn(7)), lambda net, batch: net(batch[0])).args
        assert len(taken) == 1
    assert net.forwards == 3
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
