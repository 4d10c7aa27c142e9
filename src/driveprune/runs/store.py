"""The folder of a run. Everything in it is written atomically; what is there is whole.

Nothing is written through a link inside a store: a file takes its place, and a folder that is one is an error.

    RUNS/ID/spec.json                   what the run is
    RUNS/ID/checkpoint-N.safetensors    the last two states on the way
    RUNS/ID/status.json                 where it is, for whoever watches
    RUNS/ID/error.txt                   why it failed, if it did
    RUNS/ID/net.safetensors             the trained sparse network
    RUNS/ID/result.json                 what came of it; written last
    RUNS/beginnings/KEY/steps-N.safetensors   dense beginnings that runs have in common
    RUNS/sweeps/HASH.json               which runs a sweep wants, so that missing ones are known

A file whose name begins with a point is a lock (.lock), half written (.part), or room for an error on a full disk.
Reading a store never imports or runs anything that is named in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from driveprune.files import (
    overwrite,
    own_folder,
    parsed_json,
    read_bytes,
    read_file,
    read_json,
    read_state,
    write_atomically,
    write_json,
    write_state,
)
from driveprune.runs.spec import Spec
from driveprune.train import State

if sys.platform != "win32":
    import fcntl

Standing = Literal["done", "running", "unfinished", "failed", "damaged", "missing"]
"""How far a run is. Unfinished: begun, and nobody is working on it. Missing: wanted by a sweep, not begun."""
_NUMBERED = re.compile(r"-(\d+)\.safetensors$")


class DamagedWarning(UserWarning):
    """A file of a store is damaged, and what was done about it."""


class UnwrittenWarning(UserWarning):
    """A file that is only for looking at could not be written; the run goes on."""


@dataclass(frozen=True)
class Run:
    """A run as its folder shows it."""

    path: Path
    standing: Standing
    spec: dict[str, Any]
    result: dict[str, Any] | None = None
    status: dict[str, Any] | None = None
    error: str | None = None


def open_run(root: Path, spec: Spec) -> Path:
    """The folder of a run, made if it is not there; an error if it belongs to another spec."""
    folder = own_folder(root, spec.id)
    path = folder / "spec.json"
    if not path.exists():
        write_json(path, spec.to_json(), follow=False)
    found = _spec_or_none(path)
    if found is None:
        warnings.warn(f"{path} is damaged: it is written anew", DamagedWarning, stacklevel=2)
        write_json(path, spec.to_json(), follow=False)
    elif found != spec.to_json():
        raise ValueError(f"{folder} holds a run with another spec: move it away")
    return folder


def _spec_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except ValueError:
        return None


def result_of(folder: Path) -> dict[str, Any] | None:
    """What came of a run that is done; None if it is not, or if its files are damaged."""
    path, net = folder / "result.json", folder / "net.safetensors"
    if not path.exists():
        return None
    try:
        result = read_json(path)
        read_file(net, lambda _: False)  # compares its checksum
        return of_one_example(result, _plain_json(folder / "spec.json") or {})
    except (ValueError, FileNotFoundError) as error:
        warnings.warn(f"{error}; the run is done again", DamagedWarning, stacklevel=2)
        return None


def lock_of(folder: Path) -> FileLock:
    """A lock that one process holds while it works on a run; a killed process lets go of it."""
    path = folder / ".lock"
    if path.is_symlink():  # a lock that follows one would make a file elsewhere
        path.unlink()
    return FileLock(path)


def acquire(lock: FileLock, cancelled: Callable[[], None] = lambda: None) -> None:
    """Wait for a lock, until `cancelled` raises."""
    while True:
        try:
            lock.acquire(timeout=0.2)
            return
        except Timeout:
            cancelled()


def forget_parts(folder: Path) -> None:
    """Delete what killed processes have half written; to be called under the folder's lock."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


