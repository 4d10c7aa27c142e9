"""CIFAR-100: 60,000 small photographs of a hundred kinds of things (the fine labels)."""

from __future__ import annotations

from pathlib import Path

from driveprune.batches import Data
from driveprune.datasets import _cifar
from driveprune.datasets._source import About, Archive, download

ABOUT = About("photographs of 100 kinds of things", _cifar.SHAPE, 100, 50_000, 10_000, "www.cs.toronto.edu/~kriz")
LAYOUT = _cifar.Layout(
    name="cifar100",
    about=ABOUT,
    archive=Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
    ),
    train={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
    test={"test.bin": "4499cfba6c016c1be1438163640a0898"},
    labels=2,
    classes=tuple(
        """
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
        man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
        pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
        skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
        tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
        """.split()
    ),
)


def load(data_dir: Path) -> Data:
    """CIFAR-100 from its binary version, with its fine labels.

    Reference: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    return _cifar.load(data_dir, LAYOUT)


def get(data_dir: Path) -> Path:
    """Download and unpack the official archive (161 MB)."""
    return download(data_dir, LAYOUT.archive, LAYOUT.first)
