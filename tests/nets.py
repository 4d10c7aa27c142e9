"""Small networks and batches that the tests share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def batch(size: int = 16, features: int = 6, classes: int = 3, seed: int = 0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, features, generator=generator).to(dtype)
    return x, torch.randint(classes, (size,), generator=generator)


def images(size: int = 8, channels: int = 3, pixels: int = 8, classes: int = 4, seed: int = 0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, channels, pixels, pixels, generator=generator).to(dtype)
    return x, torch.randint(classes, (size,), generator=generator)


def mlp(seed: int = 0, dtype=torch.float32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(6, 40, bias=bias), nn.ReLU(), nn.Linear(40, 30, bias=bias), nn.Tanh(), nn.Linear(30, 3, bias=bias)
    )
    return net.to(dtype)


def convnet(seed: int = 0, dtype=torch.float32) -> nn.Sequential:
    """Convolutions, batch normalisation and dropout."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4),
    )  # fmt: skip
    return net.to(dtype)


class Transformer(nn.Module):
    """Tokens in, classes out: embeddings, positions, attention, layer normalisation."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.pos_table = nn.Parameter(torch.randn(5, 8))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm((5, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.pos_table
        h = self.norm(h + self.attention(h, h, h)[0])
        return self.head(h.mean(1))


class Recurrent(nn.Module):
    """A two-layer LSTM with dropout."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def tokens(size: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (size, 5), generator=generator), torch.randint(4, (size,), generator=generator)


def sequences(size: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 7, 5, generator=generator), torch.randint(4, (size,), generator=generator)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, copied."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names and equal bits."""
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def removed_are_zero(model: nn.Module, mask: dict[str, Tensor]) -> bool:
    weights = dict(model.named_parameters())
    return all(not weights[name][~kept].count_nonzero() for name, kept in mask.items())
