"""Any folder of class folders: the name of an image's folder is its class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from driveprune.batches import Data
from driveprune.datasets._cache import Draft, Part, cached, fingerprint_in, key_of
from driveprune.datasets._pictures import decode_all, sizes
from driveprune.datasets._source import joined

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
DEFAULT_SIZE = 64
Labelled = list[tuple[Path, int]]


def load(path: Path, *, size: int | None = None) -> Data:
    """The images below a folder with a folder for each class, in colour.

    With the subfolders train and test (or val) these are the two halves; without, every fifth image of each class is
    test data. Images keep their size if all have the same and are square; else they are resized to `size` (64 unless
    you say otherwise): the shorter side is brought to it, and the middle kept. They are decoded once, into one file
    in the folder.
    """
    if size is not None and size < 1:
        raise ValueError(f"the size of images must be at least 1, got {size}")
    root = path.resolve()
    classes, train, test, note = _halves(root)
    key = key_of(root, [file for file, _ in train + test], size, classes, [len(train), len(test)])
    return cached(_cache(root, size), key, partial(_draft, f"folder {root.name}", classes, train, test, note, size))


def known_fingerprint(path: Path, size: int | None = None) -> str | None:
    """The fingerprint of a folder that was read before, as its cache says; no image is read. None: it was not."""
    return fingerprint_in(_cache(path.resolve(), size))


def _cache(root: Path, size: int | None) -> Path:
    return root / f".driveprune-cache-{size or 'own'}.bin"


def _halves(root: Path) -> tuple[tuple[str, ...], Labelled, Labelled, str]:
    """Classes, training files, test files, and a note on how they were divided."""
    if not (root / "train").is_dir():
        classes = _class_names(root)
        train, test = _every_fifth(_labelled(root, classes))
        if not test:
            raise ValueError(f"{root} is too small: no class has five images, of which one would be test data")
        return classes, train, test, "every fifth image of each class is test data"
    other = next((half for half in ("test", "val") if (root / half).is_dir() and _subfolders(root / half)), None)
    if other is None:
        raise ValueError(f"{root} has a folder train, but no folder test or val with class folders")
    classes = _class_names(root / "train")
    strange = [name for name in _subfolders(root / other) if name not in classes]
    if strange:
        raise ValueError(f"{root / other} has classes that {root / 'train'} has not: {', '.join(strange)}")
    return classes, _labelled(root / "train", classes), _labelled(root / other, classes, some=True), ""


def _class_names(folder: Path) -> tuple[str, ...]:
    names = _subfolders(folder)
    if len(names) < 2:
        raise ValueError(
            f"{folder} must have a folder for each of at least two classes, but has {len(names)} folders"
        )
    return tuple(names)


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _labelled(folder: Path, classes: Sequence[str], *, some: bool = False) -> Labelled:
    """The image files of all classes; with `some`, a class may have none."""
    found = []
    for number, name in enumerate(classes):
        files = _image_files(folder / name)
        if not files and not some:
            raise ValueError(f"{folder / name} has no images ({', '.join(ENDINGS)})")
        found += [(file, number) for file in files]
    if not found:
        raise ValueError(f"{folder} has no images ({', '.join(ENDINGS)})")
    return found


def _image_files(folder: Path) -> list[Path]:
    found = [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if path.suffix.lower() in ENDINGS and not path.name.startswith("."))


def _every_fifth(files: Labelled) -> tuple[Labelled, Labelled]:
    place, previous, halves = 0, -1, ([], [])  # type: ignore[var-annotated]
    for file, label in files:
        place = place + 1 if label == previous else 0
        previous = label
        halves[place % 5 == 4].append((file, label))
    return halves


def _draft(
    name: str, classes: tuple[str, ...], train: Labelled, test: Labelled, note: str, size: int | None
) -> Draft:
    found = sizes([file for file, _ in train + test])
    own = next(iter(found))
    side = size or (own[0] if len(found) == 1 and own[0] == own[1] else DEFAULT_SIZE)
    resize = found != {(side, side)}
    note = joined(note, f"resized to {side}×{side}" if resize else "")
    parts = _part(train, side, resize, "training images"), _part(test, side, resize, "test images")
    return Draft(name, (3, side, side), *parts, classes, official=True, note=note)


def _part(files: Labelled, side: int, resize: bool, what: str) -> Part:
    paths = [path for path, _ in files]
    y = torch.tensor([label for _, label in files])
    return Part(y, lambda: decode_all(paths, side, resize=resize, what=what))
