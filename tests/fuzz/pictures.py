"""Image files: decoded to the pixels that were asked for, or an error that names the file."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from driveprune.datasets import _pictures
from tests.datasets.written import noise
from tests.fuzz.mutations import mutated_bytes

KINDS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def honest(folder: Path) -> list[bytes]:
    found = []
    for kind in KINDS:
        file = io.BytesIO()
        Image.fromarray(noise(16, 16, 3)).save(file, kind)
        found.append(file.getvalue())
    file = io.BytesIO()
    Image.fromarray(np.zeros((3000, 3000, 3), np.uint8)).save(file, "PNG")
    return [*found, file.getvalue()]


def mutated(data: bytes, chance: Random) -> bytes:
    begin = mutated_bytes(data[:64], chance) + data[64:]
    return _sealed(begin if chance.random() < 0.6 else mutated_bytes(data, chance))


def _sealed(data: bytes) -> bytes:
    """A PNG whose checksums are right again."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    found, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunk = data[at + 4 : at + 8 + size]
        found += data[at : at + 4] + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        at += 12 + size
    return bytes(found)


def target(data: bytes, folder: Path) -> None:
    path = folder / "x.png"
    path.write_bytes(data)
    _pictures._size(path)
    found = _pictures.decode(path, 16, resize=True)
    assert found.shape == (3, 16, 16)
    assert found.dtype == np.uint8
