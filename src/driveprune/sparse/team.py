"""Threads that share a list of work: whoever is free takes the next piece, and waits for what it needs.

One thread alone can do all of it, so nothing depends on how many there are or when they begin.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TAKEN, DONE, COUNTERS = 0, 8, 16
"""Where the counters of a team are in their array: how many pieces were taken, and done."""

APART = 8
"""Distance of the counters of queues, which follow: each is in a line of the cache of its own."""

PATIENCE = 2_000
"""How often to look before letting others have the processor."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_CAN_PAUSE = platform.machine().lower() in {"x86_64", "amd64"}


def _counter(context: Any, builder: Any, signature: Any, args: Any, place: int) -> Any:
    proxy = cgutils.create_struct_proxy(signature.args[0])  # type: ignore[no-untyped-call]
    data = proxy(context, builder, value=args[0]).data
    return builder.gep(data, [_I64(place)])


@intrinsic
def take(_: Any, counters: Any) -> Any:
    """The number of the next piece of work, which nobody else gets."""
    signature = types.int64(counters)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _counter(context, builder, signature, args, TAKEN), _I64(1), "acq_rel")

    return signature, codegen


@numba.njit(inline="always")
def take_from(counters: Any, queue: int) -> Any:
    """How many pieces of a queue were taken before: the number of the next one, which nobody else gets."""
    return take(counters[COUNTERS + APART * queue :])  # type: ignore[call-arg]


def counters_for(queues: int) -> int:
    """The length of an array of counters for so many queues."""
    return COUNTERS + APART * queues


@intrinsic
def report(_: Any, counters: Any) -> Any:
    """A piece of work is done."""
    signature = types.void(counters)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", _counter(context, builder, signature, args, DONE), _I64(1), "acq_rel")
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def wait(_: Any, counters: Any, count: Any) -> Any:
    """Until so many pieces are done."""
    signature = types.void(counters, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = _counter(context, builder, signature, args, DONE)
        before = builder.block
        look, idle, rest, done = (builder.append_basic_block(name) for name in ("look", "idle", "rest", "done"))
        builder.branch(look)
        builder.position_at_end(look)
        looks = builder.phi(_I64)
        looks.add_incoming(_I64(0), before)
        found = builder.load_atomic(counter, "acquire", 8)
        builder.cbranch(builder.icmp_signed("<", found, args[1]), idle, done)
        builder.position_at_end(idle)
        more = builder.add(looks, _I64(1))
        if _CAN_PAUSE:
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        looks.add_incoming(more, idle)
        if os.name == "posix":
            builder.cbranch(builder.icmp_signed("<", more, _I64(PATIENCE)), look, rest)
        else:
            builder.branch(look)
        builder.position_at_end(rest)
        if os.name == "posix":
            _call(builder, "sched_yield", _I32)
        looks.add_incoming(more, rest)
        builder.branch(look)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, codegen


@numba.njit(inline="always")
def begin(items: Any, counters: Any) -> Any:
    """The number of the next piece, when what must be done before it is done: as many as there are, if none is left.

    Pieces are rows (step, low, high, how many must be done before).
    """
    number: int = take(counters)  # type: ignore[call-arg]
    if number < len(items):
        wait(counters, items[number, 3])
    return number


def _call(builder: Any, name: str, kind: Any) -> None:
    function = ir.FunctionType(kind, [])
    builder.call(cgutils.get_or_insert_function(builder.module, function, name), [])  # type: ignore[no-untyped-call]
