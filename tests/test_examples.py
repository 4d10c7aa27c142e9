"""The examples run, each in a process of its own, and print what they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = r"(-?\d+\.\d+)"


def printed(name, tmp_path):
    """What an example prints; the network must stay whole."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no path is left" not in done.stderr
    return done.stdout


def values(text, what, label):
    """(value, sparsity) of the line that begins with a label."""
    found = re.search(rf"^{label}: {what}, sparsity {NUMBER}", text, re.MULTILINE)
    assert found, text
    return tuple(float(group) for group in found.groups())


def test_all_examples_are_here():
    tested = {*ACCURACIES, "regression", "language_model", "preview", "read_net"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


ACCURACIES = {
    "plain_loop": (0.96, 0.9, 0.9),
    "amp": (0.85, 0.8, 0.95),
    "accumulation": (0.85, 0.8, 0.95),
    "compiled": (None, 0.8, 0.95),
    "lightning_digits": (None, 0.8, 0.95),
    "huggingface_vit": (None, 0.7, 0.7),
}


@pytest.mark.parametrize("name", ACCURACIES)
def test_digits(name, tmp_path):
    dense, pruned, sparsity = ACCURACIES[name]
    text = printed(name, tmp_path)
    if dense is not None:
        accuracy, nothing = values(text, f"accuracy {NUMBER}", "dense")
        assert accuracy > dense
        assert nothing == 0
    accuracy, reached = values(text, f"accuracy {NUMBER}", "pruned")
    assert accuracy > pruned
    assert reached == pytest.approx(sparsity, abs=1e-3)
    if name == "compiled":
        assert "graphs compiled 1\n" in text


def test_regression(tmp_path):
    text = printed("regression", tmp_path)
    for method in ("drive", "synflow", "magnitude", "erk"):
        explained, reached = values(text, f"R² {NUMBER}", method)
        assert explained > 0.4
        assert reached == 0.9


def test_language_model(tmp_path):
    text = printed("language_model", tmp_path)
    frequency = float(re.search(rf"by frequency: {NUMBER}", text).group(1))
    dense, _ = values(text, f"{NUMBER} bits a character", "dense")
    pruned, reached = values(text, f"{NUMBER} bits a character", "pruned")
    assert dense < pruned < frequency - 0.3
    assert reached == 0.8


@pytest.mark.slow
def test_preview(tmp_path):
    assert "699,056 weights and 35,046,656 multiply-adds" in printed("preview", tmp_path)
