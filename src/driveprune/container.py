"""The head of a safetensors file: what it says of its tensors, each number checked before a byte of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

LONGEST_HEAD = 100_000_000
"""Bytes; the format's own limit."""
_MOST_DIMENSIONS = 64
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """What they take, dense."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Head:
    """What a file says that it holds: metadata, and of each tensor what it is and at which byte it begins."""

    metadata: dict[str, str]
    kinds: dict[str, Kind]
    starts: dict[str, int]
    """From the end of the head."""


def checked_head(content: Any, body: int) -> Head:
    """The head of a file from its JSON; an error unless the tensors are exactly the `body` bytes after it."""
    if not isinstance(content, dict):
        raise TypeError("its head is no list of tensors")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError("its metadata are no names and texts")
    for text in (*content, *metadata, *metadata.values()):
        text.encode()  # an error for halves of letters, which are no text of the format
    kinds, ranges = {}, {}
    for name, entry in content.items():
        if not isinstance(entry, Mapping) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
            raise TypeError(f"the entry of {name} is no dtype, shape and data_offsets")
        kinds[name] = _kind(name, entry)
        ranges[name] = _range(name, entry["data_offsets"], kinds[name])
    end = 0
    for start, stop in sorted(ranges.values()):
        if start != end:
            raise ValueError("its tensors overlap, or leave bytes between them")
        end = stop
    if end != body:
        raise ValueError(f"its tensors are {end:,} bytes, but {body:,} follow the head")
    return Head(metadata, kinds, {name: start for name, (start, _) in ranges.items()})


def _kind(name: str, entry: Mapping[str, Any]) -> Kind:
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is of an unknown kind, {entry['dtype']!r:.40}")
    return Kind(_DTYPES[entry["dtype"]], checked_shape(name, entry["shape"]))


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape that somebody else has written; an error if no tensor can have it."""
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise TypeError(f"{name} has no shape")
    if any(type(side) is not int or side < 0 for side in shape):
        raise ValueError(f"{name} has no shape: its sides must be whole numbers, got {shape!s:.80}")
    if prod(max(side, 1) for side in shape) > torch.iinfo(torch.int64).max // 16:
        raise ValueError(f"{name} has the shape {shape!s:.80}, which no tensor can have")
    return tuple(shape)


def _range(name: str, offsets: Any, kind: Kind) -> tuple[int, int]:
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        raise TypeError(f"the offsets of {name} are no two whole numbers")
    start, stop = offsets
    if start < 0 or stop - start != kind.bytes:
        raise ValueError(f"{name} takes {kind.bytes:,} bytes, but its offsets are {start} and {stop}")
    return start, stop
