"""The IDX files of MNIST and of the data sets made after it: raw or compressed, under any of their usual names."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from driveprune.archives import fetch, find
from driveprune.batches import Data, Images, statistics
from driveprune.datasets._source import About, differing, fewer, joined, missing
from driveprune.files import read_bytes

PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_UNSIGNED_BYTE = 8


@dataclass(frozen=True)
class Layout:
    """The files of one data set, with MD5s by part: of the files as they are served, and of what is inside."""

    name: str
    about: About
    url: str
    folders: tuple[str, ...]
    compressed: Mapping[str, str]
    content: Mapping[str, str]
    classes: tuple[str, ...]


def file_names(part: str) -> list[str]:
    """The usual names of a part's file.

    >>> file_names("train-images-idx3")[:2]
    ['train-images-idx3-ubyte', 'train-images-idx3-ubyte.gz']
    """
    stems = (f"{part}-ubyte", f"{part.replace('-idx', '.idx')}-ubyte")
    return [f"{stem}{ending}" for stem in stems for ending in ("", ".gz")]


def load(data_dir: Path, layout: Layout) -> Data:
    """Read the four files, found in one folder below data_dir."""
    folder = find(data_dir, layout.folders, file_names(PARTS[0]))
    if folder is None:
        first = f"{PARTS[0]}-ubyte[.gz]"
        raise missing(layout.name, data_dir, [*(f"{folder}/{first}" for folder in layout.folders), first])
    paths = {part: _path(folder, part) for part in PARTS}
    contents = {part: _bytes(path) for part, path in paths.items()}
    arrays = {part: parse(content, paths[part]) for part, content in contents.items()}
    train, test = (_images(arrays, paths, layout, PARTS[first : first + 2]) for first in (0, 2))
    changed = [paths[part].name for part in PARTS if _md5(contents[part]) != layout.content[part]]
    note = differing(changed)
    if note:
        note = joined(note, fewer(layout.about, len(train), len(test), len(layout.classes)))
    return Data(layout.name, train, test, layout.classes, *statistics(train), official=not note, note=note)


def get(data_dir: Path, layout: Layout) -> Path:
    """Download the four files, as they are, into the first of the usual folders."""
    for part in PARTS:
        fetch(f"{layout.url}{part}-ubyte.gz", layout.compressed[part], data_dir / layout.folders[0])
    return data_dir / layout.folders[0]


def _path(folder: Path, part: str) -> Path:
    for name in file_names(part):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder} has no {part}-ubyte, raw or .gz")


def _bytes(path: Path) -> bytes:
    content = read_bytes(path)
    if not content.startswith(b"\x1f\x8b"):
        return content
    most = _FREE + _EACH * len(content)
    try:
        with gzip.open(io.BytesIO(content)) as file:
            plain: bytes = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if len(plain) > most:
        raise ValueError(f"{path} would unpack to far more than {len(content):,} bytes of images hold")
    return plain


_FREE, _EACH = 1 << 24, 50
"""A file may unpack to 16 MB, and 50 bytes for each of its bytes (MNIST: 5; a bomb: 1000)."""


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def parse(content: bytes, path: Path) -> Tensor:
    """The bytes in an IDX file: after two zeros come the type, the number of dimensions, their sizes, the data."""
    dimensions = content[3] if len(content) >= 4 else 0
    header = 4 + 4 * dimensions
    if content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or not dimensions or len(content) < header:
        raise ValueError(f"{path} is no IDX file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != prod(shape):
        raise ValueError(
            f"{path} says that it holds {prod(shape):,} bytes {shape}, but has {len(content) - header:,}"
        )
    data = bytearray(memoryview(content)[header:]) or bytearray(1)
    return torch.frombuffer(data, dtype=torch.uint8)[: prod(shape)].view(shape)


def _images(
    arrays: Mapping[str, Tensor], paths: Mapping[str, Path], layout: Layout, parts: tuple[str, ...]
) -> Images:
    x, y = (arrays[part] for part in parts)
    _, height, width = layout.about.shape
    if x.dim() != 3 or tuple(x.shape[1:]) != (height, width) or not len(x):
        raise ValueError(
            f"{paths[parts[0]]} must hold images of {height}×{width}, but has the shape {tuple(x.shape)}"
        )
    if y.shape != x.shape[:1]:
        raise ValueError(f"{paths[parts[1]]} must hold {len(x):,} labels, but has the shape {tuple(y.shape)}")
    if int(y.max()) >= len(layout.classes):
        raise ValueError(
            f"{paths[parts[1]]} has the label {int(y.max())}, but there are {len(layout.classes)} classes"
        )
    return Images(x[:, None], y.long())
