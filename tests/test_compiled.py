"""Compiled loops use as many threads as torch, and do not change that number."""

import os
import subprocess
import sys

import numba
import pytest
import torch

from driveprune.compiled import can_launch, threads, use_threads

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_process_may_not_launch_threads():
    assert can_launch()
    child = os.fork()
    if child == 0:
        os._exit(int(can_launch()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
