"""Loops over windows of 2×2 pixels, in vector instructions: normalisation, ReLU and max pooling at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import I32, I64, LANES, Code
from driveprune.sparse.vector import larger

Body = Callable[[Code, list[Any], Callable[[], Any], list[Any]], tuple[list[Any], list[Any]]]
"""(code, the four vectors of a window, what loads the vector that belongs to it, scalars) -> what to store: nothing,
one vector for the window or four for its pixels; and vectors to add up."""


def make_windows(body: Body, width: int = LANES) -> Any:
    """A loop over the windows of one plane, which has even numbers of rows and columns.

    windows(pixels, others, out, base, small, (rows, columns), s0, s1, s2, s3, s4, stream): out = body of the four
    vectors of each window of the plane that begins at pixels[base] and of the vector that belongs to it, of the plane
    of so many rows and columns that begins at others[small]. Out is like the first plane, or like the second one. Two
    sums are returned.
    """

    @intrinsic
    def windows(
        _: Any, pixels: Any, others: Any, out: Any, base: Any, small: Any, form: Any, s0: Any, s1: Any, s2: Any,
        s3: Any, s4: Any, stream: Any,
    ) -> Any:  # fmt: skip
        pair = types.UniTuple(types.float32, 2)  # type: ignore[no-untyped-call]
        int64, scalars = types.int64, [types.float32] * 5
        signature = pair(pixels, others, out, int64, int64, form, *scalars, types.boolean)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            (rows, columns), numbers = code.unpacked(args[5]), [code.splat(each) for each in args[6:11]]
            row = builder.mul(columns, I64(2 * width))

            def each_row(y: Any, sums: list[Any]) -> list[Any]:
                above = builder.add(args[3], builder.mul(y, builder.mul(row, I64(2))))
                begin = builder.add(args[4], builder.mul(y, builder.mul(columns, I64(width))))

                def each_window(x: Any, sums: list[Any]) -> list[Any]:
                    here = builder.add(begin, builder.mul(x, I64(width)))
                    corner = builder.add(above, builder.mul(x, I64(2 * width)))
                    places = [
                        builder.add(start, I64(k)) for start in (corner, builder.add(corner, row)) for k in (0, width)
                    ]
                    four = [code.load(code.at(code.data(0), place)) for place in places]
                    values, addends = body(code, four, lambda: code.load(code.at(code.data(1), here)), numbers)
                    if values:
                        targets = [code.at(code.data(2), each) for each in (places if len(values) > 1 else [here])]
                        code.store_all(values, targets, args[11])
                    return [builder.fadd(total, each) for total, each in zip(sums, addends, strict=True)]

                return code.loop(I64(0), columns, 1, sums, each_window)

            ends = code.loop(I64(0), rows, 1, [code.zero()] * 2, each_row)
            four = code.four_sums([*ends, code.zero(), code.zero()])
            found = [builder.extract_element(four, I32(n)) for n in range(2)]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return windows


def _scaled(code: Code, four: list[Any], s: list[Any]) -> tuple[list[Any], Any]:
    """The four vectors times s0 plus s1, and the largest of each."""
    values = [code.fma(each, s[0], s[1]) for each in four]
    best = values[0]
    for each in values[1:]:
        best = larger(code, best, each)
    return values, best


def _scale(code: Code, four: list[Any], _: Any, s: list[Any]) -> tuple[list[Any], list[Any]]:
    """For the window: the largest of pixel · s0 + s1, clipped at zero."""
    _, best = _scaled(code, four, s)
    return [code.positive(best, best)], [code.zero()] * 2


def _routed(code: Code, four: list[Any], slope: Callable[[], Any], s: list[Any]) -> tuple[list[Any], Any]:
    """The gradients of the four before `_scale`: the window's goes to the first of the largest; and the window's."""
    values, best = _scaled(code, four, s)
    clipped = left = code.positive(best, slope())
    found = []
    for value in values:
        equal = code.builder.fcmp_unordered("==", value, best)
        found.append(code.builder.select(equal, left, code.zero()))
        left = code.builder.select(equal, code.zero(), left)
    return found, clipped


def _slope_sums(code: Code, four: list[Any], slope: Callable[[], Any], s: list[Any]) -> tuple[list[Any], list[Any]]:
    """Sums of the gradients before `_scale`, and of their products with pixel - s2."""
    routed, clipped = _routed(code, four, slope, s)
    products = [
        code.builder.fmul(each, code.builder.fsub(pixel, s[2])) for each, pixel in zip(routed, four, strict=True)
    ]
    return [], [clipped, code.added(products)]


def _slope_apply(code: Code, four: list[Any], slope: Callable[[], Any], s: list[Any]) -> tuple[list[Any], list[Any]]:
    """For each pixel: s0 · (gradient - s3 - (pixel - s2) · s4)."""
    sub, mul = code.builder.fsub, code.builder.fmul
    routed, _ = _routed(code, four, slope, s)
    found = [
        mul(s[0], sub(sub(each, s[3]), mul(sub(pixel, s[2]), s[4]))) for each, pixel in zip(routed, four, strict=True)
    ]
    return found, [code.zero()] * 2


scale_windows, window_slope_sums, window_slope_apply = map(make_windows, (_scale, _slope_sums, _slope_apply))
