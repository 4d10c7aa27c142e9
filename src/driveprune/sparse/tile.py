"""The innermost loops of convolutions, in vector instructions: `LANES` numbers at a time.

A *tile* is eight vectors: `A` stretches of `B` vectors that lie side by side, A · B = 8. Its eight sums stay in
registers while the kept weights of one output go by: each is broadcast, and multiplied with the eight vectors of the
input that its offset points to.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import FLOAT, I64, LANES, Code
from driveprune.sparse.vector import larger

TILE = 8
"""Vectors in a tile: as many sums as it takes to keep two multiply-adds a cycle going, and registers are left."""

FROM_OUTPUT, FROM_BIAS, FROM_BIAS_AND_PLUS = 0, 1, 2
"""Where the sums of a tile start: what the output holds, the bias, or the bias and another tensor."""


def make_tile(stretches: int, run: int, width: int = LANES, ways: int = 1) -> Any:
    """The sums of one output over one tile.

    tile(x, offsets, values, bounds, inward, outward, place, out, base, step, start, bias, plus, relu, stream):

    out[t] = start + sum over j in [low, high) of values[j] · x[offsets[j] + where t is], for each vector t of the
    tile; x's places are inward[place + a] + b vectors, out's are base + outward[place + a] + b steps. The bounds are
    (low, middle, high): weights before the middle come in twos, of which the second's offset is a vector further; or,
    in a small tile, as many at a time as there are `ways`, anywhere, so that its few sums do not wait for each other.
    """

    @intrinsic
    def tile(
        _: Any, x: Any, offsets: Any, values: Any, bounds: Any, inward: Any, outward: Any, place: Any, out: Any,
        base: Any, step: Any, start: Any, bias: Any, plus: Any, relu: Any, stream: Any,
    ) -> Any:  # fmt: skip
        int64 = types.int64
        signature = types.void(
            x, offsets, values, bounds, inward, outward, int64, out, int64, int64, int64, types.float32, plus,
            types.boolean, types.boolean,
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            place, base, step, start, bias, relu = (args[n] for n in (6, 8, 9, 10, 11, 13))
            sources = _places(code, code.data(0), code.data(4), place, stretches)
            results = _stepped(
                code, _places(code, code.at(code.data(7), base), code.data(5), place, stretches), step, run
            )
            others = _stepped(
                code, _places(code, code.at(code.data(12), base), code.data(5), place, stretches), step, run
            )
            first = _first(code, results, others, start, code.splat(bias))
            sums = _products_added(code, code.data(1), code.data(2), args[3], sources, run, first, ways)
            clipped = [builder.select(relu, code.positive(value, value), value) for value in sums]
            code.store_all(clipped, results, args[14])
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _places(code: Code, origin: Any, table: Any, place: Any, stretches: int) -> list[Any]:
    """The addresses at which the stretches of a tile begin."""
    return [code.at(origin, code.builder.load(code.at(table, place, a))) for a in range(stretches)]


def _stepped(code: Code, starts: list[Any], step: Any, run: int) -> list[Any]:
    """The addresses of all vectors of a tile."""
    found = []
    for start in starts:
        pointer = start
        for _ in range(run):
            found.append(pointer)
            pointer = code.at(pointer, step)
    return found


def _first(code: Code, results: list[Any], others: list[Any], start: Any, bias: Any) -> list[Any]:
    """What the sums start from."""
    builder = code.builder
    blocks = [builder.append_basic_block(name) for name in ("output", "plus", "bias", "begin")]
    output, plus, only_bias, begin = blocks
    switch = builder.switch(start, only_bias)
    switch.add_case(I64(FROM_OUTPUT), output)
    switch.add_case(I64(FROM_BIAS_AND_PLUS), plus)
    builder.position_at_end(output)
    from_output = [code.load(pointer) for pointer in results]
    builder.branch(begin)
    builder.position_at_end(plus)
    from_plus = [builder.fadd(code.load(pointer), bias) for pointer in others]
    builder.branch(begin)
    builder.position_at_end(only_bias)
    builder.branch(begin)
    builder.position_at_end(begin)
    found = []
    for here, there in zip(from_output, from_plus, strict=True):
        phi = builder.phi(code.vector)
        for value, block in ((here, output), (there, plus), (bias, only_bias)):
            phi.add_incoming(value, block)
        found.append(phi)
    return found


def _products_added(
    code: Code,
    offsets: Any,
    values: Any,
    bounds: Any,
    sources: list[Any],
    run: int,
    first: list[Any],
    ways: int,
) -> list[Any]:
    """Add up the products of kept weights with the tile's inputs: several at a time, then the others."""
    low, middle, high = code.unpacked(bounds)
    if ways == 1:
        together = _loop(code, offsets, values, low, middle, sources, run, first, taps=2)
    else:
        zeros = [code.zero()] * (len(first) * (ways - 1))
        apart = _loop(code, offsets, values, low, middle, sources, run, [*first, *zeros], taps=ways, apart=True)
        together = [code.added(apart[number :: len(first)]) for number in range(len(first))]
    return _loop(code, offsets, values, middle, high, sources, run, together, taps=1)


