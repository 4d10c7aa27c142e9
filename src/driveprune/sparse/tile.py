"""The innermost loops of convolutions, in vector instructions: `LANES` numbers at a time.

A *tile* is eight vectors: `A` stretches of `B` vectors that lie side by side, A · B = 8. Its eight sums stay in
registers while the kept weights of one output go by: each is broadcast, and multiplied with the eight vectors of the
input that its offset points to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import FLOAT, I64, LANES, Code
from driveprune.sparse.vector import larger

TILE = 8
"""Vectors in a tile: as many sums as it takes to keep two multiply-adds a cycle going, and registers are left."""

SPARE = 3
"""Numbers after the last sum of kept weights that may be written, too."""


def make_tile(stretches: int, run: int, width: int = LANES, ways: int = 1) -> Any:
    """The sums of one output over one tile.

    tile(x, offsets, values, bounds, inward, outward, place, out, base, step, bias, plus, has_plus, relu, stream):

    out[t] = bias (+ plus[t]) + sum over j in [low, high) of values[j] · x[offsets[j] + where t is], clipped at zero
    if `relu`, for each vector t of the tile; x's places are inward[place + a] + b vectors, out's and plus's are base
    + outward[place + a] + b steps. The bounds are (low, middle, high): weights before the middle come in twos, of
    which the second's offset is a vector further; or, in a small tile, as many at a time as there are `ways`,
    anywhere, so that its few sums do not wait for each other.
    """

    @intrinsic
    def tile(
        _: Any, x: Any, offsets: Any, values: Any, bounds: Any, inward: Any, outward: Any, place: Any, out: Any,
        base: Any, step: Any, bias: Any, plus: Any, has_plus: Any, relu: Any, stream: Any,
    ) -> Any:  # fmt: skip
        int64, boolean = types.int64, types.boolean
        signature = types.void(
            x, offsets, values, bounds, inward, outward, int64, out, int64, int64, types.float32, plus, boolean,
            boolean, boolean,
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            place, base, step, bias, has_plus, relu = (args[n] for n in (6, 8, 9, 10, 12, 13))
            sources = places(code, code.data(0), code.data(4), place, stretches)
            results = stepped(
                code, places(code, code.at(code.data(7), base), code.data(5), place, stretches), step, run
            )
            others = stepped(
                code, places(code, code.at(code.data(11), base), code.data(5), place, stretches), step, run
            )
            first = code.added_if(has_plus, [code.splat(bias)] * len(results), others)
            sums = products_added(code, code.data(1), code.data(2), args[3], sources, run, first, ways)
            clipped = code.clipped_if(relu, sums)
            code.store_all(clipped, results, args[14])
            return context.get_dummy_value()

        return signature, codegen

    return tile


def places(code: Code, origin: Any, table: Any, place: Any, stretches: int) -> list[Any]:
    """The addresses at which the stretches of a tile begin."""
    return [code.at(origin, code.builder.load(code.at(table, place, a))) for a in range(stretches)]


def stepped(code: Code, starts: list[Any], step: Any, run: int) -> list[Any]:
    """The addresses of all vectors of a tile."""
    found = []
    for start in starts:
        pointer = start
        for _ in range(run):
            found.append(pointer)
            pointer = code.at(pointer, step)
    return found


def products_added(
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


def make_sums(stretches: int, run: int, width: int = LANES, ways: int = 1) -> Any:
    """Some of the products of one output over one tile are added to its sums, which lie side by side.

    sums(x, begin, has_sums, bias, offsets, values, bounds, inward, place): x[begin + t] += the products of weights as
    in `make_tile`, for each vector t of the tile; or the bias plus them, if there are no sums yet.
    """

    @intrinsic
    def sums(
        _: Any, x: Any, begin: Any, has_sums: Any, bias: Any, offsets: Any, values: Any, bounds: Any, inward: Any,
        place: Any,
    ) -> Any:  # fmt: skip
        int64 = types.int64
        signature = types.void(
            x, int64, types.boolean, types.float32, offsets, values, bounds, inward, int64
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            sources = places(code, code.data(0), code.data(7), args[8], stretches)
            targets = [code.at(code.data(0), args[1], t * width) for t in range(stretches * run)]
            first = code.loaded_if(args[2], targets, code.splat(args[3]))
            found = products_added(code, code.data(4), code.data(5), args[6], sources, run, first, ways)
            for value, target in zip(found, targets, strict=True):
                code.store(value, target)
            return context.get_dummy_value()

        return signature, codegen

    return sums


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
            sources = places(code, code.data(0), code.data(5), place, stretches)
            results, others = (
                stepped(code, places(code, code.at(code.data(n), base), code.data(6), place, stretches), step, run)
                for n in (8, 11)
            )
            first = [code.load(code.at(code.data(0), begin, t * width)) for t in range(len(results))]
            values = products_added(code, code.data(2), code.data(3), args[4], sources, run, first, ways)
            ends = code.added_if(has_plus, values, others)
            clipped = code.clipped_if(relu, ends)
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
            sources = places(code, code.data(0), code.data(7), place, 2)
            start = places(code, code.at(code.data(10), base), code.data(8), place, 1)
            before = [code.at(code.data(0), begin, t * width) for t in range(TILE)]
            first = code.added_if(has_sums, [code.splat(bias)] * TILE, before)
            sums = products_added(code, code.data(4), code.data(5), args[6], sources, 4, first, 1)
            best = []
            for left in (0, 2):
                rows = [larger(code, *sums[row * 4 + left : row * 4 + left + 2]) for row in range(2)]
                best.append(larger(code, *rows))
            clipped = code.clipped_if(relu, best)
            code.store_all(clipped, stepped(code, start, step, 2), args[14])
            return context.get_dummy_value()

        return signature, codegen

    return windows


def counted(code: Code, vectors: list[Any], counts: Any, stretches: int) -> list[Any]:
    """The vectors of a tile, or zeros for those of its last stretches that do not count."""
    if stretches == 1:
        return vectors
    builder, run = code.builder, len(vectors) // stretches
    last = builder.load(code.at(counts, stretches - 1))

    def times_counts() -> list[Any]:
        factors = [code.splat(builder.load(code.at(counts, a))) for a in range(stretches)]
        return [builder.fmul(vector, factors[t // run]) for t, vector in enumerate(vectors)]

    return code.either(builder.fcmp_ordered("==", last, FLOAT(0.0)), vectors, times_counts)


def make_products(stretches: int, run: int, width: int = LANES) -> Any:
    """The gradient of the kept weights of one output, from one tile.

    products(x, offsets, bounds, inward, outward, counted, place, slope, base, step, sums): sums[j] += the products of
    x[offsets[j] + where t is] and slope[where t is], over the lanes of all vectors t of the tile that count, for j in
    [low, high), four at a time. The bounds are (low, middle, high) as in `make_tile`, of which twos lie side by side.
    Zero is added to so many sums after them as make four: `SPARE` at most.
    """

    @intrinsic
    def products(
        _: Any, x: Any, offsets: Any, bounds: Any, inward: Any, outward: Any, counts: Any, place: Any, slope: Any,
        base: Any, step: Any, sums: Any,
    ) -> Any:  # fmt: skip
        int64 = types.int64
        signature = types.void(x, offsets, bounds, inward, outward, counts, int64, slope, int64, int64, sums)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            place, base, step = (args[n] for n in (6, 8, 9))
            sources = places(code, code.data(0), code.data(3), place, stretches)
            starts = places(code, code.at(code.data(7), base), code.data(4), place, stretches)
            slopes = [code.load(pointer) for pointer in stepped(code, starts, step, run)]
            slopes = counted(code, slopes, code.at(code.data(5), place), stretches)
            offsets, sums = code.data(1), code.data(10)

            def some(several: int, taps: int) -> Callable[[Any, list[Any]], list[Any]]:
                def body(j: Any, _: list[Any]) -> list[Any]:
                    _add_sums(code, offsets, sources, run, slopes, j, several, taps, sums)
                    return []

                return body

            low, middle, high = code.unpacked(args[2])
            for begin, end, taps in ((low, middle, 2), (middle, high, 1)):
                rest = builder.and_(builder.sub(end, begin), I64(SPARE))
                whole = builder.sub(end, rest)
                code.loop(begin, whole, 4, [], some(4, taps))
                for several in range(taps, 4, taps):
                    first = builder.select(builder.icmp_signed("==", rest, I64(several)), whole, end)
                    code.loop(first, end, 4, [], some(several, taps))
            return context.get_dummy_value()

        return signature, codegen

    return products


def _add_sums(
    code: Code, offsets: Any, sources: list[Any], run: int, slopes: list[Any], j: Any, several: int, taps: int,
    sums: Any,
) -> None:  # fmt: skip
    """The products of `several` weights, at most four, from the j-th on, to their sums; `taps` lie side by side."""
    builder = code.builder
    begins = [builder.sext(builder.load(code.at(offsets, j, number)), I64) for number in range(0, several, taps)]
    found = [code.zero()] * 4
    for stretch, source in enumerate(sources):
        for place in range(run + taps - 1):  # each vector is loaded once
            for number, offset in enumerate(begins):  # sums that do not wait for each other
                loaded = code.load(code.at(source, offset, place * code.width))
                for tap in range(taps):
                    if 0 <= place - tap < run:
                        slope, weight = slopes[stretch * run + place - tap], number * taps + tap
                        found[weight] = code.fma(slope, loaded, found[weight])
    code.add_four_sums(found, code.at(sums, j))
