"""Loops compiled by numba, kept for the next process, and the threads that they run on."""

from __future__ import annotations

import ast
import hashlib
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import llvmlite
import numba
import torch
from numba.core import caching, serialize

from driveprune.files import write_atomically

_F = TypeVar("_F", bound=Callable[..., Any])

_HOME = Path(__file__).parent

_FunctionCache: Any = caching.FunctionCache
_dumps: Any = serialize.dumps


class CacheWarning(UserWarning):
    """Compiled loops could not be kept, so that the next process compiles them again."""


def compiled(*, parallel: bool = False, nogil: bool = True) -> Callable[[_F], _F]:
    """Compile a function, and keep what was compiled for the next process where that is possible.

    One that is not `parallel` makes no arrays: numba then does not count references to them, which in short loops
    costs as much as the work.
    """

    def wrap(function: _F) -> _F:
        options: dict[str, Any] = {"nogil": nogil, "parallel": parallel, "error_model": "numpy", "_nrt": parallel}
        found = numba.njit(**options)(function)
        with suppress(RuntimeError, OSError, TypeError):  # there is no folder or no file to keep it in
            found._cache = _Kept(cast(FunctionType, function))
        return cast(_F, found)

    return wrap


class _Kept(_FunctionCache):  # type: ignore[misc]
    """What was compiled of one function. Numba's own cache looks at the function's file alone, and trusts its files.

    Here an entry belongs to the sources of all that the function may have been compiled from, and has a checksum.
    Whatever goes wrong with it, the function is compiled anew.
    """

    def __init__(self, function: FunctionType) -> None:
        super().__init__(function)
        self._cache_file = _Entries(
            Path(self.cache_path), self._impl.filename_base, Path(function.__code__.co_filename)
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for a signature, or None."""
        with suppress(Exception):
            return super().load_overload(sig, target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for a signature."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _tell_once(f"compiled loops are not kept for the next time: {error}")


class _Entries:
    """The entries of one function: a file for each signature and kind of processor, a checksum before its content."""

    def __init__(self, folder: Path, base: str, source: Path) -> None:
        self._folder, self._base, self._source = folder, base, source

    def load(self, key: object) -> Any:
        """An entry that is whole, or None."""
        try:
            content = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        checksum, data = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        return pickle.loads(data) if hashlib.sha256(data).digest() == checksum else None

    def save(self, key: object, data: object) -> None:
        """Write an entry, and delete those of other sources."""
        _forget_others(self._folder, self._source.stem, _stamp(self._source))
        content = _dumps(data)
        write_atomically(self._path(key), hashlib.sha256(content).digest() + content, follow=False, sync=False)

    def _path(self, key: object) -> Path:
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:20]
        return self._folder / f"{self._base}.{_stamp(self._source)}.{name}.nbc"


_CHECKSUM_BYTES = 32


@cache
def _stamp(source: Path) -> str:
    """A hash of all that the loops of a file are compiled from: its source, those that it imports, and numba."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(_closure(source)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:20]


def _closure(source: Path) -> set[Path]:
    """A file and all files of this package that it imports, directly or not."""
    found, new = {source}, [source]
    while new:
        more = _imported(new.pop()) - found
        found |= more
        new += more
    return found


@cache
def _imported(source: Path) -> frozenset[Path]:
    """The files of this package that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    parts = [name.split(".")[1:] for name in names if name.split(".")[0] == "driveprune"]
    paths = (_HOME.joinpath(*inner).with_suffix(".py") for inner in parts if inner)
    return frozenset(path for path in paths if path.is_file())


@cache
def _forget_others(folder: Path, module: str, stamp: str) -> None:
    """Delete what was compiled from older sources of a module, once in a process."""
    for path in (*folder.glob(f"{module}.*.nbc"), *folder.glob(f"{module}.*.nbi")):
        if f".{stamp}." not in path.name:
            path.unlink(missing_ok=True)


@cache
def _tell_once(text: str) -> None:
    warnings.warn(text, CacheWarning, stacklevel=2)


def threads() -> int:
    """How many threads compiled loops use: as many as torch, as far as numba has them."""
    _launch()
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


def use_threads() -> None:
    """Let the next compiled loop use as many threads as torch."""
    _set_threads(threads())  # type: ignore[type-var]


@numba.njit
def _set_threads(count: int) -> None:
    numba.set_num_threads(count)  # much faster here than in Python


@cache
def _launch() -> None:
    """Start numba's threads. It shares OpenMP with torch, whose number of threads it would change."""
    count = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(count)
