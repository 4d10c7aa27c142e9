"""Networks whose code is not a chain of layers: what is cut is called cut, what is alive counts as alive."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from driveprune.graph import flow


class Net(nn.Module):
    """A stem, a body that is written as a function of (self, h), and a head."""

    def __init__(self, body, **layers):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.body = body

    def forward(self, x):
        return self.head(self.body(self, self.stem(x)))


def lin():
    return nn.Linear(4, 4)


def in_place(net, h):
    h = h * 1
    h.sub_(net.b(h.clone()))
    h += net.c(h.clone())
    h.mul_(net.d(h.clone()))
    return h


def rms(net, h):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def written_into(net, h):
    out = torch.zeros(len(h), 4)
    out[:, :2] = net.a(h)[:, :2]
    out[:, 2:] += net.a(h)[:, 2:]
    return out


def rotated(net, h):
    """Rotary positions, as complex numbers."""
    pairs = torch.view_as_complex(net.a(h).view(-1, 2, 2).contiguous())
    turned = pairs * torch.polar(torch.ones(2), torch.arange(2.0))
    return torch.view_as_real(turned).flatten(1)


def grouped_query(net, h):
    """Two heads of queries, one of keys and values, for three tokens."""
    tokens = torch.stack([h, h + 1, h * 2], 1)
    q = net.q(tokens).view(-1, 3, 2, 2).transpose(1, 2)
    k, v = (each(tokens).view(-1, 3, 1, 2).transpose(1, 2) for each in (net.k, net.v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2).mean(1)


def experts(net, h):
    """A mixture of experts: of four, one is chosen for each example."""
    shares, chosen = net.router(h).softmax(-1).topk(1, dim=-1)
    out = torch.zeros_like(h)
    for number, expert in enumerate((net.a, net.b, net.c, net.d)):
        row, place = torch.where(chosen == number)
        out.index_add_(0, row, expert(h[row]) * shares[row, place, None])
    return out


BODIES = {
    "rms norm": Net(rms),
    "highway": Net(
        lambda net, h: (1 - torch.sigmoid(net.t(h))) * h + torch.sigmoid(net.t(h)) * net.b(h), t=lin(), b=lin()
    ),
    "film": Net(lambda net, h: h * (1 + net.g(h)) + net.g(h), g=lin()),
    "exp": Net(lambda net, h: torch.exp(-h)),
    "log": Net(lambda net, h: torch.log(h.abs() + 1)),
    "in place": Net(in_place, b=lin(), c=lin(), d=lin()),
    "max of two": Net(lambda net, h: torch.max(net.a(h), net.b(h)), a=lin(), b=lin()),
    "max over": Net(lambda net, h: torch.stack([net.a(h), net.b(h)]).max(0).values, a=lin(), b=lin()),
    "amax": Net(lambda net, h: torch.stack([net.a(h), net.b(h)]).amax(0), a=lin(), b=lin()),
    "where": Net(lambda net, h: torch.where(h > 0, net.a(h), net.b(h)), a=lin(), b=lin()),
    "softmax": Net(lambda net, h: F.softmax(net.a(h), -1), a=lin()),
    "matmul": Net(lambda net, h: (net.a(h).unsqueeze(-1) @ net.b(h).unsqueeze(-2)).mean(-1), a=lin(), b=lin()),
    "own dtype": Net(lambda net, h: net.a(h.float() / 255) + torch.zeros(4), a=lin()),
    "keywords": Net(lambda net, h: torch.sub(F.linear(input=h, weight=net.a.weight), other=h), a=lin()),
    "attention": Net(
        lambda net, h: F.scaled_dot_product_attention(*(net.a(h).view(-1, 2, 2) for _ in range(3))).flatten(1),
        a=lin(),
    ),
    "layer norm": Net(lambda net, h: F.gelu(F.layer_norm(net.a(h), (4,))), a=lin()),
    "random": Net(lambda net, h: h + torch.randn_like(h)),
    "einsum": Net(lambda net, h: torch.einsum("bi,bj->bi", net.a(h), net.b(h)), a=lin(), b=lin()),
    "written into": Net(written_into, a=lin()),
    "rotated": Net(rotated, a=lin()),
    "grouped-query attention": Net(grouped_query, q=lin(), k=nn.Linear(4, 2), v=nn.Linear(4, 2)),
    "experts": Net(experts, router=lin(), a=lin(), b=lin(), c=lin(), d=lin()),
    "half": Net(lambda net, h: net.a(F.softmax(h.half(), -1, dtype=torch.bfloat16).to(torch.float16)), a=lin()),
}


def everything(net):
    return {name: torch.ones(w.shape, dtype=torch.bool) for name, w in dp.prunable(net).items()}


@pytest.mark.parametrize("body", BODIES)
def test_every_weight_of_a_dense_network_is_on_a_path(body):
    net = BODIES[body]
    state = torch.get_rng_state()
    found = flow(net, everything(net), torch.zeros(2, 4))
    assert dp.sparsity(found.effective) == 0
    assert found.connected
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("body", BODIES)
def test_without_a_stem_nothing_is_on_a_path(body):
    net = BODIES[body]
    mask = everything(net)
    mask["stem.weight"][:] = False
    found = flow(net, mask, torch.zeros(2, 4))
    assert not found.connected
    assert dp.sparsity(found.effective) == 1


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, 8))
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2) + self.pos_embed
        h = torch.cat([self.cls_token.expand(len(x), -1, -1), h], 1)
        return self.head(self.block(h).mean(1))


def test_positions_and_tokens_are_no_input():
    net = Vision()
    mask = everything(net)
    x = torch.zeros(1, 3, 8, 8)
    assert dp.effective_sparsity(net, mask, x) == 0
    mask["patch.weight"][:] = False
    assert not flow(net, mask, x).connected


def test_positions_that_are_pruned_count_as_they_are_kept():
    net = Vision()
    mask = {**everything(net), "pos_embed": torch.rand(1, 4, 8) < 0.5}
    assert torch.equal(flow(net, mask, torch.zeros(1, 3, 8, 8)).effective["pos_embed"], mask["pos_embed"])


def test_deep_attention_does_not_saturate():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    net = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    assert dp.effective_sparsity(net, everything(net), torch.zeros(1, 5, 32)) == 0


def test_a_wide_recurrent_net_with_one_row_a_gate_does_not_saturate():
    net = nn.LSTM(64, 64, batch_first=True)
    mask = {
        "weight_ih_l0": torch.zeros(256, 64, dtype=torch.bool),
        "weight_hh_l0": torch.zeros(256, 64, dtype=torch.bool),
    }
    mask["weight_ih_l0"][::64] = True
    found = flow(net, mask, torch.zeros(1, 3, 64))
    assert found.connected
    assert found.effective["weight_ih_l0"].sum() == 4 * 64


def test_very_deep_chains_neither_overflow_nor_fade():
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(400)))
    mask = everything(net)
    mask["7.weight"][:, 3] = False
    effective = flow(net, mask, torch.zeros(1, 8)).effective
    assert not effective["6.weight"][3].any()
    assert sum(int(k.sum()) for k in effective.values()) == 400 * 64 - 8 - 8


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: Output(y, y.sum()),
        lambda y: SimpleNamespace(y=y),
        lambda y: {"a": [y], "loss": y.mean()},
        lambda y: (None, y),
        lambda y: F.softmax(y, -1),
    ],
)
def test_outputs_of_many_kinds(wrap):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return wrap(self.fc(x))

    net = Wrapped()
    assert dp.effective_sparsity(net, everything(net), torch.zeros(1, 4)) == 0


def test_outputs_of_an_unknown_kind():
    class Silent(nn.Linear):
        def forward(self, x):
            return "done"

    with pytest.raises(ValueError, match="output, a str, holds no floating-point tensor"):
        dp.effective_sparsity(Silent(4, 3), everything(Silent(4, 3)), torch.zeros(1, 4))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_switched_off(context):
    net = nn.Linear(4, 3)
    with context():
        assert dp.effective_sparsity(net, everything(net), torch.zeros(1, 4)) == 0


def test_a_frozen_network_around_an_empty_adapter_is_connected():
    net = Net(lambda net, h: h + net.up(h), up=lin())
    for part in (net.stem, net.head):
        part.requires_grad_(False)
    found = flow(net, {"up.weight": torch.zeros(4, 4, dtype=torch.bool)}, torch.zeros(1, 4))
    assert found.connected


def test_integer_examples_are_not_changed():
    class Editing(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.fc = nn.Embedding(5, 4), nn.Linear(4, 3)

        def forward(self, i):
            i[i == 0] = 1
            return self.fc(self.tokens(i))

    net, example = Editing(), torch.zeros(1, 3, dtype=torch.int64)
    assert dp.effective_sparsity(net, everything(net), example) == 0
    assert not example.any()
    whole = {**everything(net), "tokens.weight": torch.ones(5, 4, dtype=torch.bool)}
    assert dp.effective_sparsity(net, whole, example) == 0


class Products(nn.Module):
    """Weights in other hands than a layer's."""

    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.how = how

    def forward(self, x):
        return self.how(x, self.weight)


