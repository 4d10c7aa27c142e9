"""The noise of dropout: the numbers that torch's own generator would draw, several times faster.

On the CPU torch draws them one after the other, which shows next to a sparse network. Here the generator (the
Mersenne Twister of Matsumoto and Nishimura, 1998) works on all of its 624 words at a time.
Threads of Python that draw at the same moment may get the same numbers: torch's lock cannot be taken from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from driveprune.compiled import compiled

_WORDS, _AHEAD = 624, 397
_LEFT, _NEXT, _FIRST = 1, 2, 3
"""Where torch keeps its generator, in 64-bit numbers: words that are left, the next one, and the words."""

_BITS, _HALF = 53, 0xFFFFFFFF


def dropout_of_ones(module: nn.Module, shape: Sequence[int], like: Tensor) -> Tensor:
    """What a dropout module makes of ones of a shape, on the device and of the type of another tensor."""
    p = float(module.p) if type(module) is nn.Dropout and module.training else 0.0
    if 0 < p < 1 and like.device.type == "cpu" and like.dtype == torch.float32 and _torch_draws_alike():
        out = torch.empty(*shape)
        _bernoulli(torch.default_generator, 1 - p, 1 / np.float32(1 - p), out)
        return out
    found: Tensor = module(torch.ones(*shape, dtype=like.dtype, device=like.device))
    return found


@cache
def _torch_draws_alike() -> bool:
    """Whether this version of torch has the generator that is written down here."""
    ours, torchs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    found, expected = torch.empty(1_000), torch.empty(1_000).bernoulli_(0.3, generator=torchs)
    if len(ours.get_state()) != 8 * 632:
        return False
    _bernoulli(ours, 0.3, np.float32(1.0), found)
    return torch.equal(found, expected) and torch.equal(ours.get_state(), torchs.get_state())


def _bernoulli(generator: torch.Generator, p: float, value: Any, out: Tensor) -> None:
    """Fill a tensor with a value, each number with probability p, and with zeros."""
    state = generator.get_state()
    numbers = state.numpy().view(np.uint64)
    left, place, limit = int(numbers[_LEFT]) & _HALF, int(numbers[_NEXT]), math.ceil(p * 2**_BITS)
    words, (ready, twists) = numbers[_FIRST : _FIRST + _WORDS].astype(np.uint32), np.empty((2, _WORDS), np.uint32)
    left, place = _draw(words, ready, twists, left - 1, place, limit, np.float32(value), out.view(-1).numpy())
    numbers[_FIRST : _FIRST + _WORDS] = words
    numbers[_LEFT], numbers[_NEXT] = (int(numbers[_LEFT]) & ~_HALF) | (left + 1), place
    generator.set_state(state)


@compiled()
def _temper(words: Any, ready: Any) -> None:
    """What the generator gives out for its words."""
    for k in range(len(words)):
        y = words[k]
        y = np.uint32(y ^ (y >> np.uint32(11)))
        y = np.uint32(y ^ (y << np.uint32(7) & np.uint32(0x9D2C5680)))
        y = np.uint32(y ^ (y << np.uint32(15) & np.uint32(0xEFC60000)))
        ready[k] = np.uint32(y ^ (y >> np.uint32(18)))


@compiled()
def _twist(words: Any, following: Any, out: Any) -> None:
    """What the words' upper and the following ones' lower bits contribute to the next ones."""
    for k in range(len(out)):
        mixed = np.uint32((words[k] & np.uint32(0x80000000)) | (following[k] & np.uint32(0x7FFFFFFF)))
        odd = np.uint32(np.uint32(0) - (following[k] & np.uint32(1)))
        out[k] = np.uint32((mixed >> np.uint32(1)) ^ (odd & np.uint32(0x9908B0DF)))


@compiled()
def _renew(words: Any, twists: Any) -> None:
    """The next 624 words. In stretches that do not overlap, so that they are computed in vectors."""
    _twist(words[:-1], words[1:], twists[:-1])
    behind = _WORDS - _AHEAD
    for begin in range(0, _WORDS - 1, behind):
        end = min(begin + behind, _WORDS - 1)
        source = begin + _AHEAD if begin == 0 else begin - behind
        to, other, twist = words[begin:end], words[source : source + end - begin], twists[begin:end]
        for k in range(len(to)):
            to[k] = other[k] ^ twist[k]
    _twist(words[-1:], words[:1], twists[-1:])
    words[-1] = words[_AHEAD - 1] ^ twists[-1]


@compiled(nogil=False)  # no other thread of Python draws meanwhile
def _draw(
    words: Any, ready: Any, twists: Any, left: int, place: int, limit: int, value: Any, out: Any
) -> tuple[int, int]:  # fmt: skip
    """Fill `out` with the value where 53 random bits are a number below the limit, else with zero.

    What is left of the words, and the place of the next one, are given and returned. `ready` and `twists` have room
    for as many words.
    """
    _temper(words, ready)
    done = 0
    while done < len(out):
        some = min(left // 2, len(out) - done)
        here, found = ready[place:], out[done : done + some]
        for k in range(some):
            bits = np.int64(here[2 * k] & np.uint32(0x1FFFFF)) << 32 | np.int64(here[2 * k + 1])
            found[k] = value if bits < limit else np.float32(0.0)
        done, place, left = done + some, place + 2 * some, left - 2 * some
        if done < len(out):  # one word is left, or none
            last = ready[place] if left else np.uint32(0)
            _renew(words, twists)
            _temper(words, ready)
            if left:
                bits = np.int64(last & np.uint32(0x1FFFFF)) << 32 | np.int64(ready[0])
                out[done] = value if bits < limit else np.float32(0.0)
                done, place, left = done + 1, 1, _WORDS - 1
            else:
                place, left = 0, _WORDS
    return left, place
