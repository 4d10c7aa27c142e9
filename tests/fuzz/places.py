"""The streams of places: what is decoded is what they say bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np

from driveprune.gaps import Gaps, common, decode, encode
from tests.fuzz.mutations import mutated_bytes, mutated_json


def honest(folder: Path) -> list[bytes]:
    found = []
    for size, density in ((300, 0.02), (300, 0.3), (1000, 0.5), (7, 0.9), (0, 0.0), (5000, 0.001)):
        code = encode(np.random.default_rng(size).random(size) < density)
        facts = {"size": code.size, "listed": code.listed, "inverted": code.inverted, "k": code.k}
        found.append(
            json.dumps({**facts, "high": code.high.tobytes().hex(), "low": code.low.tobytes().hex()}).encode()
        )
    return found


def mutated(data: bytes, chance: Random) -> bytes:
    facts = json.loads(data)
    if chance.random() < 0.6:
        stream = chance.choice(("high", "low"))
        return json.dumps({**facts, stream: mutated_bytes(bytes.fromhex(facts[stream]), chance).hex()}).encode()
    numbers = {name: facts[name] for name in ("size", "listed", "k")}
    odd = mutated_json(numbers, chance)
    whole = {name: value for name, value in odd.items() if type(value) is int} if isinstance(odd, dict) else {}
    return json.dumps({**facts, **whole}).encode()


def target(data: bytes, folder: Path) -> None:
    facts = json.loads(data)
    streams = {name: np.frombuffer(bytes.fromhex(facts[name]), np.uint8) for name in ("high", "low")}
    code = Gaps(**{name: facts[name] for name in ("size", "listed", "inverted", "k")}, **streams)
    found = [int(place) for places in decode(code) for place in places]
    assert found == _literal(code)
    assert all(0 <= place < code.size for place in found)
    assert common(code, code) == len(found)


def _literal(code: Gaps) -> list[int]:
    high = "".join(f"{byte:08b}" for byte in code.high)
    low = "".join(f"{byte:08b}" for byte in code.low)
    places, at, place = [], 0, -1
    for number in range(code.listed):
        end = high.index("1", at)
        rest = low[number * code.k : (number + 1) * code.k]
        place += ((end - at) << code.k) + (int(rest, 2) if rest else 0) + 1
        places.append(place)
        at = end + 1
    return places
