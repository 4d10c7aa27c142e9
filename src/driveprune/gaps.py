"""Where the kept weights are, in few bits: the gaps between them, Rice-coded.

A gap is the number of weights that are passed over before the next one of a list of places. It is written as a
quotient by 2^k in unary (so many zeros and a one, in the stream `high`) and a remainder in k bits (in the stream
`low`). For places thrown at random that is within 4% of the entropy, and never more than 10% above it, however they
lie. Where more than half of the weights are kept, the places of the removed ones are listed instead.

Everything works block by block: the memory does not grow with the tensor, and a stream that makes no sense is found
out without more of it than the stream itself takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]

BLOCK = 1 << 22
"""Weights, or bits of a stream, that are worked on at once."""


MOST_WEIGHTS = 1 << 39
"""Of a tensor. Up to here no sum of a block's remainders leaves 64 bits, whatever a stream says."""


@dataclass(frozen=True)
class Gaps:
    """The places of `listed` ones among `size` weights; of zeros if `inverted`."""

    size: int
    listed: int
    inverted: bool
    k: int
    high: Bytes
    low: Bytes

    @property
    def kept(self) -> int:
        """How many weights are kept."""
        return self.size - self.listed if self.inverted else self.listed


def entropy_bits(kept: int, size: int) -> float:
    """The entropy of a mask with so many kept weights: what no code can beat if nothing else is known.

    >>> entropy_bits(1, 2)
    2.0
    """
    if kept in {0, size}:
        return 0.0
    density = kept / size
    return -size * (density * log2(density) + (1 - density) * log2(1 - density))


def width(listed: int, size: int) -> int:
    """The best k for so many places among `size`, if they lie at random."""
    if not listed:
        return 0

    def bits(k: int) -> float:
        passed = (1 - listed / size) ** (1 << k)  # the probability that a gap goes on for another 2^k
        return k + 1 / (1 - passed) if passed < 1 else float("inf")

    return min(range(size.bit_length() + 1), key=bits)


def encode(kept: npt.NDArray[np.bool_]) -> Gaps:
    """The places of the True in a flat array."""
    count, size = int(np.count_nonzero(kept)), kept.size
    inverted = 2 * count > size
    listed = size - count if inverted else count
    k = width(listed, size)
    low = np.zeros(-(-listed * k // 8), np.uint8)
    high = np.zeros(0, np.uint8)
    before, number, bits = -1, 0, 0
    for start in range(0, size, BLOCK):
        block = kept[start : start + BLOCK]
        places = np.flatnonzero(~block if inverted else block) + start
        if places.size:
            gaps = np.diff(places, prepend=before) - 1
            ends = bits + np.cumsum((gaps >> k) + 1) - 1  # where the ones of the unary numbers are
            high = _grown(high, int(ends[-1]) + 1)
            _set(high, ends)
            for bit in range(k):
                ones = np.flatnonzero(gaps >> (k - 1 - bit) & 1)
                _set(low, (number + ones) * k + bit)
            before, number, bits = int(places[-1]), number + places.size, int(ends[-1]) + 1
    return Gaps(size, listed, inverted, k, high[: -(-bits // 8)], low)


def _grown(stream: Bytes, bits: int) -> Bytes:
    """A stream with room for so many bits; doubled, so that growing costs little in all."""
    need = -(-bits // 8)
    if need <= stream.size:
        return stream
    return np.concatenate([stream, np.zeros(max(need, 2 * stream.size) - stream.size, np.uint8)])


def _set(stream: Bytes, places: Places) -> None:
    np.bitwise_or.at(stream, places >> 3, (0x80 >> (places & 7)).astype(np.uint8))


def decode(gaps: Gaps) -> Iterator[Places]:
    """The listed places in rising order, block by block; an error if the streams make no sense."""
    _check_sizes(gaps)
    zeros = number = rest = 0
    for start in range(0, gaps.high.size, BLOCK // 8):
        bits = np.unpackbits(gaps.high[start : start + BLOCK // 8])
        ones = np.flatnonzero(bits)
        order = np.arange(ones.size)
        quotients = zeros + ones - order  # the sum of all quotients up to each one: the zeros before it
        if number + ones.size > gaps.listed or (ones.size and quotients[-1] > gaps.size >> gaps.k):
            raise ValueError(f"the list of {gaps.listed} places among {gaps.size} makes no sense")
        remainders = rest + np.cumsum(_low(gaps, number, ones.size))
        places = (quotients << gaps.k) + remainders + number + order
        if ones.size:
            if places[-1] >= gaps.size:
                raise ValueError(f"a place is listed beyond the {gaps.size} weights")
            rest = int(remainders[-1])
            yield places
        zeros, number = zeros + bits.size - ones.size, number + ones.size
    if number != gaps.listed:
        raise ValueError(f"{number} places are listed instead of {gaps.listed}")


def _low(gaps: Gaps, first: int, count: int) -> Places:
    """The remainders number `first` and so many that follow."""
    if not gaps.k:
        return np.zeros(count, np.int64)
    start = first * gaps.k
    bits = np.unpackbits(gaps.low[start // 8 : -(-(start + count * gaps.k) // 8)])[start % 8 :]
    found = np.zeros(count, np.int64)
    for bit in range(gaps.k):  # highest first; a table of all bits as numbers would take k times the memory
        found <<= 1
        found |= bits[bit : count * gaps.k : gaps.k]
    return found


def common(first: Gaps, second: Gaps) -> int:
    """How many places are in both lists."""
    count, theirs = 0, decode(second)
    block = next(theirs, _NONE)
    for places in decode(first):
        rest = places
        while rest.size and block.size:
            count += np.intersect1d(rest, block, assume_unique=True).size
            if block[-1] > rest[-1]:
                break
            rest, block = rest[rest > block[-1]], next(theirs, _NONE)
    for _ in theirs:
        pass  # to the end: an error if the rest makes no sense
    return count


_NONE = np.zeros(0, np.int64)


def checked(gaps: Gaps) -> Gaps:
    """The same, when its streams make sense; an error if not. Nothing is made that is larger than they are."""
    for _ in decode(gaps):
        pass
    return gaps


def _check_sizes(gaps: Gaps) -> None:
    if not 0 <= gaps.listed <= gaps.size or not 0 <= gaps.k <= gaps.size.bit_length():
        raise ValueError(f"{gaps.listed} places among {gaps.size} in units of 2^{gaps.k} make no sense")
    if gaps.size > MOST_WEIGHTS:
        raise ValueError(f"{gaps.size} weights are more than a tensor can have")
    if gaps.low.size != -(-gaps.listed * gaps.k // 8):
        raise ValueError(f"{gaps.low.size} bytes are no {gaps.listed} remainders of {gaps.k} bits")
