"""A small network for the demo: grey images of handwritten digits, 8×8 pixels."""

from __future__ import annotations

from torch import nn

from driveprune.models.width import KaimingNet, scaled


def digits_net(classes: int = 10, *, width: float = 1.0, inputs: int = 1, size: int = 8) -> KaimingNet:
    """Three 3×3 convolutions with BN and two linear layers; 89,632 prunable weights for 8×8 images."""
    a, b, c, neurons = (scaled(channels, width) for channels in (32, 64, 64, 128))
    return KaimingNet(
        nn.Conv2d(inputs, a, 3, padding=1, bias=False), nn.BatchNorm2d(a), nn.ReLU(inplace=True),
        nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(b, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear((size // 4) ** 2 * c, neurons), nn.ReLU(inplace=True),
        nn.Linear(neurons, classes),
    )  # fmt: skip
