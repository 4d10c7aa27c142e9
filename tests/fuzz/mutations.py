"""Mutations: of bytes, of JSON, and of files whose checksums are made right again, so that they hide nothing."""

from __future__ import annotations

import copy
import hashlib
import json
from random import Random
from typing import Any

NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 63, 64, 65, 255, 256, 65535, 100_000, 1 << 26, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 39,
    1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -(1 << 31), -(1 << 63), 0.5, -0.5, 1e-300, 1e308, True, False,
    float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
TEXTS = (
    "", "a", "\x00", "\x1b]0;t\x07\x1b[2J", "\u202eodd", "\ud800", "<img src=x>", "../../x", "/etc/passwd", "NaN",
    "[]", "0.weight", "0.weight:high", "__metadata__", "sha256", "float32", "float8_e5m2", "nn", "F32", "U8",
    "x" * 3000, "9" * 5000, "os.system", "é", "\n", "%s{}", "\\", "$x$", "_",
)  # fmt: skip


def mutated_bytes(data: bytes, chance: Random) -> bytes:
    """One to four changes somewhere."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, size = chance.randrange(len(found) + 1), chance.choice((1, 2, 4, 8, 64, 512))
        match chance.randrange(10):
            case 0 | 1 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 2 if at < len(found):
                found[at] = chance.choice((0, 1, 127, 128, 255))
            case 3:
                del found[at:]
            case 4:
                del found[at : at + size]
            case 5:
                found[at:at] = found[at : at + size]
            case 6:
                found[at:at] = chance.randbytes(size)
            case 7:
                number = chance.choice([n for n in NUMBERS if type(n) is int]) % (1 << 64)
                width, order = chance.choice((2, 4, 8)), chance.choice(("little", "big"))
                found[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, order)
            case 8:
                other = chance.randrange(len(found) + 1)
                found[at : at + size], found[other : other + size] = (
                    found[other : other + size],
                    found[at : at + size],
                )
            case 9:
                found[at : at + size] = bytes(len(found[at : at + size]))
    return bytes(found)


def mutated_json(content: Any, chance: Random) -> Any:
    """One to three changes of values, names and nesting."""
    found = [copy.deepcopy(content)]
    for _ in range(chance.choice((1, 1, 2, 3))):
        places = list(_places(found))
        outer, key = chance.choice(places)
        outer[key] = _mutated_value(outer[key], chance, places)
        if isinstance(outer, dict) and chance.random() < 0.15:
            odd = chance.choice((*TEXTS, *outer))
            outer[odd] = outer.pop(key) if chance.random() < 0.7 else outer[key]
        elif len(outer) > 1 and chance.random() < 0.1:
            del outer[key]
    return found[0]


def _places(outer: Any) -> Any:
    for key in list(outer) if isinstance(outer, dict) else range(len(outer)):
        yield outer, key
        if isinstance(outer[key], dict | list):
            yield from _places(outer[key])


def _mutated_value(value: Any, chance: Random, places: list[Any]) -> Any:
    if type(value) in {int, float} and chance.random() < 0.5:
        return chance.choice((value + 1, value - 1, -value, value * 2, value // 2, value * 1000, float(value)))
    match chance.randrange(8):
        case 0 | 1:
            return chance.choice(NUMBERS)
        case 2:
            return chance.choice(TEXTS)
        case 3:
            return chance.choice((None, [], {}, [[]], {"a": 1}))
        case 4:
            outer, key = chance.choice(places)
            return copy.deepcopy(outer[key])
        case 5:
            return [value] * chance.choice((0, 1, 2, 5))
        case 6 if isinstance(value, list):
            return chance.sample(value, len(value)) if chance.random() < 0.5 else value[:-1]
        case 7 if chance.random() < 0.2:
            deep: Any = value
            for _ in range(chance.choice((50, 150, 300))):
                deep = [deep]
            return deep
    return value


def sealed_json(content: Any) -> bytes:
    """A file of `write_json`, whatever it holds, with the right checksum."""
    if not isinstance(content, dict):
        return json.dumps(content).encode()
    content = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True)
    return json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64", "U16": "uint16",
}  # fmt: skip


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The head and the body of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def sealed(head: Any, body: bytes) -> bytes:
    """A file of a head and a body, with the right checksum (docs/file-format.md), if there can be one."""
    try:
        metadata = {name: value for name, value in head["__metadata__"].items() if name != "sha256"}
        digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
        for name in sorted(head.keys() - {"__metadata__"}):
            entry = head[name]
            start, stop = entry["data_offsets"]
            digest.update(json.dumps([name, f"torch.{DTYPES[entry['dtype']]}", entry["shape"]]).encode())
            digest.update(body[start:stop])
        head = {**head, "__metadata__": {**metadata, "sha256": digest.hexdigest()}}
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + body


def mutated_tensors(data: bytes, chance: Random, texts: tuple[str, ...]) -> bytes:
    """A file of tensors: its bytes, its head, the JSON in its metadata, or the tensors, with a right checksum again.

    `texts` names what of the metadata is JSON itself.
    """
    head, body = split(data)
    match chance.randrange(6):
        case 0:
            return mutated_bytes(data, chance)
        case 1:
            return sealed(head, mutated_bytes(body, chance))
        case 2:
            return sealed(mutated_json(head, chance), body)
        case 3:
            name = chance.choice([name for name in head if name != "__metadata__"])
            start, stop = head[name]["data_offsets"]
            piece = mutated_bytes(body[start:stop], chance)[: stop - start].ljust(stop - start, b"\0")
            return sealed(head, body[:start] + piece + body[stop:])
        case _:
            text = chance.choice(texts)
            odd = mutated_json(json.loads(head["__metadata__"][text]), chance)
            said = json.dumps(odd)
            if chance.random() < 0.1:
                said = mutated_bytes(said.encode(), chance).decode(errors="replace")
            metadata = {**head["__metadata__"], text: said}
            return sealed({**head, "__metadata__": metadata}, body)
