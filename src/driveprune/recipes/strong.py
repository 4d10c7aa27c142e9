"""A common strong recipe: its dense baselines are far above the paper's (ResNet-18, CIFAR-100: 78.3 against 66.5)."""

from __future__ import annotations

from dataclasses import replace

from driveprune.recipes import paper
from driveprune.recipes.recipe import Recipe, scaled


def _strong(recipe: Recipe, rate: float) -> Recipe:
    """160 epochs of SGD with Nesterov momentum, a tenth of the rate at 60 and 120, label smoothing 0.1."""
    return replace(
        recipe, epochs=160, batch=128, optimizer="sgd", rate=rate, momentum=0.9, nesterov=True, weight_decay=5e-4,
        cosine=False, drops=((60.0, 0.1), (120.0, 0.01)), label_smoothing=0.1,
    )  # fmt: skip


def vgg16_cifar10() -> Recipe:
    """VGG-16 on CIFAR-10, rate 0.1."""
    return _strong(paper.vgg16_cifar10(), 0.1)


def resnet18_cifar10() -> Recipe:
    """ResNet-18 on CIFAR-10, rate 0.1."""
    return _strong(paper.resnet18_cifar10(), 0.1)


def vgg16_cifar100() -> Recipe:
    """VGG-16 on CIFAR-100, rate 0.1."""
    return _strong(paper.vgg16_cifar100(), 0.1)


def resnet18_cifar100() -> Recipe:
    """ResNet-18 on CIFAR-100, rate 0.1."""
    return _strong(paper.resnet18_cifar100(), 0.1)


def vgg16_tiny_imagenet() -> Recipe:
    """VGG-16 on Tiny ImageNet, rate 0.01."""
    return _strong(paper.vgg16_tiny_imagenet(), 0.01)


def resnet18_tiny_imagenet() -> Recipe:
    """ResNet-18 on Tiny ImageNet, rate 0.01."""
    return _strong(paper.resnet18_tiny_imagenet(), 0.01)


def digits_net_mnist() -> Recipe:
    """The demo's network on MNIST, 30 epochs, crops but no flips."""
    return scaled(replace(general(), data="mnist", model="digits_net", padding=2), epochs=30)


def digits_net_fashion_mnist() -> Recipe:
    """The demo's network on Fashion-MNIST, 30 epochs, crops and flips."""
    return replace(digits_net_mnist(), data="fashion-mnist", flip=True)


def folder() -> Recipe:
    """For a folder of images of your own: ResNet-18, crops and flips."""
    return replace(general(), data="folder", model="resnet18", padding=4, flip=True)


def general() -> Recipe:
    """For a model and data of your own: rate 0.05, no crops and flips."""
    return replace(_strong(paper.resnet18_cifar10(), 0.05), data="own", model="own", padding=0, flip=False)
