"""Checkpoints: a nest of plain things and tensors; bytes that no checksum covers change nothing."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch

from driveprune.files import read_state, write_state
from tests.fuzz.mutations import mutated_tensors

STATE = {
    "rows": [{"cycle": 0, "epoch": 1, "loss": 0.5, "odd": float("nan")}], "steps": 7, "none": None, "pair": (1, "x"),
    3: {"t": torch.arange(6.0).view(2, 3), "flag": torch.tensor([True, False]), "half": torch.ones(2).bfloat16()},
}  # fmt: skip


def honest(folder: Path) -> list[bytes]:
    write_state(folder / "state", STATE)
    return [(folder / "state").read_bytes()]


def mutated(data: bytes, chance: Random) -> bytes:
    return mutated_tensors(data, chance, ("state",))


def target(data: bytes, folder: Path) -> None:
    (folder / "state").write_bytes(data)
    _check(read_state(folder / "state"))


def _check(value: Any) -> None:
    """Plain things only, of exactly the kinds that are written."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check(name)
            _check(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner)
    else:
        assert value is None or type(value) in {bool, int, float, str, torch.Tensor}
