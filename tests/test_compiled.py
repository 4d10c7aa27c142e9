"""Compiled loops use as many threads as torch, and do not change that number."""

import subprocess
import sys

import numba
import numpy as np
import pytest
import torch

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
