"""Tiny ImageNet: 110,000 photographs of 200 kinds of things, 64×64 pixels."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import torch

from driveprune.archives import md5
from driveprune.batches import Data
from driveprune.datasets._cache import Draft, Part, cached, key_of
from driveprune.datasets._pictures import decode_all, progress
from driveprune.datasets._source import About, Archive, differing, download, fewer, unpacked
from driveprune.files import read_bytes

NAME = "tiny-imagenet"
ABOUT = About("photographs of 200 kinds of things", (3, 64, 64), 200, 100_000, 10_000, "cs231n.stanford.edu")
ARCHIVE = Archive(
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", "tiny-imagenet-200"
)
_WNIDS, _WORDS, _ANNOTATIONS = "wnids.txt", "words.txt", "val/val_annotations.txt"
Labelled = list[tuple[Path, int]]


def load(data_dir: Path) -> Data:
    """Tiny ImageNet from its folders; the validation images are the test data, for the test images have no labels.

    Classes are numbered as in wnids.txt. The JPEGs (some are grey) are decoded once, into one file in their folder.
    No list of checksums is published: the files count as official if the official zip lies beside their folder
    and they agree with the checksums inside it.

    Reference: Le and Yang, Tiny ImageNet Visual Recognition Challenge, 2015.
    """
    folder = unpacked(NAME, data_dir, ARCHIVE, _WNIDS)
    wnids = _classes(folder)
    train, test = _training_files(folder, wnids), _test_files(folder, wnids)
    sources = [folder / _WNIDS, folder / _ANNOTATIONS, *(path for path, _ in train + test)]
    optional = [path for path in (folder / _WORDS, folder.with_name(ARCHIVE.name)) if path.is_file()]
    key = key_of(folder, [*sources, *optional])
    return cached(folder / ".driveprune-cache.bin", key, partial(_draft, folder, wnids, train, test, sources))


def get(data_dir: Path) -> Path:
    """Download and unpack the official archive (237 MB)."""
    return download(data_dir, ARCHIVE, _WNIDS)


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None


def _classes(folder: Path) -> list[str]:
    """The classes in the order of their numbers, each once; names of folders, and nothing else."""
    found = _text(folder / _WNIDS).split()
    for wnid in found:
        _check_name(folder / _WNIDS, wnid)
    if twice := [wnid for wnid, times in Counter(found).items() if times > 1]:
        raise ValueError(f"{folder / _WNIDS} lists {twice[0]} more than once")
    return found


def _check_name(path: Path, name: str) -> None:
    """What a list names lies in the folder that it belongs in."""
    if name in {"", ".", ".."} or not name.isprintable() or "/" in name or "\\" in name:
        raise ValueError(f"{path} names {name[:100]!r}, which is no name of a file")


def _training_files(folder: Path, wnids: Sequence[str]) -> Labelled:
    found = []
    for number, wnid in enumerate(wnids):
        images = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not images:
            raise ValueError(f"{folder / _WNIDS} lists {wnid}, but train/{wnid}/images has no JPEG files")
        found += [(path, number) for path in images]
    if not found:
        raise ValueError(f"{folder / _WNIDS} lists no classes")
    return found


def _test_files(folder: Path, wnids: Sequence[str]) -> Labelled:
    annotations = folder / _ANNOTATIONS
    if not annotations.is_file():
        raise FileNotFoundError(f"{folder} has no {_ANNOTATIONS}")
    numbers = {wnid: number for number, wnid in enumerate(wnids)}
    found = []
    for count, line in enumerate(_text(annotations).splitlines(), 1):
        name, wnid, *_ = [*line.split("\t"), "", ""]
        _check_name(annotations, name)
        path = folder / "val" / "images" / name
        if wnid not in numbers:
            raise ValueError(f"{annotations}, line {count}: {wnid!r} is none of the classes in {_WNIDS}")
        if not path.is_file():
            raise ValueError(f"{annotations}, line {count}: there is no image {path}")
        found.append((path, numbers[wnid]))
    if not found:
        raise ValueError(f"{annotations} is empty")
    return found


def _draft(folder: Path, wnids: Sequence[str], train: Labelled, test: Labelled, sources: Sequence[Path]) -> Draft:
    counts = fewer(ABOUT, len(train), len(test), len(wnids))
    note = f"not the official files: {counts}" if counts else _unofficial(folder, sources)
    parts = (_part(train, "training images"), _part(test, "test images"))
    return Draft(NAME, ABOUT.shape, *parts, _class_names(folder, wnids), official=not note, note=note)


def _part(files: Labelled, what: str) -> Part:
    paths = [path for path, _ in files]
    return Part(torch.tensor([label for _, label in files]), lambda: decode_all(paths, ABOUT.shape[1], what=what))


def _class_names(folder: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    words = folder / _WORDS
    lines = _text(words).splitlines() if words.is_file() else []
    names = {wnid: name for wnid, tab, name in (line.partition("\t") for line in lines) if tab}
    return tuple(names.get(wnid, wnid) for wnid in wnids)


def _unofficial(folder: Path, sources: Sequence[Path]) -> str:
    """Why the files do not count as the official ones; nothing if they do."""
    archive = folder.with_name(ARCHIVE.name)
    if not archive.is_file():
        return f"not known to be the official files, which only {ARCHIVE.name} beside {folder.name} could tell"
    if md5(archive) != ARCHIVE.md5:
        return differing([archive.name])
    with ZipFile(archive) as opened:
        known = {info.filename: info.CRC for info in opened.infolist() if info.filename.endswith(".JPEG")}
        known |= {
            name: opened.getinfo(name).CRC for name in (f"{ARCHIVE.folder}/{f}" for f in (_WNIDS, _ANNOTATIONS))
        }
    names = {path: f"{ARCHIVE.folder}/{path.relative_to(folder).as_posix()}" for path in sources}
    checked = progress(names.items(), "comparing checksums")
    return differing([path.name for path, name in checked if zlib.crc32(read_bytes(path)) != known.get(name)])
