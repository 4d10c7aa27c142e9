"""JSON with a checksum: without the right one nothing but the same content is taken."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from driveprune.files import read_json, write_json
from tests.fuzz.mutations import mutated_bytes, mutated_json, sealed_json

CONTENT = {"a": [1, 0.1, None, True], "ä\u202e": {"b": "c" * 20, "d": [{"e": -5}]}, "f": 10**20}


def honest(folder: Path) -> list[bytes]:
    write_json(folder / "x.json", CONTENT)
    return [(folder / "x.json").read_bytes()]


def mutated(data: bytes, chance: Random) -> bytes:
    if chance.random() < 0.5:
        return mutated_bytes(data, chance)
    return sealed_json(mutated_json(json.loads(data), chance))


def target(data: bytes, folder: Path) -> None:
    (folder / "x.json").write_bytes(data)
    found = read_json(folder / "x.json")
    content = json.loads(data)
    del content["sha256"]
    assert found == content
    assert "NaN" not in json.dumps(found).replace('"NaN', "")
