"""Sums along a line of pixels: the innermost loop for one image at a time, in vector instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from driveprune.sparse.code import I64, LANES, Code

SUMS = 12
"""Vectors of sums that stay in registers."""

PAIR_SUMS = 10
"""The same for two outputs: their weights and a vector of the input need registers, too."""


def ways(vectors: int, outputs: int) -> int:
    """How many weights to take at once, so that few sums do not wait for each other."""
    sums = vectors * outputs
    return 4 if sums <= 2 else 2 if sums <= 5 else 1


def make_line(vectors: int, outputs: int, width: int = LANES) -> Any:
    """The sums of one output, or of two that have the same places, over vectors that lie side by side.

    line(arena, source, (offsets, low, high, values, at), (to, other, plus, other_plus), masks, place, (bias,
    other_bias), (has_plus, relu)):

    arena[to + i] = bias + sum over j in [low, high) of values[at + (j - low) · outputs] · arena[source + offsets[j]
    + i], for each number i of the vectors; plus arena[plus + i], clipped at zero, and zero where masks[place + i] is
    zero (it is -1 elsewhere). The same at `other` with the values one further. high - low is a multiple of `ways`.
    """
    several = ways(vectors, outputs)

    @intrinsic
    def line(
        _: Any, arena: Any, source: Any, weights: Any, targets: Any, masks: Any, place: Any, biases: Any, flags: Any
    ) -> Any:
        signature = types.void(arena, types.int64, weights, targets, masks, types.int64, biases, flags)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args, width)
            base, masks = code.data(0), code.at(code.data(4), args[5])
            kinds = signature.args[2].types
            offsets, low, high, values, at = code.unpacked(args[2])
            offsets, values = (code.data_of(kind, each) for kind, each in ((kinds[0], offsets), (kinds[3], values)))
            targets, biases, (has_plus, relu) = (code.unpacked(args[n]) for n in (3, 6, 7))
            sums = _sums(
                code, code.at(base, args[1]), offsets, low, high, code.at(values, at), vectors, outputs, several
            )
            for number in range(outputs):
                place, bias = code.at(base, targets[number]), code.splat(biases[number])
                mine = [builder.fadd(total, bias) for total in sums[number]]
                other = code.at(base, targets[2 + number])
                mine = code.added_if(has_plus, mine, [code.at(other, v * width) for v in range(vectors)])
                for v, value in enumerate(mine):
                    clipped = builder.select(relu, code.positive(value, value), value)
                    code.store(_inside(code, clipped, code.at(masks, v * width)), code.at(place, v * width))
            return context.get_dummy_value()

        return signature, codegen

    return line


def _sums(
    code: Code, source: Any, offsets: Any, low: Any, high: Any, weights: Any, vectors: int, outputs: int, several: int
) -> list[list[Any]]:
    """Sums of products: for each output its vectors."""
    builder, count = code.builder, several * outputs * vectors

    def body(j: Any, before: list[Any]) -> list[Any]:
        new: list[Any] = []
        first = builder.mul(builder.sub(j, low), I64(outputs))
        for way in range(several):
            offset = builder.sext(builder.load(code.at(offsets, j, way)), I64)
            mine = [code.splat(builder.load(code.at(weights, first, way * outputs + o))) for o in range(outputs)]
            sums = before[way * outputs * vectors : (way + 1) * outputs * vectors]
            for v in range(vectors):  # few vectors are in registers beside the sums
                loaded = code.load(code.at(source, offset, v * code.width))
                for o, weight in enumerate(mine):
                    sums[o * vectors + v] = code.fma(weight, loaded, sums[o * vectors + v])
            new += sums
        return new

    ends = code.loop(low, high, several, [code.zero()] * count, body)
    size = outputs * vectors
    totals = [code.added(ends[place::size]) for place in range(size)]
    return [totals[o * vectors : (o + 1) * vectors] for o in range(outputs)]


def _inside(code: Code, value: Any, mask: Any) -> Any:
    """A value where the mask has all bits set, zero where it has none."""
    whole = ir.VectorType(ir.IntType(32), code.width)
    bits = code.builder.and_(code.builder.bitcast(value, whole), code.load(mask, whole))
    return code.builder.bitcast(bits, code.vector)
