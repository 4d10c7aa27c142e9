"""Files that are whole or not there: atomic writes and checked reads of safetensors and JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ELOOP
from math import isfinite
from pathlib import Path
from secrets import token_hex
from stat import S_ISDIR, S_ISREG
from typing import Any, BinaryIO, TextIO

import numpy as np
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from driveprune.container import LONGEST_HEAD, Head, Kind, checked_head

_CHECKSUM = "sha256"


def write_atomically(path: str | os.PathLike[str], data: bytes, *, follow: bool = True, sync: bool = True) -> None:
    """Write a file so that, whatever happens, either the old or the new content is there.

    Args:
        path: the file; an error of the system, such as a full disk, names it.
        data: its content.
        follow: write to where a link points, and leave the link as it is; without, a file takes the link's place.
        sync: wait until the disk has it; without, a machine that loses power may lose old and new.

    """
    path = Path(path)
    path = _resolved(path) if follow else _resolved(path.parent) / path.name
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
    with naming(path):
        temporary = path.with_name(f".{path.name}.{token_hex(4)}.part")
        try:
            _write_new(temporary, data, sync)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if sync:
            _sync_folder(path.parent)


def _resolved(path: Path) -> Path:
    with naming(path):
        try:
            return path.resolve()
        except RuntimeError as error:  # how pathlib tells of links in a circle
            raise OSError(ELOOP, os.strerror(ELOOP), os.fspath(path)) from error


def _write_new(path: Path, data: bytes, sync: bool) -> None:
    """Write a file that is not there yet; the system gives it the permissions that the user's umask leaves."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