@pytest.mark.parametrize(
    ("how", "macs"),
    [
        (lambda x, w: x @ w, 32),
        (lambda x, w: torch.addmm(torch.zeros(4), x, w), 32),
        (lambda x, w: F.linear(x, w[:2]) + F.linear(x, w[2:]), 32),
        (lambda x, w: torch.einsum("bi,io->bo", x, w), None),
    ],
)
def test_multiply_adds_of_products(how, macs):
    net = Products(how)
    mask = {"weight": torch.ones(4, 4, dtype=torch.bool)}
    found = flow(net, mask, torch.zeros(2, 4))
    assert found.macs(mask) == macs
    assert dp.sparsity(found.effective) == 0


def test_multiply_adds_of_cells_and_cross_attention():
    cell = nn.GRUCell(3, 4)
    assert flow(cell, everything(cell), torch.zeros(1, 3)).macs(everything(cell)) == 12 * 3 + 12 * 4
    net = nn.MultiheadAttention(8, 2, batch_first=True)
    tokens = (torch.zeros(1, 1, 8), torch.zeros(1, 10, 8), torch.zeros(1, 10, 8))
    assert flow(net, everything(net), tokens).macs(everything(net)) == 64 + 2 * 64 * 10 + 64


def lone(bias):
    """A gate: two layers' outputs multiplied."""
    layers = {name: nn.Linear(4, 4, bias=bias) for name in ("gate", "up")}
    return Net(lambda net, h: F.silu(net.gate(h)) * net.up(h), **layers)


