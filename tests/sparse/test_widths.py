"""Whole networks in the widths of other processors: four lanes (NEON, SSE), eight (AVX2) and sixteen (AVX-512)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from driveprune.sparse.code import LANES

HERE = Path(__file__).parent
FILES = ("test_kernels", "test_blocked", "test_region", "test_network", "test_batch", "test_flat")

PRETEND = """
import sys
from llvmlite import binding

here, names = binding.get_host_cpu_features, {names}
def other():
    choosing = sys._getframe(1).f_code.co_name == "lanes"  # instructions stay those of this processor
    return type(here())({{**here(), **names}}) if choosing else here()
binding.get_host_cpu_features = other
from driveprune.sparse.code import LANES
assert LANES == {lanes}, LANES
import pytest
sys.exit(pytest.main({arguments}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lanes", "names"),
    [
        (4, {"avx512f": False, "avx2": False}),
        (8, {"avx512f": False, "avx2": True, "fma": True}),
        (16, {"avx512f": True}),
    ],
)
def test_the_tests_of_the_engine_pass(lanes, names, tmp_path):
    if lanes == LANES:
        pytest.skip("this processor's own width, as in all other tests")
    others = ["-k", "not forked"]  # it starts a process with this processor's own width
    arguments = ["-q", "-x", "-p", "no:cacheprovider", *others, *(str(HERE / f"{name}.py") for name in FILES)]
    found = subprocess.run(
        [sys.executable, "-c", PRETEND.format(names=names, lanes=lanes, arguments=arguments)],
        check=False,
        cwd=HERE.parent.parent,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},  # what is compiled depends on the width
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-1000:]
    assert " passed" in found.stdout
