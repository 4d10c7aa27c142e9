"""AlexNet for images of 32×32 or 64×64 pixels."""

from __future__ import annotations

from torch import nn

from driveprune.models.width import scaled


def alexnet(
    classes: int = 10, *, width: float = 1.0, inputs: int = 3, size: int = 32, dropout: float = 0.5
) -> nn.Sequential:
    """Five 3×3 convolutions, three linear layers with dropout; 23,262,912 prunable weights at full width.

    Args:
        classes: number of outputs.
        width: multiplies all channel and neuron counts.
        inputs: channels of the images.
        size: height and width of the images, a multiple of 16.
        dropout: rate before the first two linear layers.

    Reference: Krizhevsky, Sutskever and Hinton, ImageNet classification with deep convolutional neural
    networks, 2012.

    """
    if size < 16 or size % 16:
        raise ValueError(f"AlexNet takes images whose size is a multiple of 16, got {size}")
    a, b, c, d, neurons = (scaled(channels, width) for channels in (64, 192, 384, 256, 4096))
    return nn.Sequential(
        nn.Conv2d(inputs, a, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(c, d, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(d, d, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(d * (size // 16) ** 2, neurons), nn.ReLU(inplace=True),
        nn.Dropout(dropout), nn.Linear(neurons, neurons), nn.ReLU(inplace=True),
        nn.Linear(neurons, classes),
    )  # fmt: skip
