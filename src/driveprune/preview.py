"""What each method would do to a network, without doing it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import nn

from driveprune import methods as known
from driveprune.cut import Budget, Settings, knobs_of_cut, prune
from driveprune.gradients import cross_entropy, endless, scoring
from driveprune.graph import CollapseWarning, Flow, Inputs, example_of, flow
from driveprune.kinds import OptionError, brief, checked
from driveprune.mask import (
    Loss,
    Mask,
    all_weights,
    check_fits,
    check_sparsity,
    empty_layers,
    restore,
)
from driveprune.mask import sparsity as sparsity_of
from driveprune.plan import Plan, Prune, Reinit, Rewind, Shuffle, Train
from driveprune.screen import Screen, as_markup

_PHASES = (Train, Prune, Rewind, Shuffle, Reinit)


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
    """The rows of all methods that can work on the network; printed, a table of layers by methods."""

    sparsity: float
    weights: int
    macs: int | None
    rows: tuple[Row, ...]
    budget: Budget = "weights"
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Methods that cannot work on this network, and why."""
    not_followed: str | None = None
    """Why paths through the network could not be followed, if they could not."""

    def __repr__(self) -> str:
        return f"<preview of {', '.join(row.method for row in self.rows)} at sparsity {self.sparsity:g}>"

    def __str__(self) -> str:
        console = Screen(width=120, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        macs = "" if self.macs is None else f" and {self.macs:,} multiply-adds"
        what = " of the multiply-adds" if self.budget == "macs" else ""
        yield f"sparsity {self.sparsity:g}{what}: of {self.weights:,} weights{macs} there would be left"
        yield _table(self)
        for reason in dict.fromkeys(self.skipped.values()):
            out = [method for method, why in self.skipped.items() if why == reason]
            said = "is left out, it" if len(out) == 1 else "are left out, they"
            yield Text(f"{', '.join(out)} {said} cannot work here: {reason}")
        if self.not_followed is not None:
            yield Text(f"?: paths through the network could not be followed: {self.not_followed}")
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
    methods: known.Method | Sequence[known.Method] | None = None,
    knobs: Mapping[Any, Mapping[str, Any]] | None = None,
    loss: Loss = cross_entropy,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    frozen: bool = False,
    min_kept: int = 0,
    budget: Budget = "weights",
    seed: int = 0,
    show: bool = True,
) -> Preview:
    """Print what every method that cuts in one go would leave of a network; the model stays as it is.

    For each method: the density of each layer, empty layers, the sparsity that counts when weights on no path
    from input to output are left out, and multiply-adds for one example. A method that cannot work on this network
    is left out, and why is said below the table.

    Args:
        model: the network.
        batches: batches to score with.
        sparsity: the fraction of weights to remove.
        methods: the methods to look at; by default all that cut in one go. Of those that train first (DRIVE,
            magnitude) the table shows a cut of the weights as they are now.
        knobs: options by method, such as `{"grasp": {"temperature": 1.0}}`.
        loss, include, exclude, frozen, min_kept, budget, seed: as for `driveprune.prune`.
        show: print the table.

    """
    check_sparsity(sparsity)
    checked("show", show, bool)
    settings = Settings(
        loss=loss, include=include, exclude=exclude, frozen=frozen, min_kept=min_kept, budget=budget, seed=seed
    )
    chosen = _chosen(methods)
    given = _knobs_of(chosen, knobs, sparsity)
    whole = settings.everything(model)
    weights = check_fits(model, whole)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    batches = list(batches) if isinstance(batches, Iterator) else batches
    follower = _Follower(model, next(endless(batches)), loss, settings.seed)
    cut = partial(
        prune, model, batches, sparsity=sparsity, loss=loss, mask=whole, seed=seed, min_kept=min_kept, budget=budget
    )
    rows, failed = _tried(chosen, given, cut, follower, lambda: restore(weights, before))
    if failed and not rows:
        raise _none_works(failed)
    dense = follower(whole)
    found = Preview(
        sparsity, all_weights(whole), None if dense is None else dense.macs(whole), tuple(rows), budget,
        {method: _said(error) for method, error in failed.items()}, follower.reason,
    )  # fmt: skip
    if show:
        Screen().print(found)
    return found


