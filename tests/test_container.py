"""The head of a safetensors file: what the format's own reader takes is taken, what it refuses is refused."""

import json

import pytest
import torch
from safetensors.torch import load, save

from driveprune.container import Kind, checked_head

TENSORS = {
    "a": torch.randn(3, 4), "b": torch.arange(5), "empty": torch.zeros(0, 2), "c": torch.tensor(2.0),
    "flag": torch.tensor([True, False]), "half": torch.zeros(2, dtype=torch.bfloat16),
    "small": torch.zeros(3, dtype=torch.float8_e5m2), "complex": torch.zeros(1, dtype=torch.complex64),
    "big": torch.zeros(1, dtype=torch.uint64),
}  # fmt: skip


def split(data: bytes) -> tuple[dict, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def test_what_a_file_says_is_what_was_written():
    content, body = split(save(TENSORS, metadata={"hello": "world"}))
    head = checked_head(content, len(body))
    assert head.metadata == {"hello": "world"}
    assert head.kinds == {name: Kind(value.dtype, tuple(value.shape)) for name, value in TENSORS.items()}
    for name, value in TENSORS.items():
        start, kind = head.starts[name], head.kinds[name]
        assert kind.size == value.numel()
        assert body[start : start + kind.bytes] == value.reshape(-1).view(torch.uint8).numpy().tobytes()


CHANGES = {
    "no tensors": lambda head: [],
    "metadata that are no texts": lambda head: {**head, "__metadata__": {"a": 1}},
    "metadata in a list": lambda head: {**head, "__metadata__": ["a"]},
    "an entry too few": lambda head: {**head, "a": {"dtype": "F32"}},
    "no entry": lambda head: {**head, "a": 3},
    "an unknown dtype": lambda head: changed(head, dtype="F33"),
    "a dtype that is no word": lambda head: changed(head, dtype=["F32"]),
    "a smaller dtype": lambda head: changed(head, dtype="F16"),
    "a negative side": lambda head: changed(head, shape=[-3, -4]),
    "a side that is no number": lambda head: changed(head, shape=["3", 4]),
    "a side that is true": lambda head: changed(head, shape=[12, True]),
    "another shape": lambda head: changed(head, shape=[3, 5]),
    "sides without end": lambda head: changed(head, shape=[1 << 62, 1 << 62]),
    "nothing of a huge size": lambda head: changed(head, shape=[0, 10**30], data_offsets=[0, 0]),
    "dimensions without end": lambda head: changed(head, shape=[1] * 1000),
    "offsets that overlap": lambda head: changed(head, data_offsets=[1, 49]),
    "offsets beyond the end": lambda head: changed(head, data_offsets=[1 << 40, (1 << 40) + 48]),
    "negative offsets": lambda head: changed(head, data_offsets=[-48, 0]),
    "offsets that are no numbers": lambda head: changed(head, data_offsets=[0.0, 48.0]),
    "a name that is no text": lambda head: {
        ("\ud800" if name == "a" else name): entry for name, entry in head.items()
    },
    "metadata that are no text": lambda head: {**head, "__metadata__": {"a": "\ud800"}},
    "one offset": lambda head: changed(head, data_offsets=[48]),
    "a tensor too few": lambda head: {name: entry for name, entry in head.items() if name != "b"},
}


def changed(head, **change):
    return {**head, "a": {**head["a"], **change}}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit_is_refused(name):
    content, body = split(save(TENSORS))
    odd = CHANGES[name](content)
    with pytest.raises((ValueError, TypeError)):
        checked_head(json.loads(json.dumps(odd)), len(body))
    text = json.dumps(odd).encode()
    with pytest.raises(Exception, match="."):  # and so does the library of the format
        load(len(text).to_bytes(8, "little") + text + body)


def test_bytes_that_belong_to_no_tensor():
    content, body = split(save(TENSORS))
    for more in (-1, 1, 1000):
        with pytest.raises(ValueError, match="bytes"):
            checked_head(dict(content), len(body) + more)
