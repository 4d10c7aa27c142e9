"""ResNet-18 for small images: a 3×3 stem and no max pool."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from driveprune.models.width import KaimingNet, scaled


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is 1×1 where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """ReLU of the convolutions' path plus the shortcut."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18(classes: int = 10, *, width: float = 1.0, inputs: int = 3) -> KaimingNet:
    """Eight blocks in four stages; 11,164,352 prunable weights for 10 classes.

    Reference: He et al., Deep residual learning for image recognition, 2016.
    """
    channels = [scaled(count, width) for count in (64, 64, 128, 256, 512)]
    stages: list[nn.Module] = []
    for stage, (before, outputs) in enumerate(pairwise(channels)):
        stages += [Block(before, outputs, stride=1 if stage == 0 else 2), Block(outputs, outputs, stride=1)]
    return KaimingNet(
        nn.Conv2d(inputs, channels[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(channels[0]),
        nn.ReLU(inplace=True),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels[-1], classes),
    )
