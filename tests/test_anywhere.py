"""Networks that are not images in, classes out: each with every method, trained by its own loop, saved and loaded."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import driveprune as dp
from driveprune.mask import kept_count
from tests.nets import removed_are_zero, same, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning"),
    pytest.mark.filterwarnings("ignore:all scores of second.parametrizations:driveprune.ScoreWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
SHORT = {
    "imp": {"cycles": 2, "cycle_epochs": 1},
    "gmp": {"cuts": 3},
    "drive": {"early_epochs": 1, "cuts": 4},
    "driveflow": {"early_epochs": 1, "cuts": 4},
    "magnitude": {"early_epochs": 2},
    "synflow": {"cuts": 4},
    "force": {"cuts": 4},
}


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count, size, seed=0):
    return torch.randint(count, (size,), generator=torch.Generator().manual_seed(seed))


class Language(nn.Module):
    """A Transformer that guesses the next token: attention, layer normalisation, one table for input and output."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(17, 12)
        self.positions = nn.Embedding(7, 12)
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
        self.wide, self.narrow = nn.Linear(12, 30), nn.Linear(30, 12)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        h = self.tokens(x) + self.positions(torch.arange(length, device=x.device))
        normed = self.norms[0](h)
        h = h + self.attention(normed, normed, normed, attn_mask=later, need_weights=False)[0]
        h = h + self.narrow(F.gelu(self.wide(self.norms[1](h))))
        return self.head(h)

    @staticmethod
    def batch(seed=0):
        return torch.randint(17, (6, 8), generator=torch.Generator().manual_seed(seed))

    @staticmethod
    def loss(net, batch):
        return F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Audio(nn.Module):
    """One-dimensional convolutions: strided, dilated, depthwise."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 8, 9, stride=2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, groups=8, dilation=2),
            nn.Conv1d(8, 12, 1), nn.BatchNorm1d(12), nn.SiLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
            nn.Dropout(0.1), nn.Linear(48, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    @staticmethod
    def batch(seed=0):
        return noise(6, 1, 64, seed=seed), classes(4, 6, seed)

    @staticmethod
    def loss(net, batch):
        return F.cross_entropy(net(batch[0]), batch[1])


class Volume(nn.Module):
    """Three-dimensional convolutions, down and up again: a regression for each voxel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv3d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.deep = nn.Conv3d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose3d(8, 8, 2, stride=2)
        self.out = nn.Conv3d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norm(self.down(x)))
        deep = F.relu(self.deep(F.max_pool3d(first, 2)))
        return self.out(torch.cat([first, self.up(deep)], 1))

    @staticmethod
    def batch(seed=0):
        return noise(3, 2, 4, 4, 4, seed=seed), noise(3, 1, 4, 4, 4, seed=seed + 100)

    @staticmethod
    def loss(net, batch):
        return F.mse_loss(net(batch[0]), batch[1])


class Gan(nn.Module):
    """Two networks with an optimiser each."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 6))
        self.critic = nn.Sequential(nn.Linear(6, 20), nn.LeakyReLU(0.2), nn.Linear(20, 1))

    def forward(self, real: Tensor, seeds: Tensor) -> Tensor:
        return torch.cat([self.critic(real), -self.critic(self.generator(seeds))])

    @staticmethod
    def batch(seed=0):
        return noise(8, 6, seed=seed), noise(8, 4, seed=seed + 100)

    @staticmethod
    def loss(net, batch):
        return F.softplus(-net(*batch)).mean()


class Memory(nn.Module):
    """A bidirectional LSTM with projections, time first, after a table of tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 10, num_layers=2, bidirectional=True, proj_size=5, dropout=0.2)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(x))[0].mean(0))

    @staticmethod
    def batch(seed=0):
        return classes(11, 7 * 6, seed).view(7, 6), classes(4, 6, seed)

    loss = staticmethod(Audio.loss)


