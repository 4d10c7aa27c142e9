"""CIFAR's binary files: labels and pixels of each record, as they stand."""

from __future__ import annotations

from pathlib import Path
from random import Random

from driveprune.datasets import _cifar
from tests.datasets.written import noise
from tests.fuzz.mutations import mutated_bytes


def honest(folder: Path) -> list[bytes]:
    return [b"".join(bytes([3, i]) + noise(3072, seed=i).tobytes() for i in range(8))]


def mutated(data: bytes, chance: Random) -> bytes:
    found = mutated_bytes(data, chance)
    return found[: len(found) // 3074 * 3074] if chance.random() < 0.5 else found


def target(data: bytes, folder: Path) -> None:
    (folder / "x.bin").write_bytes(data)
    found = _cifar.parse(_cifar._bytes(folder / "x.bin"), folder / "x.bin", 2, 100)
    assert len(found) == len(data) / 3074
    for number in range(len(found)):
        record = data[3074 * number : 3074 * (number + 1)]
        assert int(found.y[number]) == record[1] < 100
        assert found.x[number].numpy().tobytes() == record[2:]
