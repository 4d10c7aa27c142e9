"""Tiles of the way back: the gradients of a layer's input and of its weights from one reading of the slope.

The slope is the gradient of the layer's output. For a channel of the input and a tile of its pixels, eight sums and
the tile's eight inputs stay in registers while the kept weights of the channel go by. Each vector of the slope is
loaded once: times the weight it goes to the input's gradient, times the input to the weight's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import I64, LANES, Code
from driveprune.sparse.tile import SPARE, counted, places, stepped
from driveprune.sparse.vector import CLIPPED, COPIED

TOTAL_VECTORS = 2
"""Vectors that tell what goes back through a channel's moments: the sums of its gradient, and of its products with
the differences from the mean."""


def make_both(stretches: int, run: int, width: int = LANES) -> Any:
    """Both gradients of one channel of the input, from one tile.

    both(slope, offsets, values, bounds, inward, outward, counted, place, out, base, step, plus, has_plus, stream, x,
    source, sums, end):

    out[t] = (plus[t] +) the sum over j in [low, high) of values[j] · slope[offsets[j] + where t is], for each vector
    t of the tile, and sums[j] += the products of x[t] and slope[offsets[j] + where t is]. The slope's places are
    inward[place + a] + b vectors; those of out, plus and x are base + outward[place + a] + b steps. Bounds and
    `counted` are those of `make_products`. The source (kind, scale, shift) is what is made of x before.

    The end is (clip, has_totals, before, mean, totals, at): if `clip`, out is zero where x is; if it has totals, the
    sums of out and of out · (before - mean) are added to the vectors totals[at:].
    """

    @intrinsic
    def both(
        _: Any, slope: Any, offsets: Any, values: Any, bounds: Any, inward: Any, outward: Any, counts: Any,
        place: Any, out: Any, base: Any, step: Any, plus: Any, has_plus: Any, stream: Any, x: Any, source: Any,
        sums: Any, end: Any,
    ) -> Any:  # fmt: skip
        int64, boolean = types.int64, types.boolean
        signature = types.void(
            slope, offsets, values, bounds, inward, outward, counts, int64, out, int64, int64, plus, boolean, boolean,
            x, source, sums, end,
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            place, base, step, has_plus, stream = (args[n] for n in (7, 9, 10, 12, 13))
            counts = code.at(code.data(6), place)

            def pointers(array: Any) -> list[Any]:
                starts = places(code, code.at(array, base), code.data(5), place, stretches)
                return stepped(code, starts, step, run)

            def inputs() -> list[Any]:
                return _made(code, [code.load(each) for each in pointers(code.data(14))], code.unpacked(args[15]))

            found = _products(
                code, (code.data(1), code.data(2), code.data(16)), code.unpacked(args[3]),
                places(code, code.data(0), code.data(4), place, stretches), run,
                counted(code, inputs(), counts, stretches),
            )  # fmt: skip
            found = code.added_if(has_plus, found, pointers(code.data(11)))
            clip, has_totals, before, mean, totals, at = code.unpacked(args[17])
            found = code.either(
                clip, found, lambda: [code.positive(x, each) for x, each in zip(inputs(), found, strict=True)]
            )
            code.store_all(found, pointers(code.data(8)), stream)
            kinds = signature.args[17]
            with builder.if_then(has_totals):
                apart = [
                    builder.fsub(code.load(each), code.splat(mean))
                    for each in pointers(code.data_of(kinds[2], before))
                ]
                _add_totals(
                    code, counted(code, found, counts, stretches), apart, code.at(code.data_of(kinds[4], totals), at)
                )
            return context.get_dummy_value()

        return signature, codegen

    return both


def _made(code: Code, loaded: list[Any], source: Any) -> list[Any]:
    """The inputs of a layer: what was loaded, or its normalisation."""
    kind, scale, shift = source
    is_kind = code.builder.icmp_signed

    def scaled() -> list[Any]:
        return [code.fma(each, code.splat(scale), code.splat(shift)) for each in loaded]

    made = code.either(is_kind("!=", kind, I64(COPIED)), loaded, scaled)
    return code.clipped_if(is_kind("==", kind, I64(CLIPPED)), made)


def _products(code: Code, weights: Any, bounds: Any, sources: list[Any], run: int, inputs: list[Any]) -> list[Any]:
    """The input's gradient of a tile; the weights' goes to their sums, four at a time."""
    builder = code.builder
    low, middle, high = bounds

    def some(several: int, taps: int) -> Callable[[Any, list[Any]], list[Any]]:
        return lambda j, found: _add_products(code, weights, sources, run, inputs, j, several, taps, found)

    found = [code.zero()] * len(inputs)
    for begin, end, taps in ((low, middle, 2), (middle, high, 1)):
        rest = builder.and_(builder.sub(end, begin), I64(SPARE))
        whole = builder.sub(end, rest)
        found = code.loop(begin, whole, 4, found, some(4, taps))
        for several in range(taps, 4, taps):
            first = builder.select(builder.icmp_signed("==", rest, I64(several)), whole, end)
            found = code.loop(first, end, 4, found, some(several, taps))
    return found


def _add_products(
    code: Code, weights: Any, sources: list[Any], run: int, inputs: list[Any], j: Any, several: int, taps: int,
    found: list[Any],
) -> list[Any]:  # fmt: skip
    """What `several` weights, at most four, add to both gradients from the j-th on; `taps` lie side by side."""
    builder = code.builder
    offsets, values, sums = weights
    begins = [builder.sext(builder.load(code.at(offsets, j, number)), I64) for number in range(0, several, taps)]
    factors = [code.splat(builder.load(code.at(values, j, number))) for number in range(several)]
    found, own = list(found), [code.zero()] * 4
    for stretch, source in enumerate(sources):
        for place in range(run + taps - 1):  # each vector is loaded once
            for number, offset in enumerate(begins):
                loaded = code.load(code.at(source, offset, place * code.width))
                for tap in range(taps):
                    if 0 <= place - tap < run:
                        t, weight = stretch * run + place - tap, number * taps + tap
                        found[t] = code.fma(factors[weight], loaded, found[t])
                        own[weight] = code.fma(inputs[t], loaded, own[weight])
    code.add_four_sums(own, code.at(sums, j))
    return found


def _add_totals(code: Code, found: list[Any], apart: list[Any], totals: Any) -> None:
    """What the vectors of a tile add to the totals of their channel at an address."""
    products = [code.builder.fmul(a, b) for a, b in zip(found, apart, strict=True)]
    for number, vectors in enumerate((found, products)):
        target = code.at(totals, number * code.width)
        code.store(code.builder.fadd(code.load(target), code.added(vectors)), target)
