"""The first layers of a batch, for inference: image by image, while rows are whole vectors.

What a tile reads is then half as much as with the images side by side, so more of it comes from the first-level
cache, and nothing is copied on the way from layer to layer. What follows, with smaller images, is done side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from driveprune.sparse.blocked import flat
from driveprune.sparse.flat import Flat, first_by_rows
from driveprune.sparse.memory import Floats
from driveprune.sparse.pairs import kernel_of
from driveprune.sparse.step import Step
from driveprune.sparse.tiling import Layer

Shape = tuple[int, int, int]

MOST_WEIGHTS = 160
"""With more weights for each output, layers are faster side by side: so much is done with what is read once."""

LEAST_LAYERS = 4
"""So many layers are worth the copying between both ways."""


def split(
    steps: list[Step], inputs: dict[str, Shape], outputs: tuple[str, ...]
) -> tuple[list[Step], list[Step], str] | None:
    """The first steps, the others, and the one value that leads from these to those; None if that does not pay.

    Side by side, a layer takes the pool that follows it into its own step: pools are left to the others.
    """
    if len(inputs) != 1:
        return None
    before_pool = next((number for number, step in enumerate(steps) if step.kind == "max_pool"), len(steps))
    for count in range(min(first_by_rows(steps, inputs), before_pool), 0, -1):
        first, rest = steps[:count], steps[count:]
        needed = {*outputs, *(name for step in rest for name in (*step.inputs, step.plus))}
        between = needed & {*inputs, *(step.output for step in first)}
        if between == {first[-1].output} and _layers(rest):
            return (first, rest, first[-1].output) if _pay(_layers(first)) else None
    return None


def _layers(steps: list[Step]) -> list[Layer]:
    return [kernel_of(step).layer for step in steps if step.kind == "layer"]


def _pay(layers: list[Layer]) -> bool:
    """Whether there are enough layers, with few weights for each output."""
    weights, outputs = sum(len(each.places) for each in layers), sum(each.outputs for each in layers)
    return len(layers) >= LEAST_LAYERS and weights <= MOST_WEIGHTS * outputs


class Wide:
    """The first steps of a region, for images of a size."""

    def __init__(self, steps: list[Step], inputs: dict[str, Shape], output: str) -> None:
        self._flat = Flat(steps, inputs, (output,), team=1)
        self.output = output
        self.shape: Shape = self._flat.outputs[0].shape
        self.refresh = self._flat.weights.refresh
        self._places = np.array([each.planes for each in (*self._flat.inputs, *self._flat.outputs)], np.int64)

    def arenas(self, team: int) -> Floats:
        """Memory for each thread."""
        found: Floats = torch.zeros(team, self._flat.size, dtype=torch.float32).numpy()
        return found

    def given(self, arenas: Floats, between: Floats, images: Tensor) -> tuple[Any, ...]:
        """What the kernels need, to do some images."""
        x, weights = flat(images.float().contiguous()), self._flat.weights
        return arenas, self._places, x, between, *self._flat.tables, weights.values, weights.bias


def nothing() -> tuple[Any, ...]:
    """The same, where all steps are done side by side."""
    floats, ints, short = (np.zeros(0, kind) for kind in (np.float32, np.int64, np.int32))
    rows, table = floats.reshape(0, 0), ints.reshape(0, 0)
    return rows, table, floats, rows, table, ints, table, table, short, short, floats, floats
