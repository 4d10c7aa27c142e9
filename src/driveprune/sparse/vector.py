"""Single vectors and rows of them: copies, zeros, largest values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import I64, LANES, LINE, WAYS, Code

COPIED, SCALED, CLIPPED, SLOPE = range(4)
"""What is made of rows on the way to a layer's scratch: nothing; a normalisation, without a ReLU or with it; or, of a
gradient after a normalisation, that before it."""


@intrinsic
def copy_vector(_: Any, target: Any, to: Any, source: Any, begin: Any) -> Any:
    """One vector: target[to] = source[begin]."""
    signature = types.void(target, types.int64, source, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        code.store(code.load(code.at(code.data(2), args[3])), code.at(code.data(0), args[1]))
        return context.get_dummy_value()

    return signature, codegen


def _each(code: Code, count: Any, soon: Any, body: Callable[[Any], None]) -> None:
    """`body` of the place of each of so many vectors; what lies at the same places from `soon` on is read soon."""

    def some(several: int) -> Callable[[Any, list[Any]], list[Any]]:
        def bodies(k: Any, _: list[Any]) -> list[Any]:
            for place in range(0, several * LANES, LINE):
                code.prefetch(code.at(soon, k, place))
            for place in range(0, several * LANES, LANES):
                body(code.builder.add(k, I64(place)))
            return []

        return bodies

    numbers = code.builder.mul(count, I64(LANES))
    most = code.builder.and_(numbers, I64(-WAYS * LANES))
    code.loop(I64(0), most, WAYS * LANES, [], some(WAYS))
    code.loop(most, numbers, LANES, [], some(1))


@intrinsic
def copy_row(_: Any, target: Any, to: Any, source: Any, begin: Any, count: Any, ahead: Any) -> Any:
    """So many vectors: target[to:] = source[begin:]; what lies `ahead` of them in the source is read soon."""
    int64 = types.int64
    signature = types.void(target, int64, source, int64, int64, int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        target, source = code.at(code.data(0), args[1]), code.at(code.data(2), args[3])

        def body(k: Any) -> None:
            code.store(code.load(code.at(source, k)), code.at(target, k))

        _each(code, args[4], code.at(source, args[5]), body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def scale_row(
    _: Any, target: Any, to: Any, source: Any, begin: Any, count: Any, ahead: Any, scale: Any, shift: Any, relu: Any
) -> Any:
    """`copy_row` of source · scale + shift, clipped at zero if `relu`."""
    int64, float32 = types.int64, types.float32
    signature = types.void(target, int64, source, int64, int64, int64, float32, float32, types.boolean)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        target, source = code.at(code.data(0), args[1]), code.at(code.data(2), args[3])
        scale, shift = code.splat(args[6]), code.splat(args[7])

        def body(k: Any) -> None:
            value = code.fma(code.load(code.at(source, k)), scale, shift)
            code.store(builder.select(args[8], code.positive(value, value), value), code.at(target, k))

        _each(code, args[4], code.at(source, args[5]), body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def slope_row(
    _: Any, target: Any, to: Any, source: Any, begin: Any, count: Any, ahead: Any, other: Any, scale: Any, mean: Any,
    first: Any, second: Any,
) -> Any:  # fmt: skip
    """`copy_row` of scale · (source - first - (other - mean) · second): a gradient before a normalisation."""
    int64, float32 = types.int64, types.float32
    signature = types.void(target, int64, source, int64, int64, int64, other, float32, float32, float32, float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        target, source, other = code.at(code.data(0), args[1]), *(code.at(code.data(n), args[3]) for n in (2, 6))
        scale, mean, first, second = map(code.splat, args[7:])
        ahead = code.at(other, args[5])

        def body(k: Any) -> None:
            code.prefetch(code.at(ahead, k))
            slope = builder.fsub(code.load(code.at(source, k)), first)
            through = builder.fmul(builder.fsub(code.load(code.at(other, k)), mean), second)
            code.store(builder.fmul(scale, builder.fsub(slope, through)), code.at(target, k))

        _each(code, args[4], code.at(source, args[5]), body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def scale_vector(_: Any, target: Any, to: Any, source: Any, begin: Any, scale: Any, shift: Any, relu: Any) -> Any:
    """One vector: target[to] = source[begin] · scale + shift, clipped at zero if `relu`."""
    int64, float32 = types.int64, types.float32
    signature = types.void(target, int64, source, int64, float32, float32, types.boolean)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        scale, shift = code.splat(args[4]), code.splat(args[5])
        value = code.fma(code.load(code.at(code.data(2), args[3])), scale, shift)
        value = builder.select(args[6], code.positive(value, value), value)
        code.store(value, code.at(code.data(0), args[1]))
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


def larger(code: Code, old: Any, new: Any) -> Any:
    """The larger ones of two vectors; what is no number wins."""
    larger = code.builder.select(code.builder.fcmp_ordered("<=", new, old), old, new)
    return code.builder.select(code.builder.fcmp_unordered("uno", old, old), old, larger)


def make_halve(count: int) -> Any:
    """The largest numbers of so many windows of 2×2 side by side.

    halve(target, to, source, above, below): target[to:] = those of the rows source[above:] and source[below:].
    """

    @intrinsic
    def halve(_: Any, target: Any, to: Any, source: Any, above: Any, below: Any) -> Any:
        signature = types.void(target, types.int64, source, types.int64, types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, count)
            columns = [_every_other(code, code.at(code.data(2), begin)) for begin in args[3:5]]
            largest = larger(code, *(larger(code, *pair) for pair in columns))
            code.store(largest, code.at(code.data(0), args[1]))
            return context.get_dummy_value()

        return signature, codegen

    return halve


def make_deal(count: int) -> Any:
    """So many numbers at even and at odd places of a row.

    deal(target, evens, odds, source, begin): target[odds:] = source[begin + 1::2], then target[evens:] =
    source[begin::2]; so only those at even places are left if both places are the same.
    """

    @intrinsic
    def deal(_: Any, target: Any, evens: Any, odds: Any, source: Any, begin: Any) -> Any:
        signature = types.void(target, types.int64, types.int64, source, types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, count)
            both = _every_other(code, code.at(code.data(3), args[4]))
            for number in (1, 0):
                code.store(both[number], code.at(code.data(0), args[1 + number]))
            return context.get_dummy_value()

        return signature, codegen

    return deal


def _every_other(code: Code, pointer: Any) -> list[Any]:
    """Vectors of the numbers at even and at odd places, of two vectors side by side."""
    vectors = code.load(pointer), code.load(code.at(pointer, code.width))
    return [code.shuffle(*vectors, list(range(first, 2 * code.width, 2))) for first in (0, 1)]


@intrinsic
def transpose(_: Any, target: Any, to: Any, source: Any, begin: Any, apart: Any) -> Any:
    """As many vectors as one has lanes: target[to + k · LANES + r] = source[begin + r · apart + k]."""
    int64 = types.int64
    signature = types.void(target, int64, source, int64, int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args, LANES)
        origin, places = code.at(code.data(2), args[3]), [builder.mul(args[4], I64(r)) for r in range(LANES)]
        rows = [code.load(code.at(origin, place)) for place in places]
        half = 1
        while half < LANES:  # squares of so many lanes change their places
            low = [lane + LANES - half if lane & half else lane for lane in range(LANES)]
            high = [lane + LANES if lane & half else lane + half for lane in range(LANES)]
            for first in (r for r in range(LANES) if not r & half):
                pair = rows[first], rows[first + half]
                rows[first], rows[first + half] = code.shuffle(*pair, low), code.shuffle(*pair, high)
            half *= 2
        for k, row in enumerate(rows):
            code.store(row, code.at(code.data(0), args[1], k * LANES))
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
        code.store(larger(code, old, new), pointer)
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
            largest = larger(code, largest, each)
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
