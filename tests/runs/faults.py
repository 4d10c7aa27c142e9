"""System calls that change a store: counted, and made to fail, one at a time or from one of them on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

ON_PATHS = ("open", "mkdir", "unlink", "rmdir", "replace", "rename", "link", "symlink", "truncate")
ON_DESCRIPTORS = ("write", "pwrite", "fsync", "fdatasync", "ftruncate")
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Faults:
    """Counts the calls below a folder; call number `at` fails, and with `stays` all that come after it."""

    def __init__(self, root: Path, at: int | None = None, number: int = 0, stays: bool = False) -> None:
        self.root, self.at, self.number, self.stays = str(root), at, number, stays
        self.calls: list[str] = []
        """What was called, and on which file."""

    def install(self) -> None:
        """From here on, in this process, for good."""
        for name in ON_PATHS:
            setattr(os, name, self._on_path(name, getattr(os, name)))
        for name in ON_DESCRIPTORS:
            setattr(os, name, self._on_descriptor(name, getattr(os, name)))

    def _on_path(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *args: Any, **options: Any) -> Any:
            found = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
            if self._is_ours(found) and (name != "open" or (args and args[0] & CHANGES)):
                self._count(name, found)
            return call(path, *args, **options)

        return counted

    def _on_descriptor(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(descriptor: int, *args: Any) -> Any:
            found = os.readlink(f"/proc/self/fd/{descriptor}")
            if self._is_ours(found):
                try:
                    self._count(name, found)
                except OSError:
                    if name in {"write", "pwrite"}:  # some of it is there all the same
                        call(descriptor, bytes(args[0])[: len(args[0]) // 2], *args[1:])
                    raise
            return call(descriptor, *args)

        return counted

    def _is_ours(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + os.sep)

    def _count(self, name: str, path: str) -> None:
        self.calls.append(f"{name} {path[len(self.root) + 1 :]}")
        place = len(self.calls)
        if self.at is not None and (place == self.at or (self.stays and place > self.at)):
            raise OSError(self.number, os.strerror(self.number), path)
