"""Fashion-MNIST: 70,000 pieces of clothing, in the form of MNIST."""

from __future__ import annotations

from pathlib import Path

from driveprune.batches import Data
from driveprune.datasets import _idx
from driveprune.datasets._source import About

ABOUT = About("pieces of clothing", (1, 28, 28), 10, 60_000, 10_000, "github.com/zalandoresearch/fashion-mnist")
LAYOUT = _idx.Layout(
    name="fashion-mnist",
    about=ABOUT,
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion"),
    compressed={
        "train-images-idx3": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    content={
        "train-images-idx3": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
)  # fmt: skip


def load(data_dir: Path) -> Data:
    """Fashion-MNIST from its four IDX files.

    Reference: Xiao, Rasul and Vollgraf, Fashion-MNIST: a Novel Image Dataset, 2017.
    """
    return _idx.load(data_dir, LAYOUT)


def get(data_dir: Path) -> Path:
    """Download the four official files (31 MB)."""
    return _idx.get(data_dir, LAYOUT)
