"""A training step of a region: all that goes forward in one call, all that goes back in another.

A team of threads takes the pieces of both from lists. Values that the gradients need lie in one piece of memory,
gradients in another; parameters come as one flat tensor, and their gradients leave as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from driveprune.compiled import threads, use_threads
from driveprune.sparse import training_kernels as kernels
from driveprune.sparse.arena import Arena
from driveprune.sparse.blocked import STREAM_BYTES, flat, follow, pack, pooled, shares
from driveprune.sparse.both import TOTAL_VECTORS
from driveprune.sparse.code import LANES, LINE
from driveprune.sparse.ends import MOMENT_VECTORS
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.memory import empty
from driveprune.sparse.step import Step, UnknownStepError
from driveprune.sparse.team import COUNTERS
from driveprune.sparse.tiling import Ints, Tiling, both, forward, ranges
from driveprune.sparse.vector import CLIPPED, SCALED

PIECE = 20_000
"""Numbers that are worth being a piece of work of their own."""

NO_BIAS = -1

Shape = tuple[int, int, int]
Row = dict[str, int]


class TrainingRegion:
    """A region for so many images of a size, to be trained; `wanted` inputs get a gradient."""

    def __init__(
        self, steps: list[Step], inputs: Mapping[str, Shape], outputs: tuple[str, ...], count: int,
        wanted: tuple[bool, ...],
    ) -> None:  # fmt: skip
        self._plan = plan = _Plan(steps, inputs, outputs, count, dict(zip(inputs, wanted, strict=True)))
        self._wanted = wanted
        self._slots = plan.tables.slots()
        self._tables = plan.tables.tilings()
        self._forward, self._backward = plan.forward.arrays(), plan.backward.arrays()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs for the inputs, as blocked tensors."""
        parameters = [getattr(module, name) for module, name in self._plan.parameters]
        found: tuple[Tensor, ...] = _Train.apply(self, *map(pack, tensors), *parameters)  # type: ignore[no-untyped-call]
        return found

    def learn(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """The outputs for blocked inputs and parameters; what the way back needs: values, and parameters."""
        plan, count = self._plan, len(self._wanted)
        parameters = torch.cat(
            [*(each.reshape(-1) for each in tensors[count:]), torch.zeros(plan.widest, dtype=torch.float32)]
        )
        saved = empty(plan.saved.size)
        for (place, shape), tensor in zip(plan.inputs, tensors[:count], strict=True):
            self._view(saved, place, shape).copy_(tensor)
        steps, items, eps, gather = self._forward
        self._run(kernels.forwards, kernels.forwards_together, flat(saved), flat(parameters), steps, eps, items,
                  self._tables, gather)  # fmt: skip
        for norm, place, numbers in plan.norms:
            if norm.training and norm.running_mean is not None:
                means, variances = saved[place : place + 2 * norm.num_features].chunk(2)
                follow(norm, means, variances, numbers)
        outputs = tuple(self._view(saved, place, shape).clone() for place, shape in plan.outputs)
        return outputs, saved, parameters

    def gradients(self, slopes: tuple[Tensor, ...], saved: Tensor, parameters: Tensor) -> list[Tensor | None]:
        """The gradients of inputs and parameters from those of the outputs."""
        plan = self._plan
        arena, found = empty(plan.slopes.size), torch.zeros_like(parameters)
        for (place, shape), slope in zip(plan.given, slopes, strict=True):
            self._view(arena, place, shape).copy_(slope)
        steps, items, _, gather = self._backward
        self._run(kernels.backwards, kernels.backwards_together, flat(saved), flat(arena), flat(parameters),
                  flat(found), steps, items, self._tables, self._slots, gather)  # fmt: skip
        inputs = [place and self._view(arena, *place).clone() for place in plan.wanted]
        sizes = [getattr(module, name).numel() for module, name in plan.parameters]
        return [*inputs, *torch.split(found[: sum(sizes)], sizes)]

    def _view(self, memory: Tensor, place: int, shape: Shape) -> Tensor:
        blocks = self._plan.blocks
        return memory[place : place + blocks * shape[0] * shape[1] * shape[2] * LANES].view(blocks, *shape, LANES)

    def _run(self, alone: Any, together: Any, *given: Any) -> None:
        scratch = empty(self._plan.threads, -(-self._plan.tables.scratch // LINE) * LINE).numpy()
        counters = np.zeros(COUNTERS, np.int64)
        if self._plan.threads > 1:
            use_threads()
            together(*given, scratch, counters)
        else:
            alone(*given, scratch, counters, 0)


class _Train(Function):
    @staticmethod
    def forward(ctx: Any, region: TrainingRegion, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, *known = region.learn(tensors)
        ctx.region = region
        ctx.save_for_backward(*known)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.region.gradients(slopes, *ctx.saved_tensors)


class _Tables:
    """The tables of all tilings, one after the other."""

    NAMES = ("bands", "runs", "inward", "outward", "counted", "starts", "offsets")

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tiling, Row]] = {}
        self._slots: dict[int, Row] = {}
        self._lengths = dict.fromkeys(("bands", "runs", "tiles", "starts", "offsets"), 0)
        self._slot_lengths = {"slots": 0}
        self.scratch = 0
        """Numbers that a thread's scratch holds: none if there are no tables."""

    def row(self, tiling: Tiling) -> Row:
        """Where the tables of a tiling are."""
        if id(tiling) not in self._known:
            self._known[id(tiling)] = tiling, {"table": len(self._known), **ranges(self._lengths, tiling.lengths)}
            self.scratch = max(self.scratch, tiling.scratch)
        return self._known[id(tiling)][1]

    def row_with_slots(self, tiling: Tiling) -> Row:
        """The same, and where it is said which sum belongs to which value."""
        if id(tiling) not in self._slots:
            self._slots[id(tiling)] = ranges(self._slot_lengths, {"slots": len(tiling.slots)})
        return {**self.row(tiling), **self._slots[id(tiling)]}

    def tilings(self) -> tuple[Any, ...]:
        """Sizes, and what `NAMES` names."""
        known = [tiling for tiling, _ in self._known.values()]
        sizes = np.stack([each.sizes for each in known])
        return sizes, *(np.concatenate([getattr(each, name) for each in known]) for name in self.NAMES)

    def slots(self) -> Ints:
        """Where the sums of values are."""
        return np.concatenate([np.zeros(0, np.int64), *(self._known[key][0].slots for key in self._slots)])


class _List:
    """Steps in one direction, and the pieces of their work. Steps between two barriers do not wait for each other."""

    def __init__(self) -> None:
        self._rows: list[Row] = [{"kind": kernels.GATHER}]
        self._eps = [0.0]
        self._items: list[tuple[int, int, int, int]] = []
        self._before = 0
        self._gather: list[Ints] = []
        self._gathered = 0
        self._sums = 0

    def barrier(self) -> None:
        """What is added from now on begins when all that was added before is done."""
        self._before = len(self._items)

    def add(self, row: Row, number: int, pieces: int, eps: float = 0.0) -> None:
        """A step over so many channels, planes or pieces, divided into pieces of work."""
        self._rows.append(row)
        self._eps.append(eps)
        pieces = max(1, min(pieces, number))
        for piece in range(pieces):
            low, high = piece * number // pieces, (piece + 1) * number // pieces
            self._items.append((len(self._rows) - 1, low, high, self._before))

    def reserve_sums(self, count: int) -> None:
        """Steps that find moments on the way need room for so many sums: all have the same."""
        self._sums = max(self._sums, count)

    def gathered(self, weight: int, tiling: Tiling) -> Row:
        """Where the values of a layer are, in the order of a tiling, counted from where all of them begin."""
        count = int(tiling.starts[-1])
        self._gather.append(weight + (np.arange(count) if tiling.order is None else tiling.order))
        begin = self._gathered
        self._gathered += count
        return {"values": begin, "values_end": begin + count}

    def finish(self, arena: Arena, pieces: int, zeros: int) -> None:
        """Give the gathered values their place; they are gathered before all else. Zeros are among the parameters."""
        place, sums = arena.add(self._gathered), arena.add(self._sums)
        self._rows[0]["output"] = place
        for row in self._rows[1:]:
            row["moment_sums"] = sums
            if row.get("bias") == NO_BIAS:
                row["bias"] = zeros
            if "values" in row:
                row |= {"values": row["values"] + place, "values_end": row["values_end"] + place}
        pieces = max(1, min(pieces, self._gathered // PIECE))
        first = [(0, p * self._gathered // pieces, (p + 1) * self._gathered // pieces, 0) for p in range(pieces)]
        self._items = first + [(step, low, high, before + pieces) for step, low, high, before in self._items]

    def arrays(self) -> tuple[Ints, Ints, Any, Ints]:
        """Steps, items, epsilons and which parameters to gather."""
        steps = [[row.get(name, 0) for name in kernels.FIELDS] for row in self._rows]
        gather = np.concatenate([np.zeros(0, np.int64), *self._gather])
        return np.array(steps, np.int64), np.array(self._items, np.int64), np.array(self._eps), gather


class _Plan:
    """What to do in which order, and where everything is."""

    def __init__(
        self, steps: list[Step], inputs: Mapping[str, Shape], outputs: tuple[str, ...], count: int,
        wanted: Mapping[str, bool],
    ) -> None:  # fmt: skip
        self.threads, self.blocks = threads(), -(-count // LANES)
        self._last, self._count = count - (self.blocks - 1) * LANES, count
        self.tables, self.forward, self.backward = _Tables(), _List(), _List()
        self.saved, self.slopes = Arena(LANES), Arena(LANES)
        self.parameters: list[tuple[nn.Module, str]] = []
        self.norms: list[tuple[Any, int, int]] = []
        self.widest, self._length = 1, 0
        self._values: dict[str, tuple[int, Shape]] = {}
        self._sources: dict[str, Row] = {}
        self._only_for_layers = _only_for_layers(steps, outputs)
        self._wanted = wanted
        self._makers = {step.output: step for step in steps}
        self._first_uses = _first_uses(steps)
        for name, shape in inputs.items():
            self._new(name, shape)
        self.inputs = list(self._values.values())
        turned = [self._add(step) for step in steps]
        if not self.tables.scratch:
            raise UnknownStepError("a region without weights")
        self.outputs = [self._values[name] for name in outputs]
        self.forward.finish(self.saved, self.threads, self._length)
        self._norms = {step.output: rows[1] for step, rows in zip(steps, turned, strict=True) if len(rows) > 1}
        self._gradients: dict[str, int] = {}
        self._totals: dict[str, Row] = {}
        self._free: list[tuple[int, int]] = []
        self._open: list[tuple[Row, int, int]] = []
        self.given = []
        for name in outputs:
            self._take_gradient(name)
            self.given.append((self._gradients[name], self._values[name][1]))
        for step, rows in zip(reversed(steps), reversed(turned), strict=True):
            self._turn(step, rows)
        self.wanted = [self._input_gradient(name) if wanted[name] else None for name in inputs]
        while self._open:
            self._barrier()
        self.backward.finish(self.slopes, self.threads, self._length)

    # Forwards.

    def _new(self, name: str, shape: Shape) -> int:
        place = self.saved.take(self._size(shape))
        self._values[name] = place, shape
        return place

    def _size(self, shape: Shape) -> int:
        return self.blocks * shape[0] * shape[1] * shape[2] * LANES

    def _parameter(self, module: nn.Module, name: str) -> int:
        """Where a parameter is in the flat tensor of all."""
        self.parameters.append((module, name))
        begin = self._length
        self._length += int(getattr(module, name).numel())
        return begin

    def _add(self, step: Step) -> list[Row]:
        """The rows of a step, whose gradients are still to be listed."""
        self.forward.barrier()
        x, shape = self._values[step.inputs[0]]
        match step.kind:
            case "same":
                self._values[step.output] = x, shape
            case "dropout" if step.module is not None and not step.module.training:
                self._values[step.output] = x, shape
            case "flatten":
                self._values[step.output] = x, (shape[0] * shape[1] * shape[2], 1, 1)
            case "layer":
                return self._add_layer(step, x, shape)
            case "max_pool":
                out = (shape[0], *pooled(shape[1:], *step.numbers))
                return [self._add_planes(kernels.MAX_POOL, step, x, shape, out, step.windows)]
            case "pool" if isinstance(step.module, nn.AdaptiveAvgPool2d) and step.module.output_size in {1, (1, 1)}:
                return [self._add_planes(kernels.MEAN, step, x, shape, (shape[0], 1, 1), {})]
            case _:
                raise UnknownStepError(step.kind)
        return []

    def _add_planes(self, kind: int, step: Step, x: int, shape: Shape, out: Shape, numbers: Row) -> Row:
        place = self._new(step.output, out)
        row = {"kind": kind, "input": x, "output": place, **self._form(shape, out), **numbers}
        self.forward.add(row, self.blocks * shape[0], self._pieces(shape))
        return row

    def _form(self, shape: Shape, out: Shape) -> Row:
        return {
            "blocks": self.blocks, "channels": shape[0], "height": shape[1], "width": shape[2], "rows": out[1],
            "columns": out[2], "last": self._last, "plus": -1, "stream": int(4 * self._size(out) > STREAM_BYTES),
        }  # fmt: skip

    def _pieces(self, shape: Shape) -> int:
        """Into how many pieces to divide work on a value."""
        return min(8 * self.threads, self._size(shape) // PIECE) if self.threads > 1 else 1

    def _add_layer(self, step: Step, x: int, shape: Shape) -> list[Row]:
        module, norm = step.module, step.norm
        assert isinstance(module, SparseLayer)
        layer = module.kernel.layer
        layer.check(shape[0])
        if norm is None and step.plus is not None:
            raise UnknownStepError("a sum without normalisation")
        out: Shape = (layer.outputs, *layer.size(shape[1], shape[2]))
        weight = self._parameter(module, "weight")
        bias = NO_BIAS if module.bias is None else self._parameter(module, "bias")
        z = self._new(step.output if norm is None else f"{step.output} before", out)
        relu = int(step.relu and norm is None)
        self.widest = max(self.widest, layer.outputs, layer.inputs)
        row = {
            "input": x, "output": z, "relu": relu, "weight": weight, "bias": bias, **self._form(out, out),
            **self._sources.get(step.inputs[0], {}),
        }  # fmt: skip
        if not len(layer.places):
            self.forward.add(row | {"kind": kernels.FILL}, layer.outputs, self._pieces(out))
        found = module.kernel.pieces(forward, shape[1:], out[1:], self.blocks) if len(layer.places) else []
        on_the_way = norm is not None and not step.halves and self._by_blocks(found)
        for first, jobs, tiling in found:
            parts = -(-self.threads // jobs)
            values = self.forward.gathered(weight, tiling)
            piece = {"kind": kernels.LAYER, "first_block": first, "parts": parts, "finds_moments": int(on_the_way)}
            self.forward.add({**row, **piece, **values, **self.tables.row(tiling)}, jobs * parts, jobs * parts)
        return [row] if norm is None else [row, self._add_norm(step, z, out, on_the_way)]

    def _by_blocks(self, pieces: list[tuple[int, int, Tiling]]) -> bool:
        """Whether each piece of a layer's work is one block of images: then it can find sums on the way."""
        return len(pieces) == 1 and pieces[0][1] == self.blocks

    def _add_norm(self, step: Step, z: int, shape: Shape, has_sums: bool) -> Row:
        """A normalisation, from the sums that its layer found on the way or from its input.

        If only layers need what it makes, it is left to them: each normalises the rows that it takes.
        """
        norm: Any = step.norm
        if norm.weight is None or norm.bias is None or norm.num_features != shape[0]:
            raise UnknownStepError("a normalisation without weights")
        if not (norm.training or norm.running_mean is None):
            raise UnknownStepError("a normalisation that learns no moments")
        numbers = self._count * shape[1] * shape[2]
        if numbers < 2 or (step.halves and (shape[1] % 2 or shape[2] % 2)):
            raise UnknownStepError("a normalisation of this size")
        if step.plus is not None and self._values[step.plus][1] != shape:
            raise UnknownStepError("a sum of different sizes")
        self.forward.barrier()
        out = (shape[0], shape[1] // 2, shape[2] // 2) if step.halves else shape
        moments = self.saved.take(5 * shape[0])
        row = {
            "kind": kernels.WINDOWS if step.halves else kernels.NORM, "input": z, "moments": moments,
            "weight": self._parameter(norm, "weight"), "bias": self._parameter(norm, "bias"),
            **self._form(shape, out), "relu": int(step.relu), "known": int(has_sums),
            "plus": -1 if step.plus is None else self._values[step.plus][0],
        }  # fmt: skip
        self.norms.append((norm, moments, numbers))
        if has_sums:
            count = self.blocks * shape[0] * MOMENT_VECTORS * LANES
            self.forward.reserve_sums(count)
            self.forward.add({**row, "kind": kernels.JOIN}, shape[0], min(self.threads, count // PIECE), norm.eps)
            self.forward.barrier()
        if has_sums and step.plus is None and step.output in self._only_for_layers:
            self._values[step.output] = z, out
            kind = CLIPPED if step.relu else SCALED
            self._sources[step.output] = {"source": kind, "normed": moments, "normed_channels": shape[0]}
        else:
            row["output"] = self._new(step.output, out)
            self.forward.add(row, shape[0], self._pieces(shape), norm.eps)
        return row

    # Backwards.

    def _barrier(self) -> None:
        """All gradients so far are there; what nobody needs any more may be used again."""
        self.backward.barrier()
        for place, size in self._free:
            self.slopes.give_back(place, size)
        self._free = []
        opened, self._open = self._open, []
        begun = set()
        for row, sums, size in opened:
            if row["weight"] in begun:  # two threads must not add to the same numbers
                self._open.append((row, sums, size))
                continue
            begun.add(row["weight"])
            self.backward.add(row, row["slots_end"] - row["slots"], min(2 * self.threads, size // PIECE))
            self._free.append((sums, size))

    def _take_gradient(self, name: str) -> int:
        """A place for the gradient of a value."""
        self._gradients[name] = self.slopes.take(self._size(self._values[name][1]))
        return self._gradients[name]

    def _input_gradient(self, name: str) -> tuple[int, Shape]:
        """Where the gradient of a value is: zeros if nobody sends any."""
        shape = self._values[name][1]
        if name not in self._gradients:
            self._barrier()
            row = {"kind": kernels.ZERO, "output": self._take_gradient(name), **self._form(shape, shape)}
            self.backward.add(row, self.blocks * shape[0], self._pieces(shape))
        return self._gradients[name], shape

    def _is_needed(self, name: str) -> bool:
        return self._wanted.get(name, True)

    def _turn(self, step: Step, rows: list[Row]) -> None:
        """The gradients of a step."""
        slope, _ = self._input_gradient(step.output)
        name = step.inputs[0]
        size = self._size(self._values[step.output][1])
        if step.kind == "layer":
            self._turn_layer(step, rows, slope, size)
        elif not rows:  # the same memory under another name
            if name in self._gradients:
                raise UnknownStepError("a value that others use, too")
            self._gradients[name] = slope
        else:
            if name in self._gradients:
                raise UnknownStepError("a value that others use, too")
            self._barrier()
            back = {kernels.MAX_POOL: kernels.MAX_POOL_BACK, kernels.MEAN: kernels.MEAN_BACK}[rows[0]["kind"]]
            shape = self._values[name][1]
            stream = {"stream": int(4 * self._size(shape) > STREAM_BYTES)}
            places = {"kind": back, "other": rows[0]["output"], "slope": slope, "output": self._take_gradient(name)}
            self.backward.add({**rows[0], **places, **stream}, self.blocks * shape[0], self._pieces(shape))
            self._free.append((slope, size))

    def _turn_layer(self, step: Step, rows: list[Row], slope: int, size: int) -> None:
        assert isinstance(step.module, SparseLayer)
        through: Row = {"through": -1}
        if step.output in self._totals:
            through = self._join_back(step, rows[1])
        elif len(rows) > 1:  # a bias before it has no gradient: the mean takes it away again
            slope, size = self._turn_norm(step, rows[1], slope, size)
        elif rows[0]["relu"] or step.module.bias is not None:
            self._barrier()
            dy = self.slopes.take(size) if rows[0]["relu"] else slope
            places = {"kind": kernels.CLIP_BACK, "other": rows[0]["output"], "slope": slope, "output": dy}
            shape = self._values[step.output][1]
            self.backward.add({**rows[0], **places}, shape[0], self._pieces(shape))
            if dy != slope:
                self._free.append((slope, size))
            slope = dy
        self._barrier()
        if step.output in self._totals:
            self._pass_on(step, slope, size)
        else:
            self._free.append((slope, size))
        if self._turns(step):
            self._turn_both(step, {**rows[0], **through, "slope": slope})
        elif len(step.module.kernel.layer.places):
            self._turn_weights(step, {**rows[0], "slope": slope})

    def _turns(self, step: Step) -> bool:
        """Whether both gradients of a step's layer are wanted, and found together."""
        is_layer = isinstance(step.module, SparseLayer) and len(step.module.kernel.layer.places) > 0
        return is_layer and self._is_needed(step.inputs[0])

    def _pass_on(self, step: Step, slope: int, size: int) -> None:
        """The gradient before a normalisation's ReLU is that of the other value in its sum, too, if there is one."""
        if step.plus is None or not self._is_needed(step.plus):
            self._free.append((slope, size))
        elif step.plus in self._gradients:
            raise UnknownStepError("a value that others use, too")
        else:
            self._gradients[step.plus] = slope

    def _turn_norm(self, step: Step, row: Row, slope: int, size: int) -> tuple[int, int]:
        """The gradient before a normalisation, and its size."""
        self._barrier()
        shape: Shape = (row["channels"], row["height"], row["width"])
        dy = self.slopes.take(self._size(shape))
        back = {
            **row, "kind": kernels.WINDOWS_BACK if step.halves else kernels.NORM_BACK, "slope": slope, "output": dy,
            "stream": int(4 * self._size(shape) > STREAM_BYTES), **self._clip(step, row, slope),
        }  # fmt: skip
        self._pass_on(step, slope, size)
        self.backward.add(back, shape[0], self._pieces(shape))
        return dy, self._size(shape)

    def _clip(self, step: Step, norm: Row, slope: int) -> Row:
        """How gradients are clipped before they go back through a normalisation: in place if others need them."""
        in_place = step.relu and step.plus is not None
        return {"other": norm.get("output", norm["input"]), "plus": slope if in_place else -1}

    def _join_back(self, step: Step, norm: Row) -> Row:
        """What a normalisation whose totals are known makes of a gradient; the gradients of its parameters."""
        self._barrier()
        channels, totals = norm["channels"], self._totals[step.output]
        through = self.slopes.add(2 * channels)
        row = {**norm, **totals, "kind": kernels.JOIN_BACK, "through": through}
        self.backward.add(row, channels, min(self.threads, totals["total_rows"] * channels * LANES // PIECE))
        return {"through": through, "other": norm["input"], "moments": norm["moments"]}

    def _totals_of(self, step: Step, jobs: int) -> Row:
        """What to do with the gradient of a step's input on the way, if that is all of it and a normalisation's.

        It goes back through the ReLU, and its totals are found, in so many rows.
        """
        name = step.inputs[0]
        maker, norm = self._makers.get(name), self._norms.get(name)
        is_all = self._first_uses[name] == step.output
        if maker is None or norm is None or maker.halves or not is_all or not self._turns(maker):
            return {"totals": -1}
        place = self.slopes.take(jobs * norm["channels"] * TOTAL_VECTORS * LANES)
        self._totals[name] = {"totals": place, "total_rows": jobs}
        return {"totals": place, "clip": int(maker.relu), "before": norm["input"], "means": norm["moments"]}

    def _turn_both(self, step: Step, row: Row) -> None:
        """The gradients of a layer's weights and of its input."""
        assert isinstance(step.module, SparseLayer)
        kernel, name = step.module.kernel, step.inputs[0]
        value, shape = self._values[name]
        before = self._gradients.get(name, -1)
        whole_lines = kernel.layer.stride[1] == 1 or LANES % LINE == 0
        pieces = kernel.pieces(both, shape[1:], shape[1:], self.blocks)
        end = self._totals_of(step, sum(jobs for _, jobs, _ in pieces))
        sent = {
            **row, "kind": kernels.BOTH, "value": value, "output": self._take_gradient(name), "plus": before,
            "stream": int(4 * self._size(shape) > STREAM_BYTES and whole_lines), **end,
        }  # fmt: skip
        for first, jobs, tiling in pieces:
            parts, many = shares(self.threads, jobs)
            values = self.backward.gathered(row["weight"], tiling)
            places = {"first_block": first, "jobs": jobs, "parts": parts, **values}
            self._add_sums({**sent, **places}, tiling, many)
            if sent["totals"] >= 0:
                sent["totals"] += jobs * shape[0] * TOTAL_VECTORS * LANES
        if before >= 0:
            self._free.append((before, self._size(shape)))

    def _turn_weights(self, step: Step, row: Row) -> None:
        """The gradients of a layer's weights."""
        assert isinstance(step.module, SparseLayer)
        kernel, (_, shape) = step.module.kernel, self._values[step.inputs[0]]
        out = kernel.layer.size(shape[1], shape[2])
        for first, jobs, tiling in kernel.pieces(forward, shape[1:], out, self.blocks):
            places = {"kind": kernels.WEIGHT_SUMS, "first_block": first, "jobs": jobs}
            self._add_sums({**row, **places}, tiling, self.threads)

    def _add_sums(self, row: Row, tiling: Tiling, pieces: int) -> None:
        """A step in pieces, each of which finds sums for the gradients of the kept weights; they are added later."""
        pitch = tiling.sums
        sums = self.slopes.take(pieces * pitch)
        row = {
            **row, "sums": sums, "sums_pitch": pitch, "pieces": pieces, **self.tables.row_with_slots(tiling)
        }  # fmt: skip
        self.backward.add(row, pieces, pieces)
        self._open.append((row | {"kind": kernels.WEIGHT_GRADIENT}, sums, pieces * pitch))


def _first_uses(steps: list[Step]) -> dict[str, str]:
    """The output of the first step that needs a value: the last one to send a gradient back to it."""
    found: dict[str, str] = {}
    for step in reversed(steps):
        found |= dict.fromkeys((*step.inputs, *([] if step.plus is None else [step.plus])), step.output)
    return found


def _only_for_layers(steps: list[Step], outputs: tuple[str, ...]) -> set[str]:
    """The values that only layers need, as their inputs."""
    layers = {name for step in steps if step.kind == "layer" for name in step.inputs}
    others = {name for step in steps if step.kind != "layer" for name in step.inputs} | {step.plus for step in steps}
    return layers - others - set(outputs)
