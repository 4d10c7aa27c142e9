"""CIFAR-10: 60,000 small photographs of ten kinds of things."""

from __future__ import annotations

from pathlib import Path

from driveprune.batches import Data
from driveprune.datasets import _cifar
from driveprune.datasets._source import About, Archive, download

ABOUT = About("photographs of ten kinds of things", _cifar.SHAPE, 10, 50_000, 10_000, "www.cs.toronto.edu/~kriz")
LAYOUT = _cifar.Layout(
    name="cifar10",
    about=ABOUT,
    archive=Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
    ),
    train={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    },
    test={"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
    labels=1,
    classes=tuple("airplane automobile bird cat deer dog frog horse ship truck".split()),
)


def load(data_dir: Path) -> Data:
    """CIFAR-10 from its binary version.

    Reference: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    return _cifar.load(data_dir, LAYOUT)


def get(data_dir: Path) -> Path:
    """Download and unpack the official archive (162 MB)."""
    return download(data_dir, LAYOUT.archive, LAYOUT.first)
