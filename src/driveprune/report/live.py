"""A running sweep in the terminal: the table filling up, learning curves as sparklines, the time left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from rich import table as rich_table
from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from driveprune.report import tables
from driveprune.report.groups import Group, groups
from driveprune.runs.store import Run, Standing, read_runs, read_wanted
from driveprune.screen import as_markup, printable

_BLOCKS = "▁▂▃▄▅▆▇█"
_STANDINGS: tuple[Standing, ...] = ("done", "running", "unfinished", "failed", "damaged", "missing")
STALE = 30.0
"""Seconds without a sign after which the screen says so."""


@dataclass
class Store:
    """Some stores that are looked at again and again; what is done is read once."""

    paths: Sequence[Path]
    _done: dict[Path, Run] = field(default_factory=dict)

    def look(self) -> tuple[list[Run], dict[str, int]]:
        """All runs as they are now, and the steps of those that sweeps want."""
        runs = read_runs(self.paths, known=self._done)
        self._done = {run.path: run for run in runs if run.standing == "done"}
        wanted = (read_wanted(path) for path in self.paths)
        return runs, {name: steps for found in wanted for name, (_, steps) in found.items()}


def watch(
    paths: Sequence[Path], console: Console, *, every: float = 1.0, wait: Callable[[float], None] = time.sleep
) -> None:
    """Show stores until nothing in them is left to do; once, if the console is no terminal."""
    store = Store(paths)
    if not console.is_terminal:
        console.print(screen(*store.look(), now=time.time()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            runs, steps = store.look()
            live.update(screen(runs, steps, now=time.time()), refresh=True)
            if all(run.standing in {"done", "failed", "damaged"} for run in runs):
                return
            wait(every)


def screen(runs: Sequence[Run], steps: Mapping[str, int], *, now: float) -> RenderableType:
    """What is known of some runs at a moment."""
    parts: list[RenderableType] = [Text(said(runs, steps), style="bold")]  # first: a small screen cuts off the end
    active = [run for run in runs if run.standing == "running"]
    if active:
        parts.append(_active(active, now))
    for group in groups(runs):
        parts += ["", *_group(group)]
    return Stack(*parts)


def _group(group: Group) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(printable(group.title), style="bold")]
    if group.methods:
        parts.append(tables.to_rich(tables.accuracy(group)))
    parts += [Text(line) for line in tables.notes(group) if line.startswith(tables.DAGGER)]
    failed = [line for line in tables.unfinished(group) if line.startswith(("failed", "damaged"))]
    return [*parts, *(Text(line, style="red") for line in failed)]


def _active(runs: Iterable[Run], now: float) -> rich_table.Table:
    made = rich_table.Table("running", "", "", "accuracy", "", "left", box=None, padding=(0, 1))
    for run in runs:
        status = Status.of(run)
        values = status.values
        made.add_row(
            as_markup(_name(run)),
            ProgressBar(total=max(1, status.steps), completed=status.step, width=16),
            as_markup(status.work)
            + (f" (no sign for {duration(now - status.time)})" if now - status.time > STALE else ""),
            f"[cyan]{sparkline(values[-30:])}[/]",
            f"{100 * values[-1]:.1f}%" if values else "",
            duration(status.left),
        )
    return made


def _name(run: Run) -> str:
    """What a person wants to know of a run, short enough for a line."""
    spec = run.spec
    check = f" +{spec['check']}" if spec["check"] else ""
    sparsity = f" {100 * spec['sparsity']:g}%" if spec["sparsity"] else ""
    name = f"{spec['recipe']['data']} {spec['recipe']['model']} {spec['method']}{check}{sparsity} seed {spec['seed']}"
    return printable(name)


@dataclass(frozen=True)
class Status:
    """What a run says of itself, whatever is in the file."""

    step: int = 0
    steps: int = 0
    work: str = "starting"
    values: tuple[float, ...] = ()
    time: float = float("inf")
    rate: float | None = None
    """Steps a second since it was begun or resumed."""

    @classmethod
    def of(cls, run: Run) -> Status:
        """The status of a run; that of one at its start if there is none, or if it makes no sense."""
        found: Mapping[str, Any] = run.status or {}
        try:
            step, steps, now = int(found["step"]), int(found["steps"]), float(found["time"])
            values = tuple(float(value) for value in found["values"] if isfinite(value))
            seconds = now - float(found.get("began", now))
            rate = (step - int(found.get("began_step", step))) / seconds if seconds > 0 else None
            return cls(step, steps, printable(str(found["work"])), values, now, rate or None)
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()

    @property
    def left(self) -> float | None:
        """Seconds, by its own rate."""
        return (self.steps - self.step) / self.rate if self.rate and self.rate > 0 else None


def said(runs: Sequence[Run], steps: Mapping[str, int]) -> str:
    """How many runs are how far, and how long it will take, in a line."""
    counts = Counter(run.standing for run in runs)
    text = ", ".join(f"{counts[standing]} {standing}" for standing in _STANDINGS if counts[standing])
    left = time_left(runs, steps)
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {text}" + (
        f"; about {duration(left)} left" if left is not None else ""
    )


def time_left(runs: Sequence[Run], steps: Mapping[str, int]) -> float | None:
    """Seconds until all is done at the present rate: the steps that are left, by the steps a second of all processes.

    None if nothing is left or nobody is working.
    """
    rate = sum(Status.of(run).rate or 0.0 for run in runs if run.standing == "running")
    left = 0
    for run in runs:
        if run.standing in {"running", "unfinished", "missing"}:
            status = Status.of(run)
            left += max(0, (status.steps or steps.get(run.path.name, 0)) - status.step)
    return left / rate if rate and left else None


def sparkline(values: Sequence[float]) -> str:
    """A curve in a line, from the lowest to the highest of its values.

    >>> sparkline([0.1, 0.5, 0.9])
    '▁▅█'
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(top * (value - low) / (high - low)) if high > low else 0] for value in values)


def duration(seconds: float | None) -> str:
    """A time as a person says it.

    >>> duration(75), duration(3700), duration(None)
    ('1 min 15 s', '1 h 1 min', '?')
    """
    if seconds is None or seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
