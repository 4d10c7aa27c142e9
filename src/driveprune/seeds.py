"""Random numbers by counter: a seed for every purpose, cycle and step, so that nothing has to be remembered."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from driveprune.collectives import box_of, is_sharded, local, placed

_PIECE = 1 << 20


def seed_for(seed: int, *counter: str | int) -> int:
    """A seed of its own for each purpose and counter.

    >>> seed_for(0, "cut", 1) == seed_for(0, "cut", 1)
    True
    >>> seed_for(0, "cut", 1) == seed_for(0, "cut", 2)
    False
    """
    digest = hashlib.sha256(repr((int(seed), *counter)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(seed: int, *counter: str | int) -> torch.Generator:
    """A generator on the CPU, seeded by `seed_for`."""
    return torch.Generator().manual_seed(seed_for(seed, *counter))


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform random numbers of another tensor's shape, drawn on the CPU.

    Of a sharded tensor a rank keeps the numbers of its own part. It draws those of the others, too, piece by piece,
    so that the numbers are those of one process.

    >>> uniform(torch.ones(2), generator_for(0)).equal(torch.rand(2, generator=generator_for(0)))
    True
    """
    if not is_sharded(like):
        return torch.rand(like.shape, generator=generator).to(like.device)
    (start, end), *others = box_of(like)
    columns = tuple(slice(*edges) for edges in others)
    own = local(like)
    numbers = torch.empty(own.shape, device=own.device)
    rows = max(1, _PIECE * len(like) // max(1, like.numel()))
    for first in range(0, len(like), rows):
        last = min(first + rows, len(like))
        drawn = torch.rand((last - first, *like.shape[1:]), generator=generator)
        low, high = max(first, start), min(last, end)
        if low < high:
            numbers[low - start : high - start] = drawn[(slice(low - first, high - first), *columns)]
    return placed(numbers, like)
