"""ImageNet, downsampled to 32×32 pixels: 1.3 million photographs of 1000 kinds of things."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray

from driveprune.archives import find, md5, unpack
from driveprune.batches import Data
from driveprune.datasets._cache import Draft, Part, Pixels, cached, key_of
from driveprune.datasets._pictures import progress
from driveprune.datasets._source import About, differing, fewer, joined, missing
from driveprune.files import open_regular

NAME = "imagenet32"
ABOUT = About(
    "photographs of 1000 kinds of things", (3, 32, 32), 1000, 1_281_167, 50_000, "image-net.org (registration needed)"
)
TRAIN = {
    "train_data_batch_1.npz": "464fde20de6eb44c28cc1a8c11544bb1",
    "train_data_batch_2.npz": "bdb56e71882c3fd91619d789d5dd7c79",
    "train_data_batch_3.npz": "83ff36d76ea26867491a281ea6e1d03b",
    "train_data_batch_4.npz": "98ff184fe109d5c2a0f6da63843880c7",
    "train_data_batch_5.npz": "62b8803e13c3e6de9498da7aaaae57c8",
    "train_data_batch_6.npz": "e0b06665f890b029f1d8d0a0db26e119",
    "train_data_batch_7.npz": "9731f469aac1622477813c132c5a847a",
    "train_data_batch_8.npz": "60aed934b9d26b7ee83a1a83bdcfbe0f",
    "train_data_batch_9.npz": "b96328e6affd718660c2561a6fe8c14c",
    "train_data_batch_10.npz": "1dc618d544c554220dd118f72975470c",
}
TEST = {"val_data.npz": "a8c04a389f2649841fb7a01720da9dd9"}
HOW_TO_GET = (
    "register at https://image-net.org/download-images, download Imagenet32_train_npz.zip and Imagenet32_val_npz.zip "
    "(32×32, npz format) and put them there as they are"
)
_PIXELS = 3 * 32 * 32
_ROWS = 4096
"""Images that are in memory at a time while the files are converted."""


def load(data_dir: Path) -> Data:
    """ImageNet32 from its npz files; the validation images are the test data.

    The files are converted once, a few megabytes at a time, into one file beside them; that is mapped into memory.

    Reference: Chrabaszcz, Loshchilov and Hutter, A Downsampled Variant of ImageNet, 2017.
    """
    train_folder, test_folder = (
        _folder(data_dir, "train", next(iter(TRAIN))),
        _folder(data_dir, "val", next(iter(TEST))),
    )
    train = [train_folder / name for name in TRAIN if (train_folder / name).is_file()]
    test = [test_folder / name for name in TEST]
    key = key_of(train_folder, [*train, *test])
    return cached(train_folder / ".driveprune-cache.bin", key, partial(_draft, train, test), mapped=True)


def get(data_dir: Path) -> Path:
    """Say how to get the files: they cannot be downloaded without an account."""
    raise ValueError(f"{NAME} cannot be downloaded without an account: {HOW_TO_GET}, into {data_dir}")


def _folder(data_dir: Path, half: str, first: str) -> Path:
    name = f"Imagenet32_{half}_npz"
    folders = [name, NAME, f"{NAME}/{name}"]
    archive = data_dir / f"{name}.zip"
    found = find(data_dir, folders, [first])
    if found is None and archive.is_file():
        found = find(unpack(archive, data_dir / name), [], [first])
        if found is None:
            raise FileNotFoundError(f"{data_dir / name} has no {first}, though {archive.name} is beside it")
    if found is None:
        raise missing(NAME, data_dir, [*(f"{f}/{first}" for f in folders), first, archive.name], HOW_TO_GET)
    return found


def _draft(train: Sequence[Path], test: Sequence[Path]) -> Draft:
    known = TRAIN | TEST
    changed = [
        path.name for path in progress([*train, *test], "comparing checksums") if md5(path) != known[path.name]
    ]
    absent = [name for name in TRAIN if name not in {path.name for path in train}]
    note = differing(changed, absent)
    parts = _part(train, "training images"), _part(test, "test images")
    if note:
        note = joined(note, fewer(ABOUT, len(parts[0].y), len(parts[1].y), ABOUT.classes))
    classes = tuple(str(number) for number in range(1, ABOUT.classes + 1))
    return Draft(NAME, ABOUT.shape, *parts, classes, official=not note, note=note)


def _part(files: Sequence[Path], what: str) -> Part:
    """The labels are read now, the pixels when they are asked for."""
    y = np.concatenate([_labels(path) for path in files])
    return Part(torch.from_numpy(y), partial(_pieces, files, what))


def _pieces(files: Sequence[Path], what: str) -> Iterator[Pixels]:
    for path in progress(files, f"converting {what}"):
        for rows in _stream(path, "data"):
            yield rows.reshape(-1, *ABOUT.shape)


def _labels(path: Path) -> NDArray[np.int64]:
    with _array(path, "data") as (_, shape, dtype):
        if len(shape) != 2 or shape[1] != _PIXELS or not shape[0] or dtype != np.uint8:
            raise ValueError(f"{path}: data must be uint8 (N, {_PIXELS}), got {dtype} {shape}")
    with _array(path, "labels") as (_, labels, dtype):
        if labels != shape[:1] or dtype.kind not in "iu":
            raise ValueError(f"{path}: labels must be integers ({shape[0]},), got {dtype} {labels}")
    y = np.concatenate(list(_stream(path, "labels"))).astype(np.int64)
    for label in (y.min(), y.max()):
        if not 1 <= label <= ABOUT.classes:
            raise ValueError(f"{path} has the label {label}, but labels are from 1 to {ABOUT.classes}")
    return y - 1


def _stream(path: Path, name: str) -> Iterator[NDArray[Any]]:
    """An array of an npz file, some rows at a time; numpy's own reader would bring all of it into memory."""
    with _array(path, name) as (file, shape, dtype):
        row = dtype.itemsize * int(np.prod(shape[1:]))
        for first in range(0, shape[0], _ROWS):
            size = row * min(_ROWS, shape[0] - first)
            content = file.read(size)
            if len(content) != size:
                raise ValueError(f"{path} is damaged: {name} is cut off")
            yield np.frombuffer(content, dtype).reshape(-1, *shape[1:])


@contextmanager
def _array(path: Path, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]]:
    """The bytes of an array of an npz file, its shape and type."""
    try:
        with open_regular(path) as whole, ZipFile(whole) as archive, archive.open(f"{name}.npy") as file:
            _check_size(archive.getinfo(f"{name}.npy"), name)
            shape, by_columns, dtype = _header(file)
            if dtype.hasobject:
                raise ValueError(f"{name} holds Python objects, which are never read")
            if by_columns and len(shape) > 1:
                raise ValueError(f"{name} is stored by columns")
            yield file, shape, dtype
    except KeyError:
        raise ValueError(f"{path} has no array {name!r}") from None
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error) as error:
        raise ValueError(f"{path} is damaged or no npz file: {error}") from None
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(file)
        return found
    except Exception as error:  # a text of Python: tokens, syntax and types raise errors of their own
        raise ValueError(f"the header of an array makes no sense: {error}") from None


def _check_size(info: ZipInfo, name: str) -> None:
    if info.file_size > _FREE + _EACH * info.compress_size:
        raise ValueError(f"{name} would unpack to far more than {info.compress_size:,} bytes of images hold")


_FREE, _EACH = 1 << 24, 50
"""An array may unpack to 16 MB, and 50 bytes for each of its bytes; a bomb unpacks to 1000."""