_PLAIN = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system name the file that was meant, unless they name another one; a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not _is_meant(error.filename, path):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def overwrite(path: str | os.PathLike[str], data: bytes) -> None:
    """Give a regular file another content in the room that it has, which a full disk still has for it."""
    path = Path(path)
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0) | _PLAIN)
        try:
            _check_own(descriptor, path)
            room = os.fstat(descriptor).st_size
            os.pwrite(descriptor, data[-room:], 0)
            os.ftruncate(descriptor, min(room, len(data)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_log(path: str | os.PathLike[str]) -> TextIO:
    """A text file to add lines to. A link or a pipe in its place is replaced, and what it leads to stays as it is."""
    path = Path(path)
    with naming(path):
        try:
            descriptor = _open_to_append(path, os.O_NOFOLLOW if hasattr(os, "O_NOFOLLOW") else 0)
        except (ValueError, OSError):
            if not _is_foreign(path):
                raise
            path.unlink()
            descriptor = _open_to_append(path, os.O_EXCL)
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def _open_to_append(path: Path, flag: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | _PLAIN | flag
    descriptor = os.open(path, flags, 0o666)
    try:
        _check_own(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_own(descriptor: int, path: Path) -> None:
    """An error for what is no file of this name alone."""
    found = os.fstat(descriptor)
    if not S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ValueError(f"{os.fspath(path)} is no file of its own: it is linked, a pipe or a device")


def _is_foreign(path: Path) -> bool:
    """Whether a name is that of a link, of one of several hard links, of a pipe or of a device."""
    found = path.lstat()
    return not S_ISDIR(found.st_mode) and (not S_ISREG(found.st_mode) or found.st_nlink > 1)


def own_folder(root: str | os.PathLike[str], *names: str) -> Path:
    """A folder below another one, made if it is not there; an error if a link takes its place."""
    path = Path(root)
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = path / name
        if path.is_symlink():
            raise ValueError(f"{path} is a link to {os.readlink(path)}, and nothing is written there: move it away")
        path.mkdir(exist_ok=True)
    return path


def _is_meant(name: Any, path: Path) -> bool:
    """Whether an error names nothing, or something that has to do with a file: a part of it, or its folder."""
    if not isinstance(name, str | bytes | os.PathLike):
        return True
    return path.parent in {found := Path(os.fsdecode(name)), found.parent}


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read it; an error if it is a folder, a pipe (which may block) or a device (without end)."""
    if not S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{os.fspath(path)} is no regular file")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not S_ISREG(os.fstat(descriptor).st_mode):  # it was one a moment ago
        os.close(descriptor)
        raise ValueError(f"{os.fspath(path)} is no regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike[str], most: int = 1 << 40) -> bytes:
    """The content of a regular file; an error if there are more than `most` bytes of it."""
    with open_regular(path) as file:
        content = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > most:
        raise ValueError(f"{os.fspath(path)} is too long: more than {most:,} bytes")
    return content


LONGEST_JSON = 1 << 28
"""Bytes of a file that is read at once; the list of a sweep of 100,000 runs has as many."""


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, follow: bool = True
) -> None:
    """Write a safetensors file atomically, with a checksum over tensors and metadata."""
    plain = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    checked = {**metadata, _CHECKSUM: _digest(plain, plain.__getitem__, metadata)}
    _check_memory(path, sum(tensor.numel() * tensor.element_size() for tensor in plain.values()))
    write_atomically(path, to_bytes(plain, metadata=checked), follow=follow)


def _check_memory(path: str | os.PathLike[str], size: int) -> None:
    """An error if there is no memory to write so much: safetensors, which has it three times, would abort."""
    try:
        np.empty(3 * size, dtype=np.uint8)
    except MemoryError as error:
        raise MemoryError(f"there is no memory to write {os.fspath(path)}: {error}") from None


@dataclass(frozen=True)
class TensorFile:
    """What was read of a file of `write_tensors`; the checksum over all of it is right."""

    metadata: dict[str, str]
    kinds: dict[str, Kind]
    """Of all its tensors."""
    tensors: dict[str, Tensor]
    """Those that were wanted, in memory of their own."""
    bytes: int
    """Of the whole file."""


def read_file(path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda _: True) -> TensorFile:
    """Read a file of `write_tensors`, or raise one clear error if a single bit is off.

    Every byte is read once and no map of the file is made: what went into the checksum is what is returned, whatever
    happens to the file meanwhile or later. In memory are only the tensors whose names are `wanted`.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {os.fspath(path)}")
    with open_regular(path) as file:
        try:
            head, size = _head(file)
            expected = head.metadata.pop(_CHECKSUM, None)
            if expected is not None:
                digest = hashlib.sha256(json.dumps(head.metadata, sort_keys=True).encode())
                tensors = {name: _taken(file, size, head, name, digest, wanted) for name in sorted(head.kinds)}
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"{os.fspath(path)} is damaged or no safetensors file: {error}") from None
        size += sum(kind.bytes for kind in head.kinds.values())
    if expected is None:
        raise ValueError(f"{os.fspath(path)} was not written by driveprune: it has no checksum")
    if expected != digest.hexdigest():
        raise ValueError(f"{os.fspath(path)} is damaged or was changed: its checksum does not match its content")
    return TensorFile(head.metadata, head.kinds, {n: t for n, t in tensors.items() if t is not None}, size)


def _head(file: BinaryIO) -> tuple[Head, int]:
    """The head of a file, and at which byte it ends."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LONGEST_HEAD):
        raise ValueError("it is cut off, or its head is too long")
    return checked_head(parsed_json(file.read(length), "its head"), size - 8 - length), 8 + length


def _taken(
    file: BinaryIO, end_of_head: int, head: Head, name: str, digest: Any, wanted: Callable[[str], bool]
) -> Tensor | None:
    """Add a tensor to a checksum; if it is wanted, it is made of the very bytes that went into it."""
    kind = head.kinds[name]
    digest.update(json.dumps([name, str(kind.dtype), list(kind.shape)]).encode())
    file.seek(end_of_head + head.starts[name])
    if not wanted(name):
        piece = bytearray(min(_PIECE, kind.bytes))
        for first in range(0, kind.bytes, _PIECE):
            digest.update(_filled(file, memoryview(piece)[: kind.bytes - first]))
        return None
    content = torch.empty(kind.bytes, dtype=torch.uint8)
    for first in range(0, kind.bytes, _PIECE):
        digest.update(_filled(file, content.numpy().data[first : first + _PIECE]))
    if kind.dtype == torch.bool and kind.size and int(content.max()) > 1:
        raise ValueError(f"{name} has values that are neither true nor false")
    return content.view(kind.dtype).view(kind.shape)


_PIECE = 1 << 20


def _filled(file: BinaryIO, room: memoryview) -> memoryview:
    if file.readinto(room) != len(room):  # type: ignore[attr-defined]
        raise ValueError("it became shorter while it was read")
    return room


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and metadata of a file of `write_tensors`, or one clear error if a single bit is off."""
    found = read_file(path)
    return found.tensors, found.metadata


def _digest(names: Iterable[str], tensor: Callable[[str], Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(names):
        value = tensor(name)
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any], *, follow: bool = True) -> None:
    """Write a JSON file atomically, with a checksum over its content; JSON knows neither NaN nor infinity."""
    try:
        text = checked_json(content, indent=1)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} cannot be written: {error}") from None
    write_atomically(path, (text + "\n").encode("utf-8", "surrogatepass"), follow=follow)


def checked_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """The text of a file that `read_json` reads, with a checksum over its content."""
    checked = {**content, _CHECKSUM: _json_digest(content)}
    return json.dumps(checked, indent=indent, ensure_ascii=False, allow_nan=False)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of `write_json`, or raise one clear error if it is damaged."""
    content = parsed_json(read_bytes(path, LONGEST_JSON), os.fspath(path))
    try:
        expected = content.pop(_CHECKSUM, None) if isinstance(content, dict) else None
        digest = _json_digest(content)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {error}") from None
    if not isinstance(content, dict) or expected != digest:
        raise ValueError(f"{os.fspath(path)} is damaged or was changed: its checksum does not match its content")
    return content


def parsed_json(text: str | bytes, name: str, *, numbers: bool = False) -> Any:
    """What a JSON text says, or one clear error that names it.

    NaN and Infinity are no JSON; with `numbers` they are read all the same, as older versions have written them.

    >>> parsed_json("[1, NaN]", "numbers")
    Traceback (most recent call last):
        ...
    ValueError: numbers is damaged: NaN is no number of JSON
    """
    try:
        content = json.loads(text, parse_constant=float if numbers else _no_number)
        _check_depth(content)
        return content
    except RecursionError:
        raise ValueError(f"{name} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from None


def _check_depth(content: Any) -> None:
    """An error for a nest that Python reads, but cannot write or show again."""
    level = [content]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise RecursionError


_DEEPEST = 200


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _json_digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def write_state(path: str | os.PathLike[str], state: object, *, follow: bool = True) -> None:
    """Write a nest of dicts, lists, tuples, tensors, numbers, strings and None: a checkpoint without pickle."""
    tensors: dict[str, Tensor] = {}
    folded = json.dumps(_folded(state, tensors), allow_nan=False)
    write_tensors(path, tensors, {"state": folded}, follow=follow)


def read_state(path: str | os.PathLike[str]) -> Any:
    """Read what `write_state` has written: the same nest, bit for bit, tensors on the CPU."""
    tensors, metadata = read_tensors(path)
    if "state" not in metadata:
        raise ValueError(f"{os.fspath(path)} is no checkpoint of driveprune")
    folded = parsed_json(metadata["state"], os.fspath(path))
    try:
        return _unfolded(folded, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {type(error).__name__}: {error}") from None


def _folded(value: object, tensors: dict[str, Tensor]) -> object:
    """A nest as JSON: each container with a letter for its kind, each tensor as its number."""
    match value:
        case Tensor():
            tensors[str(len(tensors))] = value
            return {"tensor": len(tensors) - 1}
        case Mapping():
            return {"dict": [[_folded(k, tensors), _folded(v, tensors)] for k, v in value.items()]}
        case tuple():
            return {"tuple": [_folded(item, tensors) for item in value]}
        case list():
            return [_folded(item, tensors) for item in value]
        case float() if not isfinite(value):
            return {"float": str(value)}  # JSON knows neither NaN nor infinity
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def _unfolded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unfolded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_unfolded(item, tensors) for item in content)
    return {_unfolded(k, tensors): _unfolded(v, tensors) for k, v in content}
