"""Loops over whole planes, in vector instructions: normalisation and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import I32, I64, LANES, WAYS, Code

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
