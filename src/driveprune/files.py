"""Files that are whole or not there: atomic writes and checked reads of safetensors and JSON."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

_CHECKSUM = "sha256"


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that, whatever happens, either the old or the new content is there."""
    path = Path(path).resolve()  # a link stays a link
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, with a checksum over tensors and metadata."""
    plain = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    checked = {**metadata, _CHECKSUM: _digest(plain, plain.__getitem__, metadata)}
    write_atomically(path, to_bytes(plain, metadata=checked))


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose checksum is right, to be read tensor by tensor."""

    names: tuple[str, ...]
    metadata: dict[str, str]
    _file: Any

    def tensor(self, name: str) -> Tensor:
        """One tensor; a KeyError if there is none of that name."""
        if name not in self.names:
            raise KeyError(name)
        found: Tensor = self._file.get_tensor(name)
        return found


@contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Open a file of `write_tensors`, or raise one clear error if a single bit is off.

    In memory is never more than one tensor at a time.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {os.fspath(path)}")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(os.fspath(path), framework="pt"))
            found = TensorFile(tuple(file.keys()), dict(file.metadata() or {}), file)
            expected = found.metadata.pop(_CHECKSUM, None)
            digest = None if expected is None else _digest(found.names, found.tensor, found.metadata)
        except (SafetensorError, ValueError, OSError) as error:
            raise ValueError(f"{os.fspath(path)} is damaged or no safetensors file: {error}") from None
        if expected is None:
            raise ValueError(f"{os.fspath(path)} was not written by driveprune: it has no checksum")
        if expected != digest:
            raise ValueError(f"{os.fspath(path)} is damaged or was changed: its checksum does not match its content")
        yield found


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and metadata of a file of `write_tensors`, or one clear error if a single bit is off."""
    with open_tensors(path) as file:
        return {name: file.tensor(name) for name in file.names}, file.metadata


def _digest(names: Iterable[str], tensor: Callable[[str], Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(names):
        value = tensor(name)
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, with a checksum over its content."""
    write_atomically(path, (checked_json(content, indent=1) + "\n").encode())


def checked_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """The text of a file that `read_json` reads, with a checksum over its content."""
    return json.dumps({**content, _CHECKSUM: _json_digest(content)}, indent=indent, ensure_ascii=False)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of `write_json`, or raise one clear error if it is damaged."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {error}") from None
    if not isinstance(content, dict) or content.pop(_CHECKSUM, None) != _json_digest(content):
        raise ValueError(f"{os.fspath(path)} is damaged or was changed: its checksum does not match its content")
    return content


def _json_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_state(path: str | os.PathLike[str], state: object) -> None:
    """Write a nest of dicts, lists, tuples, tensors, numbers, strings and None: a checkpoint without pickle."""
    tensors: dict[str, Tensor] = {}
    folded = json.dumps(_folded(state, tensors))
    write_tensors(path, tensors, {"state": folded})


def read_state(path: str | os.PathLike[str]) -> Any:
    """Read what `write_state` has written: the same nest, bit for bit, tensors on the CPU."""
    tensors, metadata = read_tensors(path)
    if "state" not in metadata:
        raise ValueError(f"{os.fspath(path)} is no checkpoint of driveprune")
    return _unfolded(json.loads(metadata["state"]), tensors)


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
    if kind == "tuple":
        return tuple(_unfolded(item, tensors) for item in content)
    return {_unfolded(k, tensors): _unfolded(v, tensors) for k, v in content}
