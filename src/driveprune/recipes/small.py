"""The paper's recipes scaled down for one small machine: narrower, fewer images and epochs, the same proportions.

Batches are a quarter as large, so that an epoch of fewer images still has a like number of steps; rates are larger,
for there are far fewer steps in all, and sparse networks are the first to suffer from too small ones.
"""

from __future__ import annotations

from dataclasses import replace

from driveprune.recipes import paper
from driveprune.recipes.recipe import Recipe, scaled


def _small(recipe: Recipe, rate: float, epochs: int, images: int, test_images: int, width: float = 0.25) -> Recipe:
    return scaled(
        replace(recipe, rate=rate), epochs=epochs, batch=recipe.batch // 4, width=width, images=images,
        test_images=test_images,
    )  # fmt: skip


def alexnet_cifar10() -> Recipe:
    """AlexNet of a quarter of the width, 10,000 images, 40 epochs at 4e-4."""
    return _small(paper.alexnet_cifar10(), 4e-4, 40, 10_000, 2_000)


def vgg16_cifar10() -> Recipe:
    """VGG-16 of a quarter of the width, 10,000 images, 12 epochs at 0.01: larger rates harm the dense network."""
    return _small(paper.vgg16_cifar10(), 0.01, 12, 10_000, 2_000)


def resnet18_cifar10() -> Recipe:
    """ResNet-18 of a quarter of the width, 10,000 images, 8 epochs at 0.05."""
    return _small(paper.resnet18_cifar10(), 0.05, 8, 10_000, 2_000)


def vgg16_cifar100() -> Recipe:
    """VGG-16 of a quarter of the width, 5,000 images, 16 epochs at 0.02."""
    return _small(paper.vgg16_cifar100(), 0.02, 16, 5_000, 1_000)


def resnet18_cifar100() -> Recipe:
    """ResNet-18 of a quarter of the width, 5,000 images, 16 epochs at 0.05."""
    return _small(paper.resnet18_cifar100(), 0.05, 16, 5_000, 1_000)


def vgg16_tiny_imagenet() -> Recipe:
    """VGG-16 of a quarter of the width, 3,000 images, 12 epochs at 0.05."""
    return _small(paper.vgg16_tiny_imagenet(), 0.05, 12, 3_000, 500)


def resnet18_tiny_imagenet() -> Recipe:
    """ResNet-18 of an eighth of the width, 3,000 images, 14 epochs at 0.05."""
    return _small(paper.resnet18_tiny_imagenet(), 0.05, 14, 3_000, 500, width=0.125)


def resnet18_imagenet32() -> Recipe:
    """ResNet-18 of a quarter of the width, 50,000 images, 10 epochs at 0.1."""
    return _small(paper.resnet18_imagenet32(), 0.1, 10, 50_000, 5_000)
