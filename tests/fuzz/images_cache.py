"""The file of decoded images: with other pixels than it says, or a description that is none, it is not taken."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from random import Random

from driveprune import datasets
from driveprune.datasets import _cache
from tests.datasets.test_folder import folder_of
from tests.fuzz.mutations import mutated_bytes, mutated_json

FOOTER = 40


@cache
def _made(folder: Path) -> tuple[bytes, str]:
    root = folder_of(folder / "images", {"a": 5, "b": 5}, size=(8, 8))
    fingerprint = datasets.load(str(root)).fingerprint
    return next(root.glob(".driveprune-cache*")).read_bytes(), fingerprint


def honest(folder: Path) -> list[bytes]:
    return [_made(folder)[0]]


def mutated(data: bytes, chance: Random) -> bytes:
    if chance.random() < 0.4:
        return mutated_bytes(data, chance)
    length = int.from_bytes(data[-FOOTER:][:8], "little")
    pixels, text = data[: -FOOTER - length], data[-FOOTER - length : -FOOTER]
    if chance.random() < 0.3:
        pixels = mutated_bytes(pixels, chance)
    odd = json.dumps(mutated_json(json.loads(text), chance)).encode()
    return pixels + odd + len(odd).to_bytes(8, "little") + hashlib.sha256(odd).digest()


def target(data: bytes, folder: Path) -> None:
    whole, fingerprint = _made(folder.parent / "honest" / folder.name)
    path = folder / "cache.bin"
    path.write_bytes(data)
    key = json.loads(whole[-FOOTER - int.from_bytes(whole[-FOOTER:][:8], "little") : -FOOTER])["key"]
    for mapped in (False, True):
        try:
            found = _cache._read(path, key, mapped)
        except _cache._OutOfDateError:
            raise ValueError("out of date") from None
        assert len(found.train) + len(found.test) > 0
        assert int(found.train.y.max()) < len(found.classes)
        if found.train.shape == (3, 8, 8) and len(found.train) == 8:
            assert found.fingerprint == fingerprint
