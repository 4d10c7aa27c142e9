"""VGG-16 with batch normalisation and one linear layer, for small images."""

from __future__ import annotations

from torch import nn

from driveprune.models.width import KaimingNet, scaled

_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(classes: int = 10, *, width: float = 1.0, inputs: int = 3) -> KaimingNet:
    """Thirteen 3×3 convolutions with BN, five max pools, one linear layer; 14,715,584 prunable for 10 classes.

    Images of 32×32 pixels and larger; what is left of the plane at the end is averaged.

    Reference: Simonyan and Zisserman, Very deep convolutional networks for large-scale image recognition, 2015.
    """
    layers: list[nn.Module] = []
    for stage in _STAGES:
        for outputs in (scaled(channels, width) for channels in stage):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return KaimingNet(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
