"""What a sparse network runs on, layer by layer, and why; and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import nn

from driveprune.mask import owners
from driveprune.screen import Screen, as_markup
from driveprune.sparse.choice import INFERENCE, TRAINING, Measured
from driveprune.sparse.layers import SparseLayer, Way
from driveprune.sparse.made import Made, made_of
from driveprune.sparse.reasons import share

WIDTH = 80
_FILLED_IN = "torch, with zeros"
_BY: Mapping[Way, str] = {
    "sparse": "the sparse kernels", "dense": "torch, zeros filled in",
    "channels last": "torch, zeros filled in, channels last",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A masked weight, and what computes with it."""

    name: str
    kind: str
    """The class of the module that has it."""
    density: float
    computed_by: str
    """A region of sparse kernels, a sparse layer by itself, or torch, with zeros filled in."""
    reason: str
    """Why it is torch; empty otherwise."""


@dataclass(frozen=True)
class Explanation:
    """What a sparse network runs on; printed, a table with reasons and times."""

    layers: tuple[Place, ...]
    sparse_share: float
    """How many of the masked weights are in layers that the sparse kernels know."""
    inference: Way
    training: Way
    """What was chosen for the network as a whole."""
    timings: tuple[Measured, ...]
    """Empty with `layers="sparse"`: nothing is measured then."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""
    fallbacks: tuple[str, ...]
    """Why the network runs by its own code, layer by layer, and other things that are not as they could be."""

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        timings = [{**asdict(each), "seconds": dict(each.seconds)} for each in self.timings]
        return {**asdict(self), "timings": timings}

    def __str__(self) -> str:
        console = Screen(width=WIDTH, force_terminal=False)
        with console.capture() as captured:
            console.print(self, highlight=False)
        return captured.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("masked weight", overflow="fold", max_width=36)
        table.add_column("in", overflow="fold", max_width=15)
        table.add_column("density", justify="right", no_wrap=True)
        table.add_column("computed by", overflow="fold", max_width=17)
        for each in self.layers:
            table.add_row(as_markup(each.name), as_markup(each.kind), f"{100 * each.density:.2f}%", each.computed_by)
        yield table
        yield f"{self.sparse_share:.1%} of the masked weights are in layers that the sparse kernels know"
        for reason, names in self._by_reason().items():
            yield as_markup(f"not sparse: {_listed(names)}: {reason}")
        for line in self.fallbacks:
            yield as_markup(f"fallback: {line}")
        for work, way in () if not self.sparse_share else ((INFERENCE, self.inference), (TRAINING, self.training)):
            yield f"{work}: {_BY[way]}"
            for timing in self.timings:
                if timing.work == work:
                    yield f"  batch {timing.batch}: {_milliseconds(timing)}"
        for line in self.notes:
            yield as_markup(f"not measured: {line}")

    def _by_reason(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for each in self.layers:
            if each.reason:
                found.setdefault(each.reason, []).append(each.name)
        return found


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _milliseconds(measured: Measured) -> str:
    """All times that were measured."""
    words = {"sparse": "sparse", "dense": "torch", "channels last": "torch with channels last"}
    times = ", ".join(f"{words[way]} {1e3 * seconds:.3g} ms" for way, seconds in measured.seconds.items())
    return f"{times} (of the processors: the machine was busy)" if measured.busy else times


def explain(model: nn.Module) -> Explanation:
    """What each masked weight of a sparse network is computed by, and why; what was measured, and chosen.

    Args:
        model: a network made by `sparsify`.

    >>> import torch
    >>> from driveprune import sparsify
    >>> net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(16, 8))
    >>> mask = {"0.weight": torch.rand(4, 1, 3, 3) > 0.5, "2.weight": torch.rand(8, 16) > 0.9}
    >>> found = explain(sparsify(net, mask, torch.ones(1, 4, 4, 4), layers="sparse"))
    >>> [(each.computed_by, each.reason) for each in found.layers]
    [('torch, with zeros', 'a depthwise convolution'), ('region 0', '')]

    """
    made = made_of(model)
    if made is None:
        raise TypeError(f"explain takes a network that sparsify made, got {type(model).__name__}")
    layers = _sparse_layers(model)
    regions = _regions(made)
    kinds = {prefix.rstrip("."): type(module).__name__ for prefix, module in owners(made.origin.skeleton)}
    return Explanation(
        layers=tuple(_place(name, made, layers, regions, kinds) for name in made.mask),
        sparse_share=share(made.mask, layers.keys() & made.mask.keys()),
        inference=made.ways.inference,
        training=made.ways.training,
        timings=made.timings,
        notes=made.notes,
        fallbacks=made.fallbacks,
    )


def _sparse_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """Sparse layers by the names of their weights."""
    return {prefix + "weight": module for prefix, module in owners(model) if isinstance(module, SparseLayer)}


def _regions(made: Made) -> dict[nn.Module, int]:
    """For each layer in a region the region's number."""
    regions = made.graphs.regions.values() if made.graphs is not None else ()
    return {step.module: number for number, each in enumerate(regions) for step in each.steps if step.module}


def _place(
    name: str,
    made: Made,
    layers: Mapping[str, SparseLayer],
    regions: Mapping[nn.Module, int],
    kinds: Mapping[str, str],
) -> Place:
    layer = layers.get(name)
    kept = made.mask[name]
    reason, by = made.reasons.get(name, ""), _FILLED_IN
    if layer is not None and made.ways.inference != "sparse" and made.ways.training != "sparse":
        reason = "the network as a whole is faster so, by a measurement"
    elif layer is not None and layer.dense:
        reason = "the layer is faster so, by a measurement"
    elif layer is not None:
        by = f"region {regions[layer]}" if layer in regions else "a sparse layer"
    density = float(kept.float().mean()) if kept.numel() else 0.0
    return Place(name, kinds.get(name.rpartition(".")[0], ""), density, by, reason)