def _tried(
    methods: Sequence[known.Method],
    knobs: Sequence[Mapping[str, Any] | None],
    cut: Callable[..., Mask],
    follower: _Follower,
    undo: Callable[[], None],
) -> tuple[list[Row], dict[str, Exception]]:
    """A row for each method that can work on the network, and the errors of the others."""
    rows, failed = [], dict[str, Exception]()
    for method, own in zip(methods, knobs, strict=True):
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CollapseWarning)
                mask = cut(method=method, knobs=own)
        except Exception as error:  # whatever this method makes of this network
            failed[known.describe(method)] = error
            continue
        finally:
            undo()
        rows.append(_row(method, mask, follower(mask), time.perf_counter() - start))
    return rows, failed


def _chosen(methods: known.Method | Sequence[known.Method] | None) -> list[known.Method]:
    """The methods to look at, or an error if one does not cut in one go."""
    if methods is None:
        return list(one_go())
    is_plan = isinstance(methods, list) and all(isinstance(each, _PHASES) for each in methods)
    several: Any = methods if isinstance(methods, list | tuple) and not is_plan else [methods]
    for method in several:
        if not _cuts_in_one_go(_sample(method)):
            raise ValueError(
                f"{known.describe(method)} trains between its cuts: preview shows methods that cut in one go, "
                f"such as {', '.join(one_go())}"
            )
    if not several or any(method in several[:place] for place, method in enumerate(several)):
        names = ", ".join(map(known.describe, several))
        raise OptionError(f"methods must be one or more different ones, got {names or 'none'}")
    return list(several)


def _knobs_of(
    methods: Sequence[known.Method], knobs: Mapping[Any, Mapping[str, Any]] | None, sparsity: float
) -> list[Mapping[str, Any] | None]:
    """The knobs of each method, checked; an error for those that cannot act."""
    if not isinstance(knobs, Mapping | None):
        raise OptionError(f"knobs are given by method, as {{'synflow': {{'cuts': 10}}}}, got {brief(knobs)}")
    names = [known.describe(method) for method in methods]
    by_name = {known.describe(method): own for method, own in (knobs or {}).items()}
    for name, own in by_name.items():
        if name not in names:
            raise ValueError(f"knobs are given for {name}, which is not among the methods: {', '.join(names)}")
        if not isinstance(own, Mapping):
            raise TypeError(f"knobs are given by method, as {{'{name}': {{'cuts': 10}}}}, got {own!r} for {name}")
        method = methods[names.index(name)]
        knobs_of_cut(method, sparsity, known.check_knobs(method, own))
    return [by_name.get(name) for name in names]


def _none_works(failed: Mapping[str, Exception]) -> Exception:
    """The error if there is nothing to show."""
    reasons = dict.fromkeys(map(_said, failed.values()))
    several = "; ".join(f"{method}: {_said(error)}" for method, error in failed.items())
    what = next(iter(reasons)) if len(reasons) == 1 else several
    error = ValueError(f"no method can work on this network: {what}")
    error.__cause__ = next(iter(failed.values()))
    return error


def _said(error: Exception) -> str:
    """An error in one line; one that is not meant for readers with its kind."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


class _Follower:
    """Follows paths for one example; remembers why, if it cannot."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, seed: int) -> None:
        self.model = model
        self.reason: str | None = None
        self.example: Inputs | None = None
        try:
            with scoring(model, seed) as plain:
                self.example = example_of(plain, batch, loss)
        except Exception as error:  # whatever the user's loss or forward raises
            self.reason = _said(error)

    def __call__(self, mask: Mask) -> Flow | None:
        """The paths through the network, which the table shows as "?" where its code refuses to be followed."""
        if self.example is None:
            return None
        try:
            return flow(self.model, mask, self.example)
        except Exception as error:  # whatever the user's own forward raises
            self.reason = _said(error)
            return None


def one_go() -> list[str]:
    """The methods that do not train between their cuts.

    >>> one_go()
    ['drive', 'driveflow', 'erk', 'force', 'grasp', 'magnitude', 'random', 'snip', 'synflow']
    """
    return [name for name in known.names() if _cuts_in_one_go(_sample(name))]


def _cuts_in_one_go(plan: Plan) -> bool:
    return sum(isinstance(phase, Prune | Rewind) for phase in plan) == 1


def _sample(method: known.Method) -> Plan:
    return known.make_plan(method, 0.5, 10**6, 10)


def _row(method: known.Method, mask: Mask, found: Flow | None, seconds: float) -> Row:
    return Row(known.describe(method), isinstance(_sample(method)[0], Train), mask, found, seconds)


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
