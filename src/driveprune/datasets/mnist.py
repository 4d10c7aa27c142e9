"""MNIST: 70,000 handwritten digits."""

from __future__ import annotations

from pathlib import Path

from driveprune.batches import Data
from driveprune.datasets import _idx
from driveprune.datasets._source import About

ABOUT = About("handwritten digits", (1, 28, 28), 10, 60_000, 10_000, "yann.lecun.com, mirrored by PyTorch")
LAYOUT = _idx.Layout(
    name="mnist",
    about=ABOUT,
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    folders=("mnist", "MNIST/raw", "MNIST"),
    compressed={
        "train-images-idx3": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    content={
        "train-images-idx3": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1": "27ae3e4e09519cfbb04c329615203637",
    },
    classes=tuple("0123456789"),
)


def load(data_dir: Path) -> Data:
    """MNIST from its four IDX files.

    Reference: LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document Recognition, 1998.
    """
    return _idx.load(data_dir, LAYOUT)


def get(data_dir: Path) -> Path:
    """Download the four official files (12 MB)."""
    return _idx.get(data_dir, LAYOUT)