@pytest.mark.parametrize("bias", [False, True])
def test_a_factor_that_is_zero_lets_nothing_pass_and_a_constant_one_does(bias):
    net = lone(bias)
    net.stem.bias = net.head.bias = None
    mask = everything(net)
    mask["up.weight"][2] = False
    effective = flow(net, mask, torch.zeros(1, 4)).effective
    assert bool(effective["gate.weight"][2].any()) is bias
    assert bool(effective["head.weight"][:, 2].any()) is bias
    assert effective["gate.weight"][[0, 1, 3]].all()
    assert by_trying(net, mask, torch.rand(3, 4)) == {name: kept.tolist() for name, kept in effective.items()}


def by_trying(net, mask, x):
    """Which kept weights change how the output depends on the input: a little of each is added, one by one."""
    net = copy.deepcopy(net).double()
    weights = dict(net.named_parameters())
    torch.manual_seed(1)
    for name, weight in weights.items():
        weight.data.copy_(torch.rand_like(weight) + 0.1)
        if name in mask:
            weight.data.mul_(mask[name])

    def answers():
        with torch.no_grad():
            found = net(x.double())
        return found[1:] - found[:1]

    before, found = answers(), {}
    for name, kept in mask.items():
        changed = torch.zeros_like(kept)
        for index in kept.nonzero().tolist():
            weights[name].data[tuple(index)] += 0.5
            changed[tuple(index)] = bool((answers() - before).abs().max() > 1e-9)
            weights[name].data[tuple(index)] -= 0.5
        found[name] = changed.tolist()
    return found


