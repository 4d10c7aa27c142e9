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


def without_norm(classes: int = 10, inputs: int = 1, size: int = 8) -> nn.Sequential:
    """A small network for images, without batch statistics and without dropout."""
    return nn.Sequential(
        nn.Conv2d(inputs, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * (size // 2) ** 2, 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip


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


def conv_bn(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, bias: bool = False):
    layers = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=bias), nn.BatchNorm2d(outputs)
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


class DenseLike(nn.Module):
    """Every layer sees the outputs of all before it, side by side."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16 + 8 * place) for place in range(4))
        self.layers = nn.ModuleList(nn.Conv2d(16 + 8 * place, 8, 3, padding=1, bias=False) for place in range(4))
        self.transition = nn.Conv2d(48, 24, 1)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(torch.relu(norm(x)))], 1)
        x = nn.functional.avg_pool2d(self.transition(x), 2)
        return self.head(x.mean((2, 3)))


class InceptionLike(nn.Module):
    """Branches of different kernels, one with a padded average pool, side by side; sizes written as numbers."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.stem = conv_bn(3, 24)
        self.one = conv_bn(24, 16, 1)
        self.three = nn.Sequential(conv_bn(24, 12, 1), conv_bn(12, 20, 3))
        self.five = nn.Sequential(conv_bn(24, 8, 1), nn.Conv2d(8, 12, 5, padding=2), nn.ReLU())
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(24, 8, 1))
        self.reduce = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(56, 32, 3), nn.ReLU6())
        self.head = nn.Sequential(nn.Linear(32 * 2 * 2, 30), nn.Dropout(0.3), nn.Linear(30, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.reduce(torch.cat((self.one(x), self.three(x), self.five(x), self.pool(x)), dim=1))
        return self.head(x.view(-1, 32 * 2 * 2))


class MobileLike(nn.Module):
    """Inverted residuals with depthwise convolutions, squeeze and excitation, and one grouped convolution."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.stem = conv_bn(3, 16, stride=2)
        self.expand = nn.ModuleList(conv_bn(16, 48, 1) for _ in range(2))
        self.depthwise = nn.ModuleList(conv_bn(48, 48, groups=48) for _ in range(2))
        self.squeeze = nn.ModuleList(nn.Conv2d(48, 12, 1) for _ in range(2))
        self.excite = nn.ModuleList(nn.Conv2d(12, 48, 1) for _ in range(2))
        self.project = nn.ModuleList(
            nn.Sequential(nn.Conv2d(48, 16, 1, bias=False), nn.BatchNorm2d(16)) for _ in range(2)
        )
        self.grouped = nn.Conv2d(16, 24, 3, padding=1, groups=4)
        self.twice = nn.Conv2d(24, 48, 3, groups=24)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        parts = zip(self.expand, self.depthwise, self.squeeze, self.excite, self.project, strict=True)
        for expand, depthwise, squeeze, excite, project in parts:
            y = depthwise(expand(x))
            y = y * torch.sigmoid(excite(torch.relu(squeeze(nn.functional.adaptive_avg_pool2d(y, 1)))))
            x = x + project(y)
        x = nn.functional.hardswish(self.twice(nn.functional.relu6(self.grouped(x))))
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


class UNetLike(nn.Module):
    """Down and up again, with skips: up by a transposed convolution and by interpolation; an image comes out."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.down = nn.ModuleList([conv_bn(3, 12), conv_bn(12, 20), conv_bn(20, 28)])
        self.up = nn.ConvTranspose2d(28, 20, 2, stride=2)
        self.join = nn.ModuleList([conv_bn(40, 20), conv_bn(20 + 12 + 3, 14)])
        self.out = nn.Conv2d(14, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        third = self.down[2](nn.functional.max_pool2d(second, 2))
        y = self.join[0](torch.cat([self.up(third), second], 1))
        y = nn.functional.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.join[1](torch.cat([y, first, x], 1)))


class MixerLike(nn.Module):
    """Patches as tokens; linear layers over tokens and over channels in turn, with layer normalisation between."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 2, stride=2)
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(5))
        self.tokens = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(2)
        )
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 60), nn.GELU(), nn.Linear(60, 24)) for _ in range(2)
        )
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for place, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * place](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * place + 1](x))
        return self.head(self.norms[4](x).mean(1))
