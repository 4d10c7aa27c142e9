"""The binary versions of CIFAR-10 and CIFAR-100: for each image its label bytes, then 3×32×32 pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from driveprune.batches import Data, Images, statistics
from driveprune.datasets._source import About, Archive, differing, fewer, joined, unpacked
from driveprune.files import read_bytes

SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """The files of one of the two."""

    name: str
    about: About
    archive: Archive
    train: Mapping[str, str]
    """The training files and their MD5s."""
    test: Mapping[str, str]
    labels: int
    """Bytes before the pixels; the last of them is the class."""
    classes: tuple[str, ...]

    @property
    def first(self) -> str:
        """The file by which the folder is known."""
        return next(iter(self.train))


def load(data_dir: Path, layout: Layout) -> Data:
    """Read the files, found below data_dir unpacked or in their archive."""
    folder = unpacked(layout.name, data_dir, layout.archive, layout.first)
    train, changed = _read_all(folder, layout.train, layout)
    test, changed_too = _read_all(folder, layout.test, layout)
    note = differing(changed + changed_too)
    if note:
        note = joined(note, fewer(layout.about, len(train), len(test), len(layout.classes)))
    return Data(layout.name, train, test, layout.classes, *statistics(train), official=not note, note=note)


def _read_all(folder: Path, files: Mapping[str, str], layout: Layout) -> tuple[Images, list[str]]:
    """The images of some files, and which of these are not the official ones."""
    found, changed = [], []
    for name, expected in files.items():
        content = _bytes(folder / name)
        found.append(parse(content, folder / name, layout.labels, len(layout.classes)))
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != expected:
            changed.append(name)
    return Images(torch.cat([images.x for images in found]), torch.cat([images.y for images in found])), changed


def _bytes(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} has no {path.name}") from None


def parse(content: bytes, path: Path, labels: int, classes: int) -> Images:
    """The images in the bytes of a file."""
    size = labels + _PIXELS
    if not content or len(content) % size:
        raise ValueError(
            f"{path} is cut off or no CIFAR file: {len(content):,} bytes are not images of {size:,} bytes"
        )
    records = torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8)).view(-1, size)
    y = records[:, labels - 1].long()
    if int(y.max()) >= classes:
        raise ValueError(f"{path} has the label {int(y.max())}, but there are only {classes} classes")
    return Images(records[:, labels:].reshape(-1, *SHAPE), y)