@dataclass
class FolderCheckpoints:
    """The last two states of a run. A damaged one is told of, and the one before is used."""

    folder: Path

    def load(self) -> State | None:
        """The newest state that is whole."""
        for path in reversed(_numbered(self.folder, "checkpoint")):
            try:
                state: State = read_state(path)
                return state
            except (ValueError, FileNotFoundError) as error:  # the latter for a link to nothing
                warnings.warn(f"{error}; the state before it is used", DamagedWarning, stacklevel=2)
                path.unlink(missing_ok=True)
        return None

    def save(self, state: State) -> None:
        """Keep a state, and the one before."""
        old = _numbered(self.folder, "checkpoint")
        number = 1 + (_number(old[-1]) if old else 0)
        write_state(self.folder / f"checkpoint-{number}.safetensors", state, follow=False)
        for path in old[:-1]:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Nothing of it is needed any more."""
        for path in (*_numbered(self.folder, "checkpoint"), self.folder / _ROOM, *self.folder.glob(".*.part")):
            path.unlink(missing_ok=True)


@dataclass
class SharedBeginning:
    """Dense beginnings of one kind, by their number of steps; one process at a time makes them."""

    folder: Path
    wait: Callable[[], None] = lambda: None
    """Called now and then while another process is making it; what it raises ends the waiting."""
    lock: FileLock = field(init=False)

    def __post_init__(self) -> None:
        self.lock = lock_of(own_folder(self.folder.parent.parent, *self.folder.parts[-2:]))

    def load(self, steps: int, usable: Callable[[int], bool], *, making: bool) -> State | None:
        """The longest beginning of at most `steps`; if it is shorter, who is making it goes on and holds the lock."""
        if not making or not usable(steps):
            return self._read(1, steps, usable)
        if (state := self._read(steps, steps, usable)) is not None:
            return state
        acquire(self.lock, self.wait)
        forget_parts(self.folder)
        if (state := self._read(steps, steps, usable)) is not None:
            self.release()
            return state
        return self._read(1, steps, usable)

    def _read(self, least: int, most: int, usable: Callable[[int], bool]) -> State | None:
        for path in reversed(_numbered(self.folder, "steps")):
            if least <= _number(path) <= most and usable(_number(path)):
                try:
                    state: State = read_state(path)
                    return state
                except (ValueError, FileNotFoundError) as error:
                    warnings.warn(f"{error}; it is made again", DamagedWarning, stacklevel=2)
                    path.unlink(missing_ok=True)
        return None

    def save(self, steps: int, state: State) -> None:
        """Keep a beginning, and let others have it."""
        path = self.folder / f"steps-{steps}.safetensors"
        if not path.exists():
            write_state(path, state, follow=False)
        self.release()

    def release(self) -> None:
        """Let others go on."""
        self.lock.release()


def _numbered(folder: Path, name: str) -> list[Path]:
    """Files NAME-N.safetensors of a folder, in the order of N."""
    return sorted((p for p in folder.glob(f"{name}-*.safetensors") if _NUMBERED.search(p.name)), key=_number)


def _number(path: Path) -> int:
    found = _NUMBERED.search(path.name)
    return int(found[1]) if found else 0


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Say where a run is. It is only for looking at: no need to wait for the disk, and no reason to stop."""
    text = json.dumps({key: _known(value) for key, value in status.items()}, allow_nan=False)
    try:
        write_atomically(folder / "status.json", text.encode(), follow=False, sync=False)
    except (OSError, ValueError) as error:
        tell_unwritten(folder, f"{error}: how far the run is cannot be seen, but it goes on")


