"""Sums over whole rows of pixels: the innermost loop for one image whose rows are whole vectors.

A weight of the column to the left or to the right of a pixel would read vectors that lie across two lines of the
cache, each in twice the time. So the products of all weights of a column are added up where their inputs lie, and the
sums are moved by a pixel once, in registers.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import I64, LANES, Code

TILE = 8
"""Vectors in a tile, which is as many rows as they make."""

SIDES = (-1, 1, 0)
"""The columns that a weight may read, from the pixel's own; in this order they come."""


def make_rows(across: int, width: int = LANES) -> Any:
    """The sums of one output over a tile of rows that are so many vectors across.

    rows(arena, source, (offsets, values, at), bounds, to, plus, bias, (has_sums, has_plus, relu)):

    arena[to + t] = bias + sum over j of values[at + j] · arena[source + offsets[j] + t + side], for each pixel t of
    the tile; the j in [bounds[n], bounds[n + 1]) are those of side SIDES[n], and what is beside a row is zero. With
    `has_sums`, what is at `to` takes the bias's place; plus arena[plus + t], and clipped at zero if `relu`.
    """

    @intrinsic
    def rows(
        _: Any, arena: Any, source: Any, weights: Any, bounds: Any, to: Any, plus: Any, bias: Any, flags: Any
    ) -> Any:
        int64 = types.int64
        signature = types.void(arena, int64, weights, bounds, int64, int64, types.float32, flags)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            base, kinds = code.data(0), signature.args[2].types
            offsets, values, at = code.unpacked(args[2])
            weights = code.data_of(kinds[0], offsets), code.at(code.data_of(kinds[1], values), at)
            source, bounds = code.at(base, args[1]), code.unpacked(args[3])
            targets, others = ([code.at(base, args[n], t * width) for t in range(TILE)] for n in (4, 5))
            has_sums, has_plus, relu = code.unpacked(args[7])
            nothing = [code.zero()] * TILE
            beside = [
                _moved(code, _products(code, source, weights, bounds[n : n + 2], nothing), across, SIDES[n])
                for n in (0, 1)
            ]
            first = code.loaded_if(has_sums, targets, code.splat(args[6]))
            first = [code.added(each) for each in zip(first, *beside, strict=True)]
            sums = code.added_if(has_plus, _products(code, source, weights, bounds[2:], first), others)
            for value, target in zip(code.clipped_if(relu, sums), targets, strict=True):
                code.store(value, target)
            return context.get_dummy_value()

        return signature, codegen

    return rows


def _products(code: Code, source: Any, weights: tuple[Any, Any], bounds: Any, first: list[Any]) -> list[Any]:
    """Vectors, plus the products of some weights with the vectors that their offsets point to."""
    offsets, values = weights

    def body(j: Any, sums: list[Any]) -> list[Any]:
        offset = code.builder.sext(code.builder.load(code.at(offsets, j)), I64)
        weight = code.splat(code.builder.load(code.at(values, j)))
        loaded = (code.load(code.at(source, offset, t * code.width)) for t in range(TILE))
        return [code.fma(weight, each, total) for each, total in zip(loaded, sums, strict=True)]

    low, high = bounds
    return code.loop(low, high, 1, first, body)


def _moved(code: Code, sums: list[Any], across: int, side: int) -> list[Any]:
    """Each row's sums over a side's inputs, by one pixel to where they belong; zeros come in."""
    zero, width = code.zero(), code.width
    found = []
    for begin in range(0, TILE, across):
        row = [zero, *sums[begin : begin + across], zero]
        for place in range(1, across + 1):
            if side < 0:
                found.append(code.shuffle(row[place - 1], row[place], list(range(width - 1, 2 * width - 1))))
            else:
                found.append(code.shuffle(row[place], row[place + 1], list(range(1, width + 1))))
    return found
