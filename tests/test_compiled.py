"""Compiled loops use as many threads as torch, and do not change that number."""

import os
import pickle
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import numba
import numpy as np
import pytest
import torch

import driveprune
from driveprune.compiled import compiled, threads, use_threads

FIRST_USE = """
import torch
torch.set_num_threads(1)
from driveprune.compiled import threads, use_threads
use_threads()
print(torch.get_num_threads(), threads())
"""


def test_the_first_use_keeps_torchs_number():
    found = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "1"]


@pytest.mark.parametrize("count", [1, 2])
def test_as_many_as_torch(count):
    torch.set_num_threads(count)
    use_threads()
    assert threads() == numba.get_num_threads() == min(count, numba.config.NUMBA_NUM_THREADS)
    assert torch.get_num_threads() == count


FIRST_OF = """
def first_of(pair):
    some, others = pair
    return some[0] if len(others) else others[0]
"""


def test_no_references_are_counted():
    found = {}
    exec(FIRST_OF, found)  # what is compiled of code without a file is not kept, so it can be looked at
    first_of, arrays = compiled()(found["first_of"]), (np.ones(3), np.zeros(2))
    assert first_of(arrays) == 1.0
    assert "NRT_incref" not in next(iter(first_of.inspect_llvm().values()))


KERNELS = """
from driveprune.compiled import compiled
from driveprune.constants_of_a_test import FACTOR

@compiled()
def multiplied(x):
    return x * FACTOR
"""

USE = """
from driveprune.kernels_of_a_test import multiplied
print(multiplied(7), sum(multiplied.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of this package with a loop in it that is compiled from two files: called, it says what it computed
    and how often a kept entry was used."""
    home = tmp_path / "driveprune"
    shutil.copytree(driveprune.__path__[0], home, ignore=shutil.ignore_patterns("__pycache__"))
    (home / "__init__.py").write_text("")
    (home / "kernels_of_a_test.py").write_text(KERNELS)
    (home / "constants_of_a_test.py").write_text("FACTOR = 2\n")

    def run(**environment):
        found = subprocess.run(
            [sys.executable, "-c", USE], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        )  # fmt: skip
        return tuple(map(int, found.stdout.split()))

    run.home = home
    run.entries = lambda: list(home.glob("__pycache__/kernels_of_a_test.*.nbc"))
    return run


def test_a_change_in_another_file_is_seen(package):
    assert package() == (14, 0)
    assert package() == (14, 1)
    path = package.home / "constants_of_a_test.py"
    times = path.stat()
    path.write_text("FACTOR = 3\n")
    os.utime(path, (times.st_atime, times.st_mtime))  # as an unpacked archive may have it
    assert package() == (21, 0)
    assert len(package.entries()) == 1  # the old one is gone
    assert package() == (21, 1)


@pytest.mark.parametrize("harm", ["cut", "turned", "empty", "folder", "numba's own"])
def test_a_damaged_entry_is_compiled_anew(package, harm):
    package()
    (entry,) = package.entries()
    content = entry.read_bytes()
    match harm:
        case "cut":
            entry.write_bytes(content[: len(content) // 2])
        case "turned":
            entry.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
        case "empty":
            entry.write_bytes(b"")
        case "folder":
            entry.unlink()
            entry.mkdir()
        case "numba's own":
            entry.write_bytes(pickle.dumps("0.0.1") + pickle.dumps((b"", {})))
    assert package() == (14, 0)
    assert package() == (14, 0 if harm == "folder" else 1)  # a folder in its place stays, and is told of


def test_a_folder_that_cannot_be_written_to(package):
    shutil.rmtree(package.home / "__pycache__", ignore_errors=True)
    (package.home / "__pycache__").write_text("")
    home = package.home.parent / "home"
    home.write_text("")  # nor can the user's own folder for such things
    assert package(HOME=str(home), XDG_CACHE_HOME=str(home), PYTHONDONTWRITEBYTECODE="1") == (14, 0)


def test_a_full_disk_is_told_of_once(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "entry")

    monkeypatch.setattr(driveprune.compiled, "write_atomically", full)
    driveprune.compiled._tell_once.cache_clear()
    path = tmp_path / "full_disk.py"
    path.write_text(KERNELS.replace("from driveprune.constants_of_a_test import FACTOR", "FACTOR = 5"))
    spec = spec_from_file_location("full_disk", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.warns(driveprune.compiled.CacheWarning, match="No space left"):
        assert module.multiplied(7) == 35
    assert module.multiplied(7.0) == 35.0
