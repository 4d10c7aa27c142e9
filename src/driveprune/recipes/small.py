"""The paper's recipes scaled down for one small machine: narrower, fewer images and epochs, the same proportions.

Batches are a quarter as large, so that an epoch of fewer images still has a like number of steps.
"""

from __future__ import annotations

from dataclasses import replace

from driveprune.recipes import paper
from driveprune.recipes.recipe import Recipe, scaled


def alexnet_cifar10() -> Recipe:
    """AlexNet of a quarter of the width at four times the rate, 10,000 images, 20 epochs."""
    full = paper.alexnet_cifar10()
    faster = replace(full, rate=4 * full.rate)  # Adam's best rate grows as layers get narrower
    return scaled(faster, epochs=20, batch=64, width=0.25, images=10_000, test_images=2_000)


def vgg16_cifar10() -> Recipe:
    """VGG-16 of a quarter of the width, 10,000 images, 12 epochs."""
    return scaled(paper.vgg16_cifar10(), epochs=12, batch=32, width=0.25, images=10_000, test_images=2_000)


def resnet18_cifar10() -> Recipe:
    """ResNet-18 of a quarter of the width, 10,000 images, 14 epochs."""
    return scaled(paper.resnet18_cifar10(), epochs=14, batch=32, width=0.25, images=10_000, test_images=2_000)


def vgg16_cifar100() -> Recipe:
    """VGG-16 of a quarter of the width, 5,000 images, 24 epochs."""
    return scaled(paper.vgg16_cifar100(), epochs=24, batch=32, width=0.25, images=5_000, test_images=1_000)


def resnet18_cifar100() -> Recipe:
    """ResNet-18 of a quarter of the width, 5,000 images, 28 epochs."""
    return scaled(paper.resnet18_cifar100(), epochs=28, batch=32, width=0.25, images=5_000, test_images=1_000)


def vgg16_tiny_imagenet() -> Recipe:
    """VGG-16 of a quarter of the width, 3,000 images, 20 epochs."""
    return scaled(paper.vgg16_tiny_imagenet(), epochs=20, batch=32, width=0.25, images=3_000, test_images=500)


def resnet18_tiny_imagenet() -> Recipe:
    """ResNet-18 of an eighth of the width, 3,000 images, 24 epochs."""
    return scaled(paper.resnet18_tiny_imagenet(), epochs=24, batch=32, width=0.125, images=3_000, test_images=500)


def resnet18_imagenet32() -> Recipe:
    """ResNet-18 of a quarter of the width, 50,000 images, 10 epochs."""
    return scaled(paper.resnet18_imagenet32(), epochs=10, batch=64, width=0.25, images=50_000, test_images=5_000)
