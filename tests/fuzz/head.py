"""The head of a safetensors file: what is taken, the library of the format takes, too, and finds the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load, save

from driveprune.container import checked_head
from tests.fuzz.mutations import mutated_bytes, mutated_json, split

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5),
    "empty": torch.zeros(0, 2),
    "c": torch.tensor(2.0),
}


def honest(folder: Path) -> list[bytes]:
    return [save(TENSORS, metadata={"hello": "world"})]


def mutated(data: bytes, chance: Random) -> bytes:
    head, body = split(data)
    odd = json.dumps(mutated_json(head, chance)).encode()
    if chance.random() < 0.2:
        odd = mutated_bytes(odd, chance)
    return len(odd).to_bytes(8, "little") + odd + body


def target(data: bytes, folder: Path) -> None:
    try:
        content, body = split(data)
        head = checked_head(content, len(body))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    literal = load(data)
    assert literal.keys() == head.kinds.keys()
    for name, value in literal.items():
        assert (value.dtype, tuple(value.shape)) == (head.kinds[name].dtype, head.kinds[name].shape)
        piece = body[head.starts[name] : head.starts[name] + head.kinds[name].bytes]
        assert value.reshape(-1).view(torch.uint8).numpy().tobytes() == piece
