"""Tiles of a layer that a normalisation follows: the moments of the sums are found while these are in registers.

The sums of a tile's sums, over all tiles of a piece of work, are vectors: each lane is an image.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import LANES, Code
from driveprune.sparse.tile import counted, places, products_added, stepped

MOMENT_VECTORS = 3
"""Vectors that tell an output's moments: a value K, the sums of differences from it and of their squares."""


def make_tile_with_moments(stretches: int, run: int, width: int = LANES) -> Any:
    """The sums of one output over one tile, as in `make_tile`, and what their moments are made of.

    tile(x, begin, has_sums, bias, offsets, values, bounds, inward, outward, counted, place, out, base, step, stream,
    moments, at, is_first): the sums start from x[begin:], where those so far lie side by side, or from the bias.

    With v the vectors of the tile that count, moments[at:] are a vector K, which is that of the first tile's first v,
    then the sums of v - K and of (v - K)².
    """

    @intrinsic
    def tile(
        _: Any, x: Any, begin: Any, has_sums: Any, bias: Any, offsets: Any, values: Any, bounds: Any, inward: Any,
        outward: Any, counts: Any, place: Any, out: Any, base: Any, step: Any, stream: Any, moments: Any, at: Any,
        is_first: Any,
    ) -> Any:  # fmt: skip
        int64, boolean = types.int64, types.boolean
        signature = types.void(
            x, int64, boolean, types.float32, offsets, values, bounds, inward, outward, counts, int64, out, int64,
            int64, boolean, moments, int64, boolean,
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            begin, has_sums, bias, place, base, step, stream, at, is_first = (
                args[n] for n in (1, 2, 3, 10, 12, 13, 14, 16, 17)
            )
            sources = places(code, code.data(0), code.data(7), place, stretches)
            results = stepped(
                code, places(code, code.at(code.data(11), base), code.data(8), place, stretches), step, run
            )
            before = [code.at(code.data(0), begin, t * width) for t in range(len(results))]
            first = code.loaded_if(has_sums, before, code.splat(bias))
            sums = products_added(code, code.data(4), code.data(5), args[6], sources, run, first, 1)
            code.store_all(sums, results, stream)
            moments = code.at(code.data(15), at)
            shift = builder.select(is_first, sums[0], code.load(moments))
            apart = [builder.fsub(value, shift) for value in sums]
            apart = counted(code, apart, code.at(code.data(9), place), stretches)
            _add_moments(code, shift, apart, moments, is_first)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _add_moments(code: Code, shift: Any, apart: list[Any], moments: Any, is_first: Any) -> None:
    """What some vectors' differences from K, the shift, add to the moments at an address."""
    builder, zero = code.builder, code.zero()
    target = [code.at(moments, n * code.width) for n in range(MOMENT_VECTORS)]
    total, squares = (builder.select(is_first, zero, code.load(pointer)) for pointer in target[1:])
    parts = [squares, zero]
    for number, each in enumerate(apart):
        parts[number % 2] = code.fma(each, each, parts[number % 2])
    found = shift, builder.fadd(total, code.added(apart)), code.added(parts)
    for value, pointer in zip(found, target, strict=True):
        code.store(value, pointer)
