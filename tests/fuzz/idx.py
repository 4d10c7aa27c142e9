"""IDX files: what is taken holds exactly the bytes that follow the header."""

from __future__ import annotations

import gzip
import struct
from math import prod
from pathlib import Path
from random import Random

from driveprune.datasets import _idx
from tests.datasets.written import noise
from tests.fuzz.mutations import mutated_bytes


def honest(folder: Path) -> list[bytes]:
    arrays = noise(4, 28, 28), noise(40, high=10)
    plain = [
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
        for array in arrays
    ]
    return [*plain, *map(gzip.compress, plain)]


def mutated(data: bytes, chance: Random) -> bytes:
    if data.startswith(b"\x1f\x8b"):
        return mutated_bytes(data, chance) if chance.random() < 0.5 else gzip.compress(mutated(_idx_of(data), chance))
    if chance.random() < 0.6:
        return mutated_bytes(data[:16], chance) + data[16:]
    return mutated_bytes(data, chance)


def _idx_of(data: bytes) -> bytes:
    return gzip.decompress(data)


def target(data: bytes, folder: Path) -> None:
    path = folder / "x"
    path.write_bytes(data)
    content = _idx._bytes(path)
    found = _idx.parse(content, path)
    dimensions = content[3]
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    assert tuple(found.shape) == shape
    assert prod(shape) == len(content) - 4 - 4 * dimensions
    assert found.contiguous().numpy().tobytes() == content[4 + 4 * dimensions :]
