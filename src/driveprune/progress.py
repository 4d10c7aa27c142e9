"""What a person sees of a training: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from driveprune.screen import Screen
from driveprune.train import Moment, Row


@contextmanager
def shown(title: str, enabled: bool = True, console: Console | None = None) -> Iterator[Callable[[Moment], None]]:
    """A watcher for `train`: a bar while it runs if this is a terminal, else a line an epoch, on stderr."""
    console = console or Screen(stderr=True)
    if not enabled:
        yield lambda _: None
    elif not console.is_terminal:
        yield _Lines(title, console)
    else:
        columns = (
            TextColumn("{task.description}"), BarColumn(20),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[last]}"),
        )  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task(title, total=1, last="")

            def update(moment: Moment) -> None:
                about = described(moment.rows[-1]) if moment.rows else ""
                bars.update(
                    task, description=f"{title} · {moment.work}", completed=moment.step,
                    total=max(1, moment.steps), last=about,
                )  # fmt: skip

            yield update


class _Lines:
    """Prints a line for every new row, and when another kind of long work begins."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console, self._rows, self._work = title, console, 0, ""

    def __call__(self, moment: Moment) -> None:
        for row in moment.rows[self._rows :]:
            self._print(described(row))
        self._rows = len(moment.rows)
        work = moment.work.partition(",")[0]
        if work in {"resuming", "pruning"} and work != self._work:
            self._print(f"{work} (step {moment.step} of {moment.steps})" if moment.steps else work)
        self._work = work

    def _print(self, text: str) -> None:
        with suppress(OSError, SystemExit):  # whoever looked is gone (rich ends then), or the disk is full
            self._console.print(f"{self._title}: {text}", highlight=False, markup=False, soft_wrap=True)


def described(row: Row) -> str:
    """A row of results in words.

    >>> described({"cycle": 0, "epoch": 3, "loss": 0.25, "rate": 0.1, "sparsity": 0.98, "test": 0.9})
    'epoch 3, loss 0.2500, sparsity 98.0%, test 90.00%'
    """
    cycle = f"cycle {row['cycle']}, " if row["cycle"] else ""
    values = "".join(f", {name} {100 * row[name]:.2f}%" for name in ("holdout", "test") if name in row)
    return f"{cycle}epoch {row['epoch']}, loss {row['loss']:.4f}, sparsity {100 * row['sparsity']:.1f}%{values}"
