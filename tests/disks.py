"""Real disks for tests: small ones that fill up, and read-only ones; skipped where nothing can be mounted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *words: str) -> Iterator[Path]:
    """A folder on which something is mounted for a while."""
    folder.mkdir(exist_ok=True)
    if not shutil.which("mount") or os.geteuid() != 0:
        pytest.skip("nothing can be mounted here")
    done = subprocess.run(["mount", *words, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def small_disk(folder: Path, kib: int, kind: str = "tmpfs") -> Iterator[Path]:
    """A disk with so much room: in memory, or a real file system in a file."""
    if kind == "tmpfs":
        words = ["-t", "tmpfs", "-o", f"size={kib}k", "none"]
    else:
        image = folder.with_suffix(".image")
        if not shutil.which("mkfs.ext4"):
            pytest.skip("there is no mkfs.ext4")
        image.write_bytes(b"")
        os.truncate(image, kib * 1024)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True)
        words = ["-o", "loop", str(image)]
    with mounted(folder, *words) as disk:
        yield disk


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in a folder can be written for a while: by permissions, or by a mount for root, whom those let pass."""
    if os.geteuid() == 0:
        with mounted(folder, "--bind", str(folder)):
            subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
            yield
        return
    before = {path: path.stat().st_mode for path in (folder, *folder.rglob("*"))}
    for path, mode in before.items():
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in before.items():
            path.chmod(mode)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill a disk up to some bytes; the file that does so."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    os.truncate(path, max(0, path.stat().st_size - leave))
    return path
