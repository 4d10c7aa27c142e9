"""The settings of the paper, as printed; what it does not print is momentum 0.9, weight decay 5e-4, crop and flip.

Reference: Saikumar and Varghese, DRIVE: Dual Gradient-Based Rapid Iterative Pruning, 2024.
"""

from __future__ import annotations

from dataclasses import replace

from driveprune.recipes.recipe import Knobs, Recipe


def _knobs(early_epochs: float) -> Knobs:
    """IMP: 50 cycles of 20 epochs from the initial weights. DRIVE: some epochs, then 100 cuts. SynFlow: 100."""
    return {
        "drive": {"early_epochs": early_epochs, "cuts": 100},
        "driveflow": {"early_epochs": early_epochs, "cuts": 100},
        "imp": {"cycles": 50, "cycle_epochs": 20.0, "rewind_epochs": 0.0},
        "synflow": {"cuts": 100},
    }


_FIFTHS = tuple((float(epoch), 0.2**number) for number, epoch in enumerate((30, 60, 90, 120), start=1))
_TENTHS = ((30.0, 0.1), (60.0, 0.01), (80.0, 0.001))


def alexnet_cifar10() -> Recipe:
    """AlexNet on CIFAR-10: 50 epochs of Adam at 1e-4."""
    return Recipe(
        data="cifar10", model="alexnet", epochs=50, batch=256, optimizer="adam", rate=1e-4, weight_decay=0.0,
        knobs=_knobs(5.0),
    )  # fmt: skip


def alexnet_cifar10_curve() -> Recipe:
    """The same at the sparsities of the paper's figure, 20% to 98.5%."""
    curve = (0.2, 0.488, 0.672, 0.79, 0.866, 0.914, 0.945, 0.965, 0.977, 0.985)
    return replace(alexnet_cifar10(), sparsities=curve)


def vgg16_cifar10() -> Recipe:
    """VGG-16 on CIFAR-10: 150 epochs, the rate a fifth every 30."""
    return Recipe(
        data="cifar10", model="vgg16", epochs=150, batch=128, optimizer="sgd", rate=0.01, drops=_FIFTHS,
        knobs=_knobs(5.0),
    )  # fmt: skip


def resnet18_cifar10() -> Recipe:
    """ResNet-18 on CIFAR-10: 200 epochs, cosine."""
    return Recipe(
        data="cifar10", model="resnet18", epochs=200, batch=128, optimizer="sgd", rate=0.01, cosine=True,
        knobs=_knobs(5.0),
    )  # fmt: skip


def vgg16_cifar100() -> Recipe:
    """VGG-16 on CIFAR-100: 200 epochs, the rate a fifth at 60, 120 and 160."""
    return Recipe(
        data="cifar100", model="vgg16", epochs=200, batch=128, optimizer="sgd", rate=0.01,
        drops=((60.0, 0.2), (120.0, 0.2**2), (160.0, 0.2**3)), knobs=_knobs(5.0),
    )  # fmt: skip


def resnet18_cifar100() -> Recipe:
    """ResNet-18 on CIFAR-100: 200 epochs, a tenth of the initial rate at 80, a hundredth at 120."""
    return Recipe(
        data="cifar100", model="resnet18", epochs=200, batch=128, optimizer="sgd", rate=0.01,
        drops=((80.0, 0.1), (120.0, 0.01)), knobs=_knobs(5.0),
    )  # fmt: skip


def vgg16_tiny_imagenet() -> Recipe:
    """VGG-16 on Tiny ImageNet: 100 epochs, a tenth at 30, 60 and 80; DRIVE after one epoch."""
    return Recipe(
        data="tiny-imagenet", model="vgg16", epochs=100, batch=128, optimizer="sgd", rate=0.01, drops=_TENTHS,
        padding=8, knobs=_knobs(1.0),
    )  # fmt: skip


def resnet18_tiny_imagenet() -> Recipe:
    """ResNet-18 on Tiny ImageNet: 100 epochs, a tenth at 30, 60 and 80; DRIVE after one epoch."""
    return Recipe(
        data="tiny-imagenet", model="resnet18", epochs=100, batch=128, optimizer="sgd", rate=0.01, drops=_TENTHS,
        padding=8, knobs=_knobs(1.0),
    )  # fmt: skip


def resnet18_imagenet32() -> Recipe:
    """ResNet-18 on ImageNet at 32×32: 100 epochs, a tenth at 30, 60 and 80; DRIVE after one epoch."""
    return Recipe(
        data="imagenet32", model="resnet18", epochs=100, batch=256, optimizer="sgd", rate=0.1, drops=_TENTHS,
        knobs=_knobs(1.0), sparsities=(0.7, 0.8, 0.9, 0.95),
    )  # fmt: skip
