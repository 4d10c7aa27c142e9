"""The innermost loops, written in vector instructions (LLVM's, through numba): `LANES` numbers at a time.

A *tile* is eight vectors: `A` stretches of `B` vectors that lie side by side, A · B = 8. Its eight sums stay in
registers while the kept weights of one output go by: each is broadcast, and multiplied with the eight vectors of the
input that its offset points to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import FLOAT, I32, I64, LANES, Code

TILE = 8
"""Vectors in a tile: as many sums as it takes to keep two multiply-adds a cycle going, and registers are left."""

LINE = 16
"""Numbers in a line of the cache."""

WAYS = 4
"""Vectors that a loop takes at a time, so that its sums do not wait for each other."""

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


@intrinsic
def copy_vector(_: Any, target: Any, to: Any, source: Any, begin: Any) -> Any:
    """One vector: target[to] = source[begin]."""
    signature = types.void(target, types.int64, source, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        code.store(code.load(code.at(code.data(2), args[3])), code.at(code.data(0), args[1]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def copy_row(_: Any, target: Any, to: Any, source: Any, begin: Any, count: Any, ahead: Any) -> Any:
    """So many vectors: target[to:] = source[begin:]; what lies `ahead` of them in the source is read soon."""
    int64 = types.int64
    signature = types.void(target, int64, source, int64, int64, int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        target, source = code.at(code.data(0), args[1]), code.at(code.data(2), args[3])
        soon = code.at(source, args[5])

        def some(several: int) -> Callable[[Any, list[Any]], list[Any]]:
            def body(k: Any, _: list[Any]) -> list[Any]:
                for place in range(0, several * LANES, LINE):
                    code.prefetch(code.at(soon, k, place))
                for place in range(0, several * LANES, LANES):
                    code.store(code.load(code.at(source, k, place)), code.at(target, k, place))
                return []

            return body

        count = builder.mul(args[4], I64(LANES))
        most = builder.and_(count, I64(-WAYS * LANES))
        code.loop(I64(0), most, WAYS * LANES, [], some(WAYS))
        code.loop(most, count, LANES, [], some(1))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch_lines(_: Any, source: Any, begin: Any, count: Any) -> Any:
    """So many lines of the cache, from source[begin] on, are read soon."""
    signature = types.void(source, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        first = code.at(code.data(0), args[1])

        def body(k: Any, _: list[Any]) -> list[Any]:
            code.prefetch(code.at(first, k))
            return []

        code.loop(I64(0), builder.mul(args[2], I64(LINE)), LINE, [], body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def clear_vector(_: Any, target: Any, to: Any) -> Any:
    """One vector of zeros: target[to] = 0."""
    signature = types.void(target, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        code.store(code.zero(), code.at(code.data(0), args[1]))
        return context.get_dummy_value()

    return signature, codegen


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


Body = Callable[["Code", Any, list[Any]], tuple[Any, list[Any]]]
"""(code, vectors of a, b and c, scalars) -> the vector for the output or None, and vectors to add up."""


def make_loop(body: Body, width: int = LANES) -> Any:
    """A loop over arrays of the same layout, a vector at a time.

    loop(a, b, c, out, base, count, s0, s1, s2, s3, s4, stream): out = body of the vectors at base to base + count;
    two sums are returned. Arrays that a body does not use may be any.
    """

    @intrinsic
    def loop(
        _: Any, a: Any, b: Any, c: Any, out: Any, base: Any, count: Any, s0: Any, s1: Any, s2: Any, s3: Any, s4: Any,
        stream: Any,
    ) -> Any:  # fmt: skip
        scalars = [types.float32] * 5
        pair = types.UniTuple(types.float32, 2)  # type: ignore[no-untyped-call]
        signature = pair(a, b, c, out, types.int64, types.int64, *scalars, types.boolean)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            arrays, base, count = [code.data(n) for n in range(4)], args[4], args[5]
            numbers, zero = [code.splat(each) for each in args[6:11]], code.zero()

            def some(several: int) -> Callable[[Any, list[Any]], list[Any]]:
                """So many vectors at a time, each with sums of its own."""

                def inside(k: Any, sums: list[Any]) -> list[Any]:
                    places = [builder.add(builder.add(base, k), I64(way * width)) for way in range(several)]
                    found = [body(code, _Lazy(code, arrays, place), numbers) for place in places]
                    if found[0][0] is not None:
                        targets = [code.at(arrays[3], place) for place in places]
                        code.store_all([value for value, _ in found], targets, args[11])
                    new = [each for _, addends in found for each in (*addends, *[None] * (2 - len(addends)))]
                    return [
                        old if each is None else builder.fadd(old, each) for old, each in zip(sums, new, strict=True)
                    ]

                return inside

            most = builder.and_(count, I64(-WAYS * width))
            apart = code.loop(I64(0), most, WAYS * width, [zero] * (2 * WAYS), some(WAYS))
            sums = [code.added(apart[number::2]) for number in range(2)]
            ends = code.loop(most, count, width, sums, some(1))
            four = code.four_sums([*ends, zero, zero])
            found = [builder.extract_element(four, I32(n)) for n in range(2)]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return loop


class _Lazy:
    """The vectors of the arrays at a place, loaded when they are asked for."""

    def __init__(self, code: Code, arrays: list[Any], place: Any) -> None:
        self._code, self._arrays, self._place = code, arrays, place
        self._loaded: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Any:
        if number not in self._loaded:
            self._loaded[number] = self._code.load(self._code.at(self._arrays[number], self._place))
        return self._loaded[number]


def _deviations(code: Code, arrays: Any, s: list[Any]) -> tuple[Any, list[Any]]:
    """Sums of a - s0, and of its squares."""
    value = code.builder.fsub(arrays[0], s[0])
    return None, [value, code.builder.fmul(value, value)]


def _scaled(plus: bool, relu: bool) -> Body:
    """Out = a · s0 + s1 (+ b), clipped at zero or not."""

    def body(code: Code, arrays: Any, s: list[Any]) -> tuple[Any, list[Any]]:
        value = code.fma(arrays[0], s[0], s[1])
        value = code.builder.fadd(value, arrays[1]) if plus else value
        return (code.positive(value, value) if relu else value), []

    return body


def _slope(code: Code, arrays: Any, s: list[Any], clip: str) -> Any:
    """The gradient a before a clip of b · s0 + s1 or of c."""
    if clip == "input":
        return code.positive(code.fma(arrays[1], s[0], s[1]), arrays[0])
    return code.positive(arrays[2], arrays[0]) if clip == "output" else arrays[0]


def _slope_sums(clip: str) -> Body:
    """Sums of the gradient and of its product with b - s2; out = the gradient, if it was clipped by c."""

    def body(code: Code, arrays: Any, s: list[Any]) -> tuple[Any, list[Any]]:
        slope = _slope(code, arrays, s, clip)
        product = code.builder.fmul(slope, code.builder.fsub(arrays[1], s[2]))
        return (slope if clip == "output" else None), [slope, product]

    return body


def _slope_apply(clip: str) -> Body:
    """Out = s0 · (gradient - s3 - (b - s2) · s4)."""

    def body(code: Code, arrays: Any, s: list[Any]) -> tuple[Any, list[Any]]:
        builder = code.builder
        slope = builder.fsub(_slope(code, arrays, s, clip), s[3])
        through = builder.fmul(builder.fsub(arrays[1], s[2]), s[4])
        return builder.fmul(s[0], builder.fsub(slope, through)), []

    return body


def _clipped_slope(clip: str) -> Body:
    """Out = the gradient before the clip; its sum."""

    def body(code: Code, arrays: Any, s: list[Any]) -> tuple[Any, list[Any]]:
        slope = _slope(code, arrays, s, clip)
        return (slope if clip else None), [slope]

    return body


deviations = make_loop(_deviations)
scale, scale_relu, scale_plus, scale_plus_relu = (
    make_loop(_scaled(plus, relu)) for plus in (False, True) for relu in (False, True)
)
slope_sums, slope_sums_input, slope_sums_output = (make_loop(_slope_sums(clip)) for clip in ("", "input", "output"))
slope_apply, slope_apply_input = (make_loop(_slope_apply(clip)) for clip in ("", "input"))
sum_slope, clip_slope = (make_loop(_clipped_slope(clip)) for clip in ("", "output"))


def _larger(code: Code, old: Any, new: Any) -> Any:
    """The larger ones of two vectors; what is no number wins."""
    larger = code.builder.select(code.builder.fcmp_ordered("<=", new, old), old, new)
    return code.builder.select(code.builder.fcmp_unordered("uno", old, old), old, larger)


@intrinsic
def halve_vectors(_: Any, target: Any, to: Any, source: Any, above: Any, below: Any) -> Any:
    """A vector of the largest numbers of windows of 2×2, from two vectors of each of two rows."""
    signature = types.void(target, types.int64, source, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        found = []
        for begin in args[3:5]:
            row = code.at(code.data(2), begin)
            vectors = code.load(row), code.load(code.at(row, LANES))
            found += [code.shuffle(*vectors, list(range(first, 2 * LANES, 2))) for first in (0, 1)]
        largest = _larger(code, _larger(code, *found[:2]), _larger(code, *found[2:]))
        code.store(largest, code.at(code.data(0), args[1]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def every_other(_: Any, target: Any, to: Any, source: Any, begin: Any) -> Any:
    """A vector of every other number: target[to:] = source[begin::2]."""
    signature = types.void(target, types.int64, source, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        first = code.at(code.data(2), args[3])
        vectors = code.load(first), code.load(code.at(first, LANES))
        code.store(code.shuffle(*vectors, list(range(0, 2 * LANES, 2))), code.at(code.data(0), args[1]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def max_vector(_: Any, target: Any, to: Any, source: Any, begin: Any) -> Any:
    """The larger ones of target[to] and source[begin], into target; what is no number wins."""
    signature = types.void(target, types.int64, source, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        pointer = code.at(code.data(0), args[1])
        old, new = code.load(pointer), code.load(code.at(code.data(2), args[3]))
        code.store(_larger(code, old, new), pointer)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def max_of_four(_: Any, target: Any, to: Any, source: Any, above: Any, below: Any, stream: Any) -> Any:
    """The larger ones of two vectors side by side in each of two rows: target[to] = ..., past the caches or not."""
    signature = types.void(target, types.int64, source, types.int64, types.int64, types.boolean)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        largest, *others = (code.load(pointer) for pointer in _four(code, code.data(2), args[3], args[4]))
        for each in others:
            largest = _larger(code, largest, each)
        code.store_all([largest], [code.at(code.data(0), args[1])], args[5])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def route_to_four(
    _: Any, slopes: Any, best: Any, here: Any, source: Any, above: Any, below: Any, target: Any, stream: Any
) -> Any:
    """A gradient goes to the first of four vectors that equals the largest one (or is no number), zero to the others.

    The vectors are those of `max_of_four`; slopes and best have the gradient and the largest at `here`.
    """
    int64 = types.int64
    signature = types.void(slopes, best, int64, source, int64, int64, target, types.boolean)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        slope, largest = code.load(code.at(code.data(0), args[2])), code.load(code.at(code.data(1), args[2]))
        zero = code.zero()
        found = []
        for pointer in _four(code, code.data(3), args[4], args[5]):
            equal = builder.fcmp_unordered("==", code.load(pointer), largest)
            found.append(builder.select(equal, slope, zero))
            slope = builder.select(equal, zero, slope)
        code.store_all(found, _four(code, code.data(6), args[4], args[5]), args[7])
        return context.get_dummy_value()

    return signature, codegen


def _four(code: Code, array: Any, above: Any, below: Any) -> list[Any]:
    """The addresses of two vectors in each of two rows."""
    return [code.at(array, begin, place) for begin in (above, below) for place in (0, LANES)]


@intrinsic
def route_vector(_: Any, slopes: Any, at: Any, best: Any, here: Any, source: Any, place: Any, target: Any) -> Any:
    """A gradient goes to where the largest value came from.

    target[place] += slopes[at] where source[place] equals best[here] (or is no number), and slopes[at] is zero there
    from then on.
    """
    signature = types.void(slopes, types.int64, best, types.int64, source, types.int64, target)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        left, into = code.at(code.data(0), args[1]), code.at(code.data(6), args[5])
        slope, largest = code.load(left), code.load(code.at(code.data(2), args[3]))
        zero = code.zero()
        equal = builder.fcmp_unordered("==", code.load(code.at(code.data(4), args[5])), largest)
        code.store(builder.fadd(code.load(into), builder.select(equal, slope, zero)), into)
        code.store(builder.select(equal, zero, slope), left)
        return context.get_dummy_value()

    return signature, codegen
