"""Two layers in a row as one step, for inference: what is between them is never a tensor in memory.

The first layer is computed row by row. Each row goes straight to the scratch that the second one reads, which goes on
as soon as it has the rows that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from driveprune.sparse.blocked import Kernel
from driveprune.sparse.code import LANES, LINE
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.pair_kernels import row_of
from driveprune.sparse.step import Step
from driveprune.sparse.tile import TILE
from driveprune.sparse.tiling import SIZES, Layer, Tiling, can_halve, halved, row_by_row

LEAST_ROW = 768
"""Numbers of an image in one row of all channels between two layers: if there are fewer, the calls for each row cost
more than is saved."""

Size = tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """The tables of two layers in a row, for one block of images at a time."""

    first: Tiling
    """Its output is the scratch of the second."""
    second: Tiling
    """It copies nothing: all rows are there."""
    advance: int
    """By how many rows the scratch moves on from band to band: all of them if it is a ring."""

    @property
    def between(self) -> int:
        """Where the scratch of the second begins, after that of the first."""
        return -(-self.first.scratch // LINE) * LINE

    @property
    def scratch(self) -> int:
        """Numbers that both scratches of a thread hold."""
        return self.between + self.second.scratch


def kernel_of(step: Step) -> Kernel:
    """The kernel of a layer."""
    assert isinstance(step.module, SparseLayer)
    return step.module.kernel


def follower(step: Step, steps: list[Step], uses: int) -> Step | None:
    """The layer that needs the output of a layer, if nobody else does; `uses` is how often it is needed."""
    if step.kind != "layer" or step.plus is not None or step.halves or uses != 1:
        return None
    return next((each for each in steps if each.kind == "layer" and each.inputs == (step.output,)), None)


def fit(first: Layer, second: Layer, size: Size, *, halves: bool) -> bool:
    """Whether the tables of two layers can be made, for images of a size and a second layer that `halves` or not."""
    middle = first.size(*size)
    if halves and not can_halve(second, *middle):
        return False
    return second.stride == (1, 1) and min(middle[1], second.size(*middle)[1]) >= TILE


def pay(first: Layer, second: Layer, size: Size) -> bool:
    """Whether rows are long, and whole tiles lie in those of both: other shapes waste less on what is left over."""
    middle = first.size(*size)
    whole = middle[1] % TILE == 0 and second.size(*middle)[1] % TILE == 0
    return whole and first.outputs * middle[1] >= LEAST_ROW


def pair(first: Kernel, second: Kernel, size: Size, *, halves: bool) -> Pair:
    """The tables of two layers in a row."""
    middle = first.layer.size(*size)
    before = first.tiling(row_by_row, *size, 1)
    after = second.tiling(halved if halves else row_by_row, *middle, 1)
    numbers = dict(zip(SIZES, after.sizes.tolist(), strict=True))
    rows, tops = numbers["rows"], after.bands[:, 0]
    advance = int(tops[1] - tops[0]) if halves and len(tops) > 1 else rows
    y, x = np.divmod(before.outward // LANES, middle[1])
    places = np.array([row_of(row - tops[0], rows, advance) for row in range(middle[0])], np.int64)  # type: ignore[no-untyped-call]
    sizes, bands = before.sizes.copy(), after.bands.copy()
    sizes[SIZES["out_plane"]] = numbers["channel_pitch"]
    bands[:, 3] = rows
    outward = places[y] * numbers["row_pitch"] + (x + numbers["left"]) * LANES
    return Pair(replace(before, sizes=sizes, outward=outward), replace(after, bands=bands), advance)
