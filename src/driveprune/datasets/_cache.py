"""Decoded images in one file: pixels and classes as they are in memory, then what they are, then checksums.

The file lies in the folder of the images it was made from, and is only as good as they are: it carries a key over
the name, size and time of every one of them. Whatever is wrong with it, the images are decoded again.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driveprune.batches import Data, Images, statistics
from driveprune.files import naming, open_regular, parsed_json

Pixels = NDArray[np.uint8]
_VERSION = 1
_FOOTER = struct.Struct("<Q32s")
"""Length and SHA-256 of the description before it."""
_MAP_FROM = 1 << 29
"""Bytes of pixels from which a file is mapped rather than read."""


@dataclass(frozen=True)
class Part:
    """One half of a data set before it is decoded: the classes, and the pixels piece by piece, each (n, C, H, W)."""

    y: Tensor
    pieces: Callable[[], Iterator[Pixels]]


@dataclass(frozen=True)
class Draft:
    """A data set before it is decoded."""

    name: str
    shape: tuple[int, int, int]
    train: Part
    test: Part
    classes: tuple[str, ...]
    official: bool
    note: str


def key_of(root: Path, files: Iterable[Path], *options: object) -> str:
    """A key over the names below root, sizes and times of some files."""
    found = [(str(file).removeprefix(str(root)), file.stat()) for file in files]
    listed = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
    return hashlib.sha256(json.dumps([_VERSION, *options, listed]).encode()).hexdigest()


def cached(path: Path, key: str, build: Callable[[], Draft], *, mapped: bool = False) -> Data:
    """The data set in a cache file, or built, decoded and kept there.

    Where nothing can be written it is decoded in memory, or raises if it is to be `mapped` whatever its size.
    """
    found = _read_if_good(path, key, mapped)
    if found is not None:
        return found
    draft = build()
    try:
        _write(path, key, draft)
    except OSError as error:
        if mapped:
            raise OSError(f"cannot write {path} ({error.strerror}), and the data do not belong in memory") from None
        warnings.warn(f"cannot write {path} ({error.strerror}): the images are decoded again each time", stacklevel=2)
        return _in_memory(draft)
    return _read(path, key, mapped)


def _read_if_good(path: Path, key: str, mapped: bool) -> Data | None:
    try:
        return _read(path, key, mapped)
    except (FileNotFoundError, _OutOfDateError):
        return None
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}: the images are decoded again", stacklevel=3)
        return None


def fingerprint_in(path: Path) -> str | None:
    """The fingerprint that a cache file has; None if there is no such file, or if it is damaged."""
    try:
        return str(_description(path)["fingerprint"]) if path.is_file() else None
    except (ValueError, OSError, KeyError):
        return None


class _OutOfDateError(Exception):
    """The images have changed since."""


def _read(path: Path, key: str, mapped: bool) -> Data:
    about = _description(path)
    if about["key"] != key:
        raise _OutOfDateError
    data = _data(path, about, mapped)
    if data.fingerprint != about["fingerprint"]:
        raise ValueError(f"{path} is damaged: its pixels do not match their checksum")
    for y in (data.train.y, data.test.y):
        if not 0 <= int(y.min()) <= int(y.max()) < len(data.classes):
            raise ValueError(f"{path} is damaged: it has a class that has no name")
    return data


def _description(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _FOOTER.size))
        footer = file.read()
        length, expected = _FOOTER.unpack(footer) if len(footer) == _FOOTER.size else (size, b"")
        if length > size - len(footer):
            raise ValueError(f"{path} is damaged: it is cut off")
        file.seek(size - len(footer) - length)
        text = file.read(length)
    if hashlib.sha256(text).digest() != expected:
        raise ValueError(f"{path} is damaged: its description does not match its checksum")
    about = parsed_json(text, str(path))
    try:
        _check(about)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return dict(about, pixels_end=size - len(footer) - length)


def _check(about: Any) -> None:
    """An error if a description is none: each number is used as it stands."""
    kinds = {"key": str, "name": str, "classes": list, "official": bool, "note": str, "fingerprint": str}
    if odd := [name for name, kind in kinds.items() if type(about[name]) is not kind]:
        raise TypeError(f"it has no {odd[0]}")
    for name in ("train", "test"):
        shape = about[name]
        if type(shape) is not list or len(shape) != 4 or any(type(side) is not int or side < 1 for side in shape):
            raise TypeError(f"it has no shape of {name}")
    if about["train"][1:] != about["test"][1:] or prod(about["train"]) + prod(about["test"]) > 1 << 48:
        raise ValueError("its shapes make no sense")
    if not all(isinstance(name, str) for name in about["classes"]):
        raise TypeError("it has no names of classes")
    for name in ("mean", "deviation"):
        values = about[name]
        if len(values) != about["train"][1] or not all(type(value) in {int, float} for value in values):
            raise TypeError(f"it has no {name} of each channel")
    if min(about["deviation"]) <= 0:
        raise ValueError("its deviations are not above 0")


def _data(path: Path, about: dict[str, Any], mapped: bool) -> Data:
    shapes = [tuple(about["train"]), tuple(about["test"])]
    sizes = [int(np.prod(shape)) for shape in shapes]
    counts = [shape[0] for shape in shapes]
    if sum(sizes) + 8 * sum(counts) != about["pixels_end"]:
        raise ValueError(f"{path} is damaged: it has a wrong size")
    mapped = mapped or sum(sizes) >= _MAP_FROM
    train, test = (
        _images(path, shape, at, y_at, mapped)
        for shape, at, y_at in zip(shapes, (0, sizes[0]), (sum(sizes), sum(sizes) + 8 * counts[0]), strict=True)
    )
    mean, deviation, classes = (tuple(about[field]) for field in ("mean", "deviation", "classes"))
    return Data(about["name"], train, test, classes, mean, deviation, about["official"], about["note"])


def _images(path: Path, shape: tuple[int, ...], at: int, y_at: int, mapped: bool) -> Images:
    y = torch.from_numpy(np.fromfile(path, np.int64, shape[0], offset=y_at))
    if not mapped:
        return Images(torch.from_numpy(np.fromfile(path, np.uint8, int(np.prod(shape)), offset=at)).view(shape), y)
    with warnings.catch_warnings():  # that the file cannot be written through the tensor is what is wanted
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return Images(torch.from_numpy(np.memmap(path, np.uint8, "r", at, shape)), y, mapped=True)


def _write(path: Path, key: str, draft: Draft) -> None:
    temporary = path.with_name(f"{path.name}.{token_hex(4)}.part")
    with naming(path), temporary.open("xb") as file:
        try:
            for part in (draft.train, draft.test):
                for piece in part.pieces():
                    file.write(np.ascontiguousarray(piece).data)
            pixels_end = file.tell() + 8 * (len(draft.train.y) + len(draft.test.y))
            for part in (draft.train, draft.test):
                file.write(part.y.numpy().data)
            file.flush()
            file.write(_ending(temporary, key, draft, pixels_end))
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _ending(path: Path, key: str, draft: Draft, pixels_end: int) -> bytes:
    """Description and footer of a file that holds its pixels and classes already; they are read back from it."""
    about: dict[str, Any] = {
        "key": key,
        "name": draft.name,
        "train": [len(draft.train.y), *draft.shape],
        "test": [len(draft.test.y), *draft.shape],
        "classes": draft.classes,
        "official": draft.official,
        "note": draft.note,
    }
    blank = {**about, "mean": (), "deviation": (), "pixels_end": pixels_end}
    data = _data(path, blank, mapped=True)
    about["mean"], about["deviation"] = statistics(data.train)
    text = json.dumps({**about, "fingerprint": data.fingerprint}).encode()
    return text + _FOOTER.pack(len(text), hashlib.sha256(text).digest())


def _in_memory(draft: Draft) -> Data:
    train, test = (
        Images(torch.from_numpy(np.concatenate(list(part.pieces()))), part.y) for part in (draft.train, draft.test)
    )
    return Data(draft.name, train, test, draft.classes, *statistics(train), draft.official, draft.note)