def test_complex_numbers_elsewhere_are_refused_and_not_taken_for_nothing():
    net = Net(lambda net, h: torch.fft.fft(h).abs())
    with pytest.raises(NotImplementedError, match="complex numbers are followed in rotations"):
        flow(net, everything(net), torch.zeros(1, 4))


def test_positions_from_a_table_by_index_count_as_they_are_kept():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4))
            self.learned = nn.Embedding(3, 4)

        def forward(self, x):
            h = self.fc(x) + self.table[torch.tensor([0, 2, 4])] + self.learned(torch.arange(3))
            return F.scaled_dot_product_attention(h, h, h, attn_mask=self.table[:3, :3])

    net = Biased()
    mask = {**everything(net), "table": torch.rand(5, 4) < 0.5, "learned.weight": torch.rand(3, 4) < 0.5}
    effective = flow(net, mask, torch.zeros(1, 3, 4)).effective
    assert all(torch.equal(effective[name], kept) for name, kept in mask.items())


@pytest.mark.parametrize("tokens", [1, 5])
def test_multiply_adds_of_experts_are_their_share_of_the_tokens(tokens):
    net = BODIES["experts"]
    found = flow(net, everything(net), torch.zeros(tokens, 4))
    assert found.macs(everything(net)) == tokens * (16 + 8 + 16 + 16)  # of four experts each example meets one


def test_multiply_adds_of_weights_on_the_left_of_products_and_in_groups():
    class Left(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4, 3))

        def forward(self, x, i):
            return (self.weight[i] @ x.unsqueeze(-1)).squeeze(-1)

    net, mask = Left(), {"weight": torch.ones(2, 4, 3, dtype=torch.bool)}
    found = flow(net, mask, (torch.zeros(5, 3), torch.tensor([0, 1, 1, 0, 1])))
    assert found.macs(mask) == 5 * 12


class Hooked(nn.Module):
    """Collects what its layers put out by hooks of its own, as transformers does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.a.register_forward_hook(self.collect)
        self.kept = []

    def collect(self, module, args, output):
        self.kept.append(output)

    def forward(self, x):
        self.kept.clear()
        self.a(x)
        return self.b(self.kept[0])


def test_hooks_of_the_network_itself_are_a_part_of_it_and_those_of_others_are_not():
    net, recorder = Hooked(), Recorder()
    net.a.register_forward_hook(recorder)
    assert effective_sparsity_of(net) == 0
    assert not recorder.seen
    assert not net.kept
    assert len(net.a._forward_hooks) == 2


def effective_sparsity_of(net):
    return dp.effective_sparsity(net, everything(net), torch.zeros(1, 4))


class Recorder:
    """A hook of another program's, say."""

    __module__ = "somewhere.else"

    def __init__(self):
        self.seen = []

    def __call__(self, module, args, output):
        self.seen.append(output)


def test_masks_that_do_not_fit():
    net = nn.Linear(4, 4)
    for bad in ({"nope": torch.ones(1, dtype=torch.bool)}, {"weight": torch.ones(1, 4, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="does not fit the model"):
            dp.effective_sparsity(net, bad, torch.zeros(1, 4))
    with pytest.raises(ValueError, match="an example input is needed"):
        dp.summary(everything(net), net)
