"""Vector instructions (LLVM's, through numba), and loops over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils


def lanes() -> int:
    """How many float32 numbers a vector of this machine has: 16 (AVX-512), 8 (AVX2) or 4 (NEON, SSE)."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") and features.get("fma") else 4


LANES = lanes()

LINE = 16
"""Numbers in a line of the cache."""

WAYS = 4
"""Vectors that a loop takes at a time, so that its sums do not wait for each other."""

I32, I64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


class Code:
    """Shorthands for the instructions that the loops are made of."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, width: int) -> None:
        self.context, self.builder, self.signature, self.args = context, builder, signature, args
        self.vector = ir.VectorType(FLOAT, width)
        self.width = width
        function = ir.FunctionType(self.vector, [self.vector] * 3)
        self._fma = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, function, f"llvm.fma.v{width}f32"
        )

    def data(self, number: int) -> Any:
        """The address of an argument that is an array."""
        return self.data_of(self.signature.args[number], self.args[number])

    def data_of(self, kind: Any, array: Any) -> Any:
        """The address of an array."""
        proxy = cgutils.create_struct_proxy(kind)  # type: ignore[no-untyped-call]
        return proxy(self.context, self.builder, value=array).data

    def unpacked(self, value: Any) -> Any:
        """The members of a tuple."""
        return cgutils.unpack_tuple(self.builder, value)  # type: ignore[no-untyped-call]

    def at(self, pointer: Any, *places: Any) -> Any:
        """An address, so many numbers further."""
        for place in places:
            pointer = self.builder.gep(pointer, [I64(place) if isinstance(place, int) else place])
        return pointer

    def load(self, pointer: Any, vector: Any = None) -> Any:
        """The vector at an address."""
        return self.builder.load(self.builder.bitcast(pointer, (vector or self.vector).as_pointer()), align=4)

    def store(self, value: Any, pointer: Any) -> None:
        """A vector to an address."""
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=4)

    def store_all(self, values: list[Any], pointers: list[Any], stream: Any) -> None:
        """Vectors to their addresses; past the caches if `stream`: for what is not read again soon.

        Addresses are multiples of a vector's size.
        """
        with self.builder.if_else(stream) as (past, through):
            with past:
                hint = self.builder.module.add_metadata([I32(1)])
                for value, pointer in zip(values, pointers, strict=True):
                    place = self.builder.bitcast(pointer, value.type.as_pointer())
                    self.builder.store(value, place, align=4 * self.width).set_metadata("nontemporal", hint)
            with through:
                for value, pointer in zip(values, pointers, strict=True):
                    self.store(value, pointer)

    def splat(self, number: Any) -> Any:
        """A vector of the same number."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, number, I32(0))
        return self.shuffle(first, undefined, [0] * self.width)

    def shuffle(self, a: Any, b: Any, order: list[int]) -> Any:
        """Lanes of two vectors in an order."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """The product of two vectors plus a third, rounded once."""
        return self.builder.call(self._fma, [a, b, c])

    def positive(self, condition: Any, value: Any) -> Any:
        """The value where the condition is above zero (or no number), else zero."""
        zero = self.zero()
        return self.builder.select(self.builder.fcmp_unordered(">", condition, zero), value, zero)

    def four_sums(self, vectors: list[Any]) -> Any:
        """The sums of the lanes of four vectors, as one vector of four."""
        add, width = self.builder.fadd, self.width
        while width > 4:
            width //= 2
            low, high = list(range(width)), list(range(width, 2 * width))
            vectors = [add(self.shuffle(v, v, low), self.shuffle(v, v, high)) for v in vectors]
        pairs = []
        for a, b in (vectors[:2], vectors[2:]):
            pairs.append(add(self.shuffle(a, b, [0, 4, 1, 5]), self.shuffle(a, b, [2, 6, 3, 7])))
        first, second = pairs
        return add(self.shuffle(first, second, [0, 1, 4, 5]), self.shuffle(first, second, [2, 3, 6, 7]))

    def add_four_sums(self, vectors: list[Any], target: Any) -> None:
        """Add the sums of the lanes of four vectors to the four numbers at an address."""
        four = ir.VectorType(FLOAT, 4)
        self.store(self.builder.fadd(self.load(target, four), self.four_sums(vectors)), target)

    def prefetch(self, pointer: Any) -> None:
        """Bring the line of the cache at an address, which is soon to be read; nothing happens if there is none."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        self.builder.call(function, [self.builder.bitcast(pointer, byte), I32(0), I32(2), I32(1)])

    def zero(self) -> Any:
        """A vector of zeros."""
        return self.splat(ir.Constant(FLOAT, 0.0))

    def added(self, vectors: Sequence[Any]) -> Any:
        """The sum of vectors, in pairs."""
        while len(vectors) > 1:
            pairs = [self.builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
            vectors = [*pairs, *vectors[len(pairs) * 2 :]]
        return vectors[0]

    def loop(
        self, low: Any, high: Any, step: int, first: list[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """`for j in range(low, high, step): vectors = body(j, vectors)`; the vectors after it, `first` before it."""
        builder = self.builder
        before = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", low, high), loop, done)
        builder.position_at_end(loop)
        j = builder.phi(I64)
        phis = [builder.phi(self.vector) for _ in first]
        new = body(j, phis)
        self._keep_short()
        following, after = builder.add(j, I64(step)), builder.block
        builder.cbranch(builder.icmp_signed("<", following, high), loop, done)
        builder.position_at_end(done)
        ends = [builder.phi(self.vector) for _ in first]
        j.add_incoming(low, before)
        j.add_incoming(following, after)
        for phi, end, start, value in zip(phis, ends, first, new, strict=True):
            for each in (phi, end):
                each.add_incoming(start, before)
                each.add_incoming(value, after)
        return ends

    def _keep_short(self) -> None:
        """Nothing, in a way that keeps LLVM from unrolling the loop: its ends would be hard to predict, twice."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self.builder.call(ir.InlineAsm(kind, "", "", side_effect=True), [], attrs=("convergent", "nounwind"))

    def added_if(self, condition: Any, values: list[Any], pointers: list[Any]) -> list[Any]:
        """Vectors, plus those at some addresses if a condition holds."""

        def sums() -> list[Any]:
            return [self.builder.fadd(value, self.load(each)) for value, each in zip(values, pointers, strict=True)]

        return self.either(condition, values, sums)

    def clipped_if(self, condition: Any, values: list[Any]) -> list[Any]:
        """Vectors, clipped at zero if a condition holds."""
        return self.either(condition, values, lambda: [self.positive(value, value) for value in values])

    def loaded_if(self, condition: Any, pointers: list[Any], other: Any) -> list[Any]:
        """The vectors at some addresses if a condition holds, else another vector for each."""
        return self.either(condition, [other] * len(pointers), lambda: [self.load(pointer) for pointer in pointers])

    def either(self, condition: Any, values: list[Any], make: Callable[[], list[Any]]) -> list[Any]:
        """Vectors, or those that are made if a condition holds."""
        builder = self.builder
        before = builder.block
        then, done = builder.append_basic_block("then"), builder.append_basic_block("done")
        builder.cbranch(condition, then, done)
        builder.position_at_end(then)
        made = make()
        after = builder.block  # what is made may have branches of its own
        builder.branch(done)
        builder.position_at_end(done)
        found = []
        for value, other in zip(values, made, strict=True):
            phi = builder.phi(self.vector)
            phi.add_incoming(value, before)
            phi.add_incoming(other, after)
            found.append(phi)
        return found
