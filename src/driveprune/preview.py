"""What each method would do to a network, without doing it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import nn

from driveprune import methods as known
from driveprune.cut import prune
from driveprune.gradients import cross_entropy, endless, scoring
from driveprune.graph import CollapseWarning, Flow, Inputs, example_of, flow
from driveprune.mask import (
    Loss,
    Mask,
    all_weights,
    check_sparsity,
    empty_layers,
    everything,
    prunable,
    restore,
)
from driveprune.mask import sparsity as sparsity_of
from driveprune.plan import Plan, Prune, Rewind, Train
from driveprune.screen import Screen, as_markup


@dataclass(frozen=True)
class Row:
    """What one method would leave of the network."""

    method: str
    trains_first: bool
    mask: Mask
    flow: Flow | None
    """Its paths, where the network can be followed."""
    seconds: float

    @property
    def effective_sparsity(self) -> float | None:
        """The sparsity when weights on no path count as removed, too; None where that is not known."""
        return None if self.flow is None else sparsity_of(self.flow.effective)

    @property
    def connected(self) -> bool:
        """Whether a path is left from input to output, as far as is known."""
        return self.flow is None or self.flow.connected

    @property
    def macs(self) -> int | None:
        """Multiply-adds for one example; None where they cannot be counted."""
        return None if self.flow is None else self.flow.macs(self.mask)

    @property
    def densities(self) -> dict[str, float]:
        """The kept fraction of each layer."""
        return {name: int(kept.count_nonzero()) / kept.numel() for name, kept in self.mask.items()}

    @property
    def empty_layers(self) -> list[str]:
        """Layers of which nothing is left."""
        return empty_layers(self.mask)


@dataclass(frozen=True)
class Preview:
    """The rows of all methods; printed, a table of layers by methods."""

    sparsity: float
    weights: int
    macs: int | None
    rows: tuple[Row, ...]

    def __repr__(self) -> str:
        return f"<preview of {', '.join(row.method for row in self.rows)} at sparsity {self.sparsity:g}>"

    def __str__(self) -> str:
        console = Screen(width=120, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        macs = "" if self.macs is None else f" and {self.macs:,} multiply-adds"
        yield f"sparsity {self.sparsity:g}: of {self.weights:,} weights{macs} there would be left"
        yield _table(self)
        if any(row.trains_first for row in self.rows):
            yield "*: trains before it cuts; shown is a cut of the weights as they are now"
        if any(row.empty_layers for row in self.rows):
            yield "[bold]empty[/]: nothing is left of the layer"
        if not all(row.connected for row in self.rows):
            yield "[bold]cut[/]: no path is left from input to output, the network cannot learn"


def preview(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    sparsity: float,
    methods: str | Sequence[known.Method] | None = None,
    loss: Loss = cross_entropy,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    seed: int = 0,
    show: bool = True,
) -> Preview:
    """Print what every method that cuts in one go would leave of a network; the model stays as it is.

    For each method: the density of each layer, empty layers, the sparsity that counts when weights on no path
    from input to output are left out, and multiply-adds for one example.

    Args:
        model: the network.
        batches: batches to score with.
        sparsity: the fraction of weights to remove.
        methods: the methods to look at; by default all that cut in one go. Of those that train first (DRIVE,
            magnitude) the table shows a cut of the weights as they are now.
        loss, include, exclude, seed: as for `driveprune.prune`.
        show: print the table.

    """
    check_sparsity(sparsity)
    weights = prunable(model, include=include, exclude=exclude)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    whole = everything(weights)
    batches = list(batches) if isinstance(batches, Iterator) else batches
    with scoring(model, seed) as plain:
        example = example_of(plain, next(endless(batches)), loss)
    if isinstance(methods, str):
        methods = [methods]
    rows = []
    for method in methods if methods is not None else one_go():
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CollapseWarning)
                mask = prune(model, batches, method=method, sparsity=sparsity, loss=loss, mask=whole, seed=seed)
        finally:
            restore(weights, before)
        rows.append(_row(model, method, mask, example, time.perf_counter() - start))
    dense = _follow(model, whole, example)
    found = Preview(sparsity, all_weights(whole), None if dense is None else dense.macs(whole), tuple(rows))
    if show:
        Screen().print(found)
    return found


def one_go() -> list[str]:
    """The methods that do not train between their cuts.

    >>> one_go()
    ['drive', 'erk', 'force', 'grasp', 'magnitude', 'random', 'snip', 'synflow']
    """
    plans = {name: _sample(name) for name in known.names()}
    return [name for name, plan in plans.items() if sum(isinstance(p, Prune | Rewind) for p in plan) == 1]


def _sample(method: known.Method) -> Plan:
    return known.make_plan(method, 0.5, 100, 10)


def _row(model: nn.Module, method: known.Method, mask: Mask, example: Inputs, seconds: float) -> Row:
    return Row(
        method=known.describe(method),
        trains_first=isinstance(_sample(method)[0], Train),
        mask=mask,
        flow=_follow(model, mask, example),
        seconds=seconds,
    )


def _follow(model: nn.Module, mask: Mask, example: Inputs) -> Flow | None:
    """The paths through the network; None if its code refuses to be followed, which the table shows as "?"."""
    try:
        return flow(model, mask, example)
    except Exception:  # whatever the user's own forward raises
        return None


def _table(found: Preview) -> Table:
    table = Table(title="density of each layer, in %", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    table.add_column("weights", justify="right", no_wrap=True)
    for row in found.rows:
        table.add_column(
            as_markup(row.method) + "*" * row.trains_first, justify="right", overflow="fold", min_width=5
        )
    for name, kept in found.rows[0].mask.items() if found.rows else ():
        table.add_row(
            as_markup(name.removesuffix(".weight")),
            f"{kept.numel():,}",
            *(_percent(row.densities[name], "empty") for row in found.rows),
        )
    table.add_section()
    table.add_row("effective sparsity", "", *(_effective(row) for row in found.rows))
    table.add_row("empty layers", "", *(str(len(row.empty_layers)) for row in found.rows))
    table.add_row("multiply-adds", "", *(_share(row.macs, found.macs) for row in found.rows))
    return table


def _percent(fraction: float, nothing: str) -> str:
    """Two digits that count: 100, 57, 4.8, 0.031."""
    if not fraction:
        return f"[bold]{nothing}[/]"
    percent = 100 * fraction
    return f"{percent:.0f}" if percent >= 9.95 else f"{percent:.2g}"


def _share(macs: int | None, dense: int | None) -> str:
    return "?" if macs is None or not dense else _percent(macs / dense, "none")


def _effective(row: Row) -> str:
    if row.effective_sparsity is None:
        return "?"
    return f"{100 * row.effective_sparsity:.2f}" if row.connected else "[bold]cut[/]"
