"""Archives: downloaded with a checksum, unpacked inside their folder or not at all, found where people put them."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from stat import S_ISLNK
from typing import IO, BinaryIO
from urllib.parse import urlsplit

import pooch  # type: ignore[import-untyped]

from driveprune.files import naming, open_regular

_ALGORITHMS = {32: "md5", 64: "sha256"}
_REASONS = {
    "ConnectionError": "no connection",
    "ChunkedEncodingError": "the connection broke",
    "ConnectTimeout": "no answer",
    "ReadTimeout": "no answer",
}
_DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError,
    MemoryError, struct.error,
)  # fmt: skip
_Member = tuple[str, IO[bytes] | None]
"""The name of a member and its bytes; a folder has none."""


def fetch(url: str, known_hash: str, folder: Path) -> Path:
    """Download a file into a folder, unless it is there; only a whole file with the right MD5 or SHA-256 stays."""
    by_hand = f"try again, or download it by hand into {folder}"
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), chunk_size=1 << 16)
    name = PurePosixPath(urlsplit(url).path).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = f"{_ALGORITHMS[len(known_hash)]}:{known_hash}"
        return Path(pooch.retrieve(url, expected, fname=name, path=folder, downloader=downloader))
    except OSError as error:
        response = getattr(error, "response", None)
        if response is not None:
            response.close()  # pooch leaves the connection open when a server refuses
        reason = _REASONS.get(type(error).__name__, str(error))
        raise OSError(f"cannot download {url} ({reason}): {by_hand}") from None
    except ValueError:
        raise ValueError(f"what came from {url} has a wrong checksum and was not kept: {by_hand}") from None


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a tar or zip archive so that, whatever happens, the folder is whole or not there.

    An archive of one single folder becomes `folder`; any other is put into it. A folder that is there stays as it
    is. Members that would leave the folder, links and devices raise: a data set is made of files and folders.
    """
    if folder.exists():
        return folder
    try:
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    except OSError as error:
        raise OSError(
            f"cannot unpack {archive}: {folder.parent} cannot be written to ({error.strerror}); "
            "unpack it elsewhere and name that folder as the data folder"
        ) from None
    try:
        _write_members(archive, temporary)
        _rename(_only_folder(temporary), folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_members(archive: Path, folder: Path) -> None:
    with _clear_errors(archive), _open(archive) as members:
        for name, content in members:
            path = folder / _inside(name)
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("wb") as file, naming(path):
                shutil.copyfileobj(content, file, 1 << 20)


@contextmanager
def _clear_errors(archive: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise ValueError(f"{archive} is damaged or no archive: {error}") from None
    except ValueError as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{archive} is damaged: {error}") from None  # gzip and bz2 say it so


@contextmanager
def _open(archive: Path) -> Iterator[Iterator[_Member]]:
    with open_regular(archive) as file:
        most = _FREE + _EACH * os.fstat(file.fileno()).st_size
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as opened:
                yield _zip_members(opened, most)
        else:
            file.seek(0)
            with _decompressed(file) as plain:
                bounded = _Bounded(plain, most)
                with tarfile.open(fileobj=bounded, mode="r|") as tape:  # type: ignore[call-overload]
                    yield _tar_members(tape, most)
                while bounded.read(1 << 20):
                    pass  # gzip compares its checksum at the very end, where tar no longer looks


_FREE, _EACH = 1 << 24, 100
"""An archive may unpack to 16 MB, and 100 bytes for each of its bytes; a bomb unpacks to 1000."""


def _decompressed(file: BinaryIO) -> IO[bytes]:
    begin = file.read(6)
    file.seek(0)
    if begin.startswith(b"\x1f\x8b"):
        return gzip.open(file)  # type: ignore[return-value]
    if begin.startswith(b"BZh"):
        return bz2.open(file)
    return lzma.open(file) if begin == b"\xfd7zXZ\x00" else file


class _Bounded:
    """A stream that is an error when more than so many bytes come out of it."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, size: int) -> bytes:
        """Some bytes."""
        content = self._stream.read(min(size, self._left + 1))
        self._left -= len(content)
        _check_left(self._left)
        return content


def _check_left(left: int) -> None:
    if left < 0:
        raise ValueError("it would unpack to far more than an archive of its size holds")


def _zip_members(archive: zipfile.ZipFile, left: int) -> Iterator[_Member]:
    for info in archive.infolist():
        if S_ISLNK(info.external_attr >> 16):
            raise ValueError(f"its member {info.filename!r} is a link")
        if not info.filename:
            raise ValueError("it has a member without a name")
        left -= info.file_size + tarfile.BLOCKSIZE
        _check_left(left)
        yield info.filename, None if info.is_dir() else archive.open(info)


def _tar_members(archive: tarfile.TarFile, left: int) -> Iterator[_Member]:
    for info in archive:
        if not (info.isfile() or info.isdir()):
            raise ValueError(
                f"its member {info.name!r} is {'a link' if info.issym() or info.islnk() else 'a device'}"
            )
        left -= info.size + tarfile.BLOCKSIZE
        _check_left(left)
        yield info.name, archive.extractfile(info) if info.isfile() else None


def _inside(name: str) -> str:
    """The name of a member, if it stays inside its folder on every system."""
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.anchor or ".." in path.parts:
            raise ValueError(f"its member {name!r} lies outside its folder")
    return name


def _only_folder(folder: Path) -> Path:
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else folder


def _rename(source: Path, target: Path) -> None:
    source.chmod(0o755)  # a temporary folder is closed to others
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, and its folder is as good
            raise


def find(data_dir: Path, folders: Iterable[str], names: Iterable[str]) -> Path | None:
    """The first of the folders below data_dir, or data_dir itself, that holds a file with one of the names."""
    names = list(names)
    for folder in (*(data_dir / folder for folder in folders), data_dir):
        if any((folder / name).is_file() for name in names):
            return folder
    return None


def md5(path: Path) -> str:
    """The MD5 of a file, as the makers of the data sets publish it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