def _loop(
    code: Code,
    offsets: Any,
    values: Any,
    low: Any,
    high: Any,
    sources: list[Any],
    run: int,
    first: list[Any],
    taps: int,
    apart: bool = False,
) -> list[Any]:
    """Add up the products of the kept weights `low` to `high`, `taps` at a time.

    Their inputs lie side by side; or anywhere and each has sums of its own, if they are `apart`.
    """
    builder = code.builder

    def body(j: Any, sums: list[Any]) -> list[Any]:
        weights = [code.splat(builder.load(code.at(values, j, tap))) for tap in range(taps)]
        new = list(sums)
        for first_tap in range(taps if apart else 1):
            offset = builder.sext(builder.load(code.at(offsets, j, first_tap)), I64)
            together = [weights[first_tap]] if apart else weights
            begin = first_tap * len(sources) * run
            for stretch, source in enumerate(sources):
                for place in range(run + len(together) - 1):  # each vector is loaded once
                    loaded = code.load(code.at(source, offset, place * code.width))
                    for tap, weight in enumerate(together):
                        number = begin + stretch * run + place - tap
                        if 0 <= place - tap < run:
                            new[number] = code.fma(weight, loaded, new[number])
        return new

    return code.loop(low, high, taps, first, body)


def make_finish(stretches: int, run: int, width: int = LANES, ways: int = 1) -> Any:
    """The last weights of one output over one tile, whose sums so far lie side by side, to where the sums belong.

    finish(x, begin, offsets, values, bounds, inward, outward, place, out, base, step, plus, has_plus, relu, stream):

    out[t] = x[begin + t] plus the products of weights as in `make_tile` (plus plus[t]), clipped at zero if `relu`,
    for each vector t of the tile.
    """

    @intrinsic
    def finish(
        _: Any, x: Any, begin: Any, offsets: Any, values: Any, bounds: Any, inward: Any, outward: Any, place: Any,
        out: Any, base: Any, step: Any, plus: Any, has_plus: Any, relu: Any, stream: Any,
    ) -> Any:  # fmt: skip
        int64, boolean = types.int64, types.boolean
        signature = types.void(
            x, int64, offsets, values, bounds, inward, outward, int64, out, int64, int64, plus, boolean, boolean,
            boolean,
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            begin, place, base, step, has_plus, relu = (args[n] for n in (1, 7, 9, 10, 12, 13))
            sources = _places(code, code.data(0), code.data(5), place, stretches)
            results, others = (
                _stepped(code, _places(code, code.at(code.data(n), base), code.data(6), place, stretches), step, run)
                for n in (8, 11)
            )
            first = [code.load(code.at(code.data(0), begin, t * width)) for t in range(len(results))]
            values = _products_added(code, code.data(2), code.data(3), args[4], sources, run, first, ways)
            ends = code.added_if(has_plus, values, others)
            clipped = [builder.select(relu, code.positive(end, end), end) for end in ends]
            code.store_all(clipped, results, args[14])
            return context.get_dummy_value()

        return signature, codegen

    return finish


def make_windows(width: int = LANES) -> Any:
    """The sums of one output over a tile of 2×4 pixels: the largest ones of its two windows of 2×2.

    windows(x, begin, has_sums, bias, offsets, values, bounds, inward, outward, place, out, base, step, relu, stream):

    the sums are the bias (plus x[begin + t], if `has_sums`) plus the products of weights as in `make_tile`; the first
    window goes to out[base + outward[place]], the other one a step further, clipped at zero if `relu`.
    """

    @intrinsic
    def windows(
        _: Any, x: Any, begin: Any, has_sums: Any, bias: Any, offsets: Any, values: Any, bounds: Any, inward: Any,
        outward: Any, place: Any, out: Any, base: Any, step: Any, relu: Any, stream: Any,
    ) -> Any:  # fmt: skip
        int64, boolean = types.int64, types.boolean
        signature = types.void(
            x, int64, boolean, types.float32, offsets, values, bounds, inward, outward, int64, out, int64, int64,
            boolean, boolean,
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            begin, has_sums, bias, place, base, step, relu = (args[n] for n in (1, 2, 3, 9, 11, 12, 13))
            sources = _places(code, code.data(0), code.data(7), place, 2)
            start = _places(code, code.at(code.data(10), base), code.data(8), place, 1)
            before = [code.at(code.data(0), begin, t * width) for t in range(TILE)]
            first = code.added_if(has_sums, [code.splat(bias)] * TILE, before)
            sums = _products_added(code, code.data(4), code.data(5), args[6], sources, 4, first, 1)
            best = []
            for left in (0, 2):
                rows = [larger(code, *sums[row * 4 + left : row * 4 + left + 2]) for row in range(2)]
                best.append(larger(code, *rows))
            clipped = [builder.select(relu, code.positive(value, value), value) for value in best]
            code.store_all(clipped, _stepped(code, start, step, 2), args[14])
            return context.get_dummy_value()

        return signature, codegen

    return windows


def make_products(stretches: int, run: int, width: int = LANES) -> Any:
    """The gradient of the kept weights of one output, from one tile.

    products(x, offsets, low, high, inward, outward, counted, place, slope, base, step, sums): sums[j] += the products
    of x[offsets[j] + where t is] and slope[where t is], over the lanes of all vectors t of the tile that count, for j
    in [low, high), four at a time: `low` and `high` are multiples of four.
    """

    @intrinsic
    def products(
        _: Any, x: Any, offsets: Any, low: Any, high: Any, inward: Any, outward: Any, counted: Any, place: Any,
        slope: Any, base: Any, step: Any, sums: Any,
    ) -> Any:  # fmt: skip
        int64 = types.int64
        signature = types.void(x, offsets, int64, int64, inward, outward, counted, int64, slope, int64, int64, sums)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            low, high, place, base, step = (args[n] for n in (2, 3, 7, 9, 10))
            sources = _places(code, code.data(0), code.data(4), place, stretches)
            starts = _places(code, code.at(code.data(8), base), code.data(5), place, stretches)
            counts = [code.splat(builder.load(code.at(code.data(6), place, a))) for a in range(stretches)]
            slopes = [
                builder.fmul(code.load(pointer), counts[number // run])
                for number, pointer in enumerate(_stepped(code, starts, step, run))
            ]
            offsets, sums = code.data(1), code.data(11)
            four = ir.VectorType(FLOAT, 4)

            def body(j: Any, _: list[Any]) -> list[Any]:
                four_offsets = [builder.sext(builder.load(code.at(offsets, j, number)), I64) for number in range(4)]
                found = [code.zero()] * 4
                for t, value in enumerate(slopes):  # one after the other: four sums that do not wait for each other
                    pointers = [code.at(sources[t // run], offset, t % run * width) for offset in four_offsets]
                    found = [
                        code.fma(value, code.load(pointer), total)
                        for pointer, total in zip(pointers, found, strict=True)
                    ]
                target = code.at(sums, j)
                code.store(builder.fadd(code.load(target, four), code.four_sums(found)), target)
                return []

            code.loop(low, high, 4, [], body)
            return context.get_dummy_value()

        return signature, codegen

    return products
