"""Random numbers by counter: a seed for every purpose, cycle and step, so that nothing has to be remembered."""

from __future__ import annotations

import hashlib

import torch


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