class Shared(nn.Module):
    """A block that is used three times and has two names."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.again = nn.ModuleList([self.block, self.block])
        self.leave = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in (self.block, *self.again):
            h = h + block(h)
        return self.leave(h)

    @staticmethod
    def batch(seed=0):
        return noise(8, 6, seed=seed), classes(3, 8, seed)

    loss = staticmethod(Audio.loss)


class Normed(nn.Module):
    """Parametrised layers beside plain ones: weight norm, spectral norm, orthogonal."""

    def __init__(self):
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(6, 16))
        self.second = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.third = parametrizations.orthogonal(nn.Linear(16, 16))
        self.plain, self.leave = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.second(torch.relu(self.first(x))))
        return self.leave(torch.relu(self.plain(torch.relu(self.third(h)))))

    batch = staticmethod(Shared.batch)
    loss = staticmethod(Audio.loss)


NETS = {
    "language": (Language, {"include": "tokens.weight"}, 17 * 12 + 3 * 12 * 12 + 12 * 12 + 2 * 12 * 30),
    "audio": (Audio, {}, 8 * 9 + 8 * 3 + 8 * 12 + 48 * 4),
    "volume": (Volume, {}, 2 * 8 * 27 + 8 * 8 * 27 + 8 * 8 * 8 + 16),
    "gan": (Gan, {}, 4 * 20 + 20 * 6 + 6 * 20 + 20),
    "lstm": (Memory, {}, 2 * (40 * 6 + 40 * 5 + 10 * 5) + 2 * (40 * 10 + 40 * 5 + 10 * 5) + 10 * 4),
    "shared": (Shared, {}, 6 * 16 + 2 * 16 * 16 + 16 * 3),
    "normed": (Normed, {}, 16 * 16 + 16 * 3),
    "normed, included": (
        Normed,
        {"include": "second.parametrizations.weight.original"},
        2 * 16 * 16 + 16 * 3,
    ),
}


def made(name, seed=0):
    torch.manual_seed(seed)
    return NETS[name][0]()


def optimizers(net):
    parts = [net.generator, net.critic] if isinstance(net, Gan) else [net]
    return [torch.optim.AdamW(part.parameters(), lr=0.01, weight_decay=0.1) for part in parts]


@pytest.mark.parametrize("method", dp.methods.names())
@pytest.mark.parametrize("name", NETS)
def test_every_method_on_every_network(name, method, tmp_path):
    kind, options, size = NETS[name]
    net, data = made(name), [kind.batch(seed) for seed in range(4)]
    trained = optimizers(net)
    pruner = dp.Pruner(
        net, trained, data, method=method, sparsity=0.8, epochs=5, steps_per_epoch=4, loss=kind.loss,
        knobs=SHORT.get(method), **options,
    )  # fmt: skip
    assert sum(kept.numel() for kept in pruner.mask.values()) == size
    before = snapshot(net)
    steps = 0
    for _ in range(pruner.epochs):
        for batch in data:
            for optimizer in trained:
                optimizer.zero_grad()
                kind.loss(net, batch).backward()
                optimizer.step()
            pruner.step()
            assert removed_are_zero(net, pruner.mask)
            steps += 1
    assert pruner.done
    assert steps >= 20
    assert sum(int(kept.sum()) for kept in pruner.mask.values()) == kept_count(size, 0.8)
    assert not same(before, snapshot(net))
    dp.save(tmp_path / "net.safetensors", net, pruner.mask)
    again = made(name, seed=1)
    assert same(dict(dp.load(tmp_path / "net.safetensors", again)), dict(pruner.mask))
    assert same(snapshot(net), snapshot(again))
    assert torch.equal(kind.loss(net.eval(), data[0]), kind.loss(again.eval(), data[0]))


@pytest.mark.parametrize("name", NETS)
def test_paths_through_every_network_are_followed(name, recwarn):
    """No warning that the network could not be followed, and a dense one is whole."""
    kind, options, _ = NETS[name]
    net = made(name)
    mask = dp.prune(net, [kind.batch()], method="random", sparsity=0.0, loss=kind.loss, **options)
    assert not [str(warning.message) for warning in recwarn]
    assert dp.sparsity(mask) == 0


def test_what_is_tied_stays_tied():
    net = made("language")
    dp.prune(net, [Language.batch()], method="snip", sparsity=0.8, loss=Language.loss, include="tokens.weight")
    assert net.head.weight is net.tokens.weight
    shared = made("shared")
    assert list(dp.prunable(shared)) == ["enter.weight", "block.0.weight", "block.2.weight", "leave.weight"]