def _known(value: Any) -> Any:
    """What JSON has no number for is None."""
    if isinstance(value, list):
        return [_known(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


@cache
def tell_unwritten(_folder: Path, text: str) -> None:
    """Say once that something could not be written that is only for looking at; it is never an error."""
    with suppress(UnwrittenWarning):  # even where warnings are errors
        warnings.warn(text, UnwrittenWarning, stacklevel=2)


_ROOM = ".error.txt"
_ROOM_BYTES = 4096


def reserve_room(folder: Path) -> None:
    """Take room for `write_error` as long as there is some."""
    with suppress(OSError):  # a full disk may have room again when the run comes to write
        write_atomically(folder / _ROOM, b" " * _ROOM_BYTES, follow=False, sync=False)


def write_error(folder: Path, text: str) -> None:
    """Say why a run failed; if the disk is full, the end of it, in the room that was reserved."""
    path, content = folder / "error.txt", text.encode("utf-8", "replace")
    try:
        write_atomically(path, content, follow=False)
    except OSError as error:
        try:
            overwrite(folder / _ROOM, content)
            os.replace(folder / _ROOM, path)
        except (OSError, ValueError):
            tell_unwritten(folder, f"{error}: why the run failed is not in its folder")


def write_wanted(root: Path, specs: Iterable[Spec], lengths: Mapping[str, int]) -> None:
    """Say which runs a sweep wants, and how many steps each has."""
    wanted = {spec.id: {"spec": spec.to_json(), "steps": lengths[spec.id]} for spec in specs}
    name = hashlib.sha256(json.dumps(sorted(wanted)).encode()).hexdigest()[:12]
    path = root / "sweeps" / f"{name}.json"
    if _wanted(path, *_stamp(path)) != {name: (each["spec"], each["steps"]) for name, each in wanted.items()}:
        write_json(own_folder(root, "sweeps") / path.name, wanted, follow=False)


def read_wanted(root: Path) -> dict[str, tuple[dict[str, Any], int]]:
    """The runs that the sweeps of a store want: id -> spec and steps. A damaged list is left out."""
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for path in sorted(root.glob("sweeps/*.json")):
        wanted = _wanted(path, *_stamp(path))
        if isinstance(wanted, dict):
            found |= wanted
    return found


def _stamp(path: Path) -> tuple[int, int]:
    try:
        known = path.stat()
        return known.st_mtime_ns, known.st_size
    except OSError:
        return 0, 0


@lru_cache(maxsize=256)
def _wanted(path: Path, _modified: int, _size: int) -> dict[str, tuple[dict[str, Any], int]] | str:
    """What one sweep wants, or why its list cannot be read."""
    try:
        found = {}
        for name, each in read_json(path).items():
            spec = Spec.from_json(each["spec"])
            if spec.id != name:
                raise ValueError(f"{name} is not the run of its spec")
            found[name] = (spec.to_json(), int(each["steps"]))
        return found
    except _ODD as error:
        return f"the list of a sweep cannot be read: {_said(error)}"


_ODD = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""What reading a file may raise that somebody else has written."""


def _said(error: BaseException) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def read_runs(paths: Iterable[Path], known: Mapping[Path, Run] | None = None) -> list[Run]:
    """The runs in some folders: single runs, or a store with those that its sweeps still want.

    Runs that are `known` by their folders are not read again.
    """
    runs = []
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"there is no folder {path}")
        if (path / "spec.json").exists():
            runs.append(read_run(path))
            continue
        wanted = {name: spec for name, (spec, _) in read_wanted(path).items()}
        folders = [folder for folder in sorted(path.glob("*/")) if (folder / "spec.json").exists()]
        for folder in folders:
            run = (known or {}).get(folder) or read_run(folder)
            runs.append(replace(run, spec=wanted[folder.name]) if not run.spec and folder.name in wanted else run)
        begun = {folder.name for folder in folders}
        runs += [Run(path / name, "missing", spec) for name, spec in wanted.items() if name not in begun]
        for sweep in sorted(path.glob("sweeps/*.json")):
            if isinstance(why := _wanted(sweep, *_stamp(sweep)), str):
                runs.append(Run(sweep, "damaged", {}, error=why))
    return runs


def read_run(folder: Path) -> Run:
    """One run as its folder shows it; whatever is odd about its files makes it a damaged one."""
    spec: dict[str, Any] = {}
    status = _plain_json(folder / "status.json")
    try:
        spec = Spec.from_json(read_json(folder / "spec.json")).to_json()  # a run of this version
        if (folder / "result.json").exists():
            result = read_json(folder / "result.json")
            _check_result(result)
            return Run(folder, "done", spec, of_one_example(result, spec), status)
        if (folder / "error.txt").exists():
            error = read_bytes(folder / "error.txt", _LONGEST_TEXT).decode(errors="replace").strip()
            return Run(folder, "failed", spec, status=status, error=error)
    except _ODD as error:
        return Run(folder, "damaged", spec, status=status, error=_said(error))
    return Run(folder, "running" if is_locked(folder) else "unfinished", spec, status=status)


def _check_result(result: Mapping[str, Any]) -> None:
    """An error that names what a result lacks."""
    may_lack = [result[name] for name in ("last", "best", "effective_sparsity", "net_bytes", "macs", "dense_macs")]
    may_lack += [result.get("speedup"), *(row.get("test") for row in result["rows"])]
    numbers = [value for value in may_lack if value is not None]
    numbers += [result["sparsity"], *result["seconds"].values()]
    numbers += [row[name] for row in result["rows"] for name in ("cycle", "epoch", "sparsity")]
    numbers += [layer[name] for layer in result["layers"] for name in ("weights", "kept")]
    if odd := [value for value in numbers if not isinstance(value, int | float) or not isfinite(value)]:
        raise TypeError(f"a result has {str(odd[0])[:40]!r} for a number")
    texts = [result["data"], result["best_by"], *(layer["name"] for layer in result["layers"])]
    if odd := [value for value in texts if not isinstance(value, str)]:
        raise TypeError(f"a result has {str(odd[0])[:40]!r} for a name")
    if not all(isinstance(result["environment"][name], dict) for name in ("versions", "machine")):
        raise TypeError("a result has no environment")
    if not isinstance(result["collapsed"], bool):
        raise TypeError(f"a result has {str(result['collapsed'])[:40]!r} for true or false")


def of_one_example(result: dict[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the multiply-adds of one example; runs of earlier versions counted two, and did not say so.

    >>> of_one_example({"macs": 20, "dense_macs": 200}, {})
    {'macs': 10, 'dense_macs': 100, 'macs_examples': 1}
    """
    if "macs_examples" in result or "macs" not in result:
        return result
    recipe = spec.get("recipe")
    counted = 1 if isinstance(recipe, dict) and recipe.get("batch") == 1 else 2
    halved = {name: result[name] // counted for name in ("macs", "dense_macs") if type(result.get(name)) is int}
    return {**result, **halved, "macs_examples": 1}


_LONGEST_TEXT = 1 << 22
"""Bytes of a status or an error."""


def is_locked(folder: Path) -> bool:
    """Whether a process is working on a run; only looked at, where the system can: nothing is written."""
    if sys.platform == "win32":
        lock = lock_of(folder)
        try:
            lock.acquire(timeout=0)
        except (TimeoutError, OSError):
            return True
        lock.release()
        return False
    try:
        handle = os.open(folder / ".lock", os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)  # which lets go of it
    return False


def read_status(folder: Path) -> dict[str, Any]:
    """Where a run is, as it said last; empty if it has not begun."""
    return _plain_json(folder / "status.json") or {}


def _plain_json(path: Path) -> dict[str, Any] | None:
    try:
        content = parsed_json(read_bytes(path, _LONGEST_TEXT), str(path))
    except _ODD:
        return None
    return content if isinstance(content, dict) else None
