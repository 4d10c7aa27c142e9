"""What a mask leaves of a network, layer by layer, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import Tensor, nn

from driveprune.container import Kind
from driveprune.graph import flow
from driveprune.mask import everything
from driveprune.netfile import Shared
from driveprune.screen import Screen, as_markup


@dataclass(frozen=True)
class Layer:
    """One weight tensor: how much there is, how much is kept, how much of that lies on a path."""

    name: str
    shape: tuple[int, ...]
    weights: int
    kept: int
    effective: int | None

    @property
    def density(self) -> float:
        """The kept fraction."""
        return self.kept / max(1, self.weights)


@dataclass(frozen=True)
class Summary:
    """The layers of a mask and their sums; printed, a table with bars."""

    layers: tuple[Layer, ...]
    macs: int | None
    dense_macs: int | None

    @property
    def weights(self) -> int:
        """All weights, kept or not."""
        return sum(layer.weights for layer in self.layers)

    @property
    def kept(self) -> int:
        """The weights that are kept."""
        return sum(layer.kept for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """The fraction of weights that is removed."""
        return 1 - self.kept / max(1, self.weights)

    @property
    def effective_sparsity(self) -> float | None:
        """The same when weights on no path from input to output count as removed; None without a model."""
        paths = [layer.effective for layer in self.layers if layer.effective is not None]
        return 1 - sum(paths) / max(1, self.weights) if len(paths) == len(self.layers) else None

    def __str__(self) -> str:
        console = Screen(width=100, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        known = self.effective_sparsity is not None
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer", overflow="fold")
        for title in ("shape", "weights", "kept", *(["on a path"] if known else []), "density"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for layer in self.layers:
            cells = [str(layer.effective)] if known else []
            table.add_row(*_cells(layer), *cells, f"{100 * layer.density:.2f}%", "█" * round(20 * layer.density))
        yield table
        yield f"{self.kept:,} of {self.weights:,} weights are kept: sparsity {self.sparsity:.4%}"
        if self.effective_sparsity is not None:
            yield f"effective sparsity {self.effective_sparsity:.4%}"
        if self.macs is not None and self.dense_macs:
            yield f"{self.macs:,} multiply-adds, {self.macs / self.dense_macs:.2%} of dense"


def _cells(layer: Layer) -> tuple[str, str, str, str]:
    shape = "×".join(map(str, layer.shape))
    kept = f"{layer.kept:,}" if layer.kept else "[bold]empty[/]"
    return as_markup(layer.name), shape, f"{layer.weights:,}", kept


def summary(mask: Mapping[str, Tensor], model: nn.Module | None = None, example: Any = None) -> Summary:
    """The layers of a mask; with a model and an example input, also effective sparsity and multiply-adds.

    Multiply-adds are those of the input as it is given: one example, such as `x[:1]`, or all that are in it.

    >>> import torch
    >>> summary({"fc.weight": torch.tensor([[True, False, False, False]])}).layers[0].density
    0.25
    """
    found = None if model is None else flow(model, mask, example)
    layers = tuple(
        Layer(
            name=name,
            shape=tuple(kept.shape),
            weights=kept.numel(),
            kept=int(kept.count_nonzero()),
            effective=None if found is None else int(found.effective[name].count_nonzero()),
        )
        for name, kept in mask.items()
    )
    if found is None:
        return Summary(layers, None, None)
    return Summary(layers, found.macs(mask), found.macs(everything(mask)))


def counted(kept: Mapping[str, int], kinds: Mapping[str, Kind]) -> Summary:
    """The layers of a file, from its counts alone: see `driveprune.netfile.outline`."""
    layers = (Layer(name, kinds[name].shape, kinds[name].size, count, None) for name, count in kept.items())
    return Summary(tuple(layers), None, None)


@dataclass(frozen=True)
class Overlap:
    """What two masks have in common in a layer."""

    name: str
    first: int
    second: int
    both: int
    expected: float
    """How many random masks of the same sizes would have in common."""

    @property
    def overlap(self) -> float:
        """Kept by both, as a fraction of what either keeps; 1 if both keep nothing."""
        either = self.first + self.second - self.both
        return self.both / either if either else 1.0

    @property
    def chance(self) -> float:
        """The same fraction for random masks of the same sizes."""
        either = self.first + self.second - self.expected
        return self.expected / either if either else 1.0


def overlaps(found: Mapping[str, Shared]) -> list[Overlap]:
    """What two masks have in common, layer by layer, and in all of them (the last row).

    >>> overlaps({"w": Shared(weights=3, first=2, second=2, both=1)})[0].overlap
    0.3333333333333333
    """
    rows = [
        Overlap(name, each.first, each.second, each.both, each.first * each.second / max(1, each.weights))
        for name, each in found.items()
    ]
    sums = [sum(getattr(row, part) for row in rows) for part in ("first", "second", "both", "expected")]
    return [*rows, Overlap("all", *sums)]
