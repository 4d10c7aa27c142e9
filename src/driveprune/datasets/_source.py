"""Where a data set comes from, where it is looked for, and what is said when it is not the official one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from driveprune.archives import fetch, find, unpack


@dataclass(frozen=True)
class About:
    """What a data set officially is."""

    text: str
    shape: tuple[int, int, int]
    classes: int
    train: int
    test: int
    source: str

    def __str__(self) -> str:
        channels, height, width = self.shape
        colour = "grey" if channels == 1 else "colour"
        return (
            f"{self.text}; {height}×{width} {colour}, {self.classes:,} classes, "
            f"{self.train:,} + {self.test:,} images; {self.source}"
        )


@dataclass(frozen=True)
class Archive:
    """The official archive of a data set, and the folder that it unpacks to."""

    url: str
    md5: str
    folder: str

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.url.rpartition("/")[2]


def unpacked(name: str, data_dir: Path, archive: Archive, holds: str) -> Path:
    """The folder of a data set: found unpacked, or unpacked now from its archive beside it."""
    found = find(data_dir, [archive.folder], [holds])
    if found is None and (data_dir / archive.name).is_file():
        found = find(unpack(data_dir / archive.name, data_dir / archive.folder), [], [holds])
        if found is None:
            raise FileNotFoundError(f"{data_dir / archive.folder} has no {holds}, though {archive.name} is beside it")
    if found is None:
        raise missing(name, data_dir, [f"{archive.folder}/{holds}", holds, archive.name])
    return found


def download(data_dir: Path, archive: Archive, holds: str) -> Path:
    """The folder of a data set, downloaded and unpacked unless it is there."""
    found = find(data_dir, [archive.folder], [holds])
    return found or unpack(fetch(archive.url, archive.md5, data_dir), data_dir / archive.folder)


def missing(name: str, data_dir: Path, layouts: Iterable[str], remedy: str = "") -> FileNotFoundError:
    """The error for data that are not there: where they were looked for, and what to do."""
    remedy = remedy or f"`driveprune data get {name} --data-dir {data_dir}` downloads it"
    return FileNotFoundError(f"{name} is not in {data_dir}, which has none of {', '.join(layouts)}; {remedy}")


def differing(changed: Sequence[str], absent: Sequence[str] = ()) -> str:
    """What is said of files that are not the official ones; nothing if there are none.

    >>> differing(["test.bin"])
    'not the official files: test.bin differs'
    """
    reasons = [_listed(changed, "differs", "differ"), _listed(absent, "is missing", "are missing")]
    found = ", ".join(reason for reason in reasons if reason)
    return f"not the official files: {found}" if found else ""


def _listed(names: Sequence[str], one: str, many: str) -> str:
    if len(names) < 2:
        return f"{names[0]} {one}" if names else ""
    shown = ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"
    return f"{shown} {many}"


def fewer(about: About, train: int, test: int, classes: int) -> str:
    """In which numbers data differ from the official ones; nothing if in none.

    >>> fewer(About("", (1, 8, 8), 10, 100, 20, ""), 50, 20, 10)
    '50 training images instead of 100'
    """
    counts = {
        "training images": (train, about.train),
        "test images": (test, about.test),
        "classes": (classes, about.classes),
    }
    return ", ".join(
        f"{has:,} {what} instead of {should:,}" for what, (has, should) in counts.items() if has != should
    )


def joined(*notes: str) -> str:
    """Several notes as one."""
    return "; ".join(note for note in notes if note)
