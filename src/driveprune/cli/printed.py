"""What several commands print."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from driveprune.report import tables
from driveprune.report.groups import finding_of, groups
from driveprune.runs.store import Run, read_run
from driveprune.screen import Screen, as_markup


def print_report(runs: Iterable[Run], console: Console | None = None) -> None:
    """The tables of runs, and what did not finish."""
    console = console or Screen()
    for group in groups(runs):
        title = as_markup(group.title)
        console.print(f"\n[bold]{title}[/]", highlight=False, soft_wrap=True)
        if group.methods:
            for table in (tables.accuracy(group, "last"), tables.accuracy(group, "best"), tables.times(group)):
                console.print(tables.to_rich(table))
        for line in (*tables.notes(group), *tables.unfinished(group)):
            console.print(as_markup(line), highlight=False, soft_wrap=True)


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100 * fraction:.2f}%"


def print_run(folder: Path) -> None:
    """What came of a run, or how it stands."""
    found = read_run(folder)
    console = Screen()
    console.print(as_markup(folder), highlight=False, soft_wrap=True)
    if found.result is None:
        console.print(
            f"{found.standing}{': ' + as_markup(found.error, lines=True) if found.error else ''}", highlight=False
        )
        return
    result = found.result
    by = "" if result["best_by"] == "test" else ", chosen by held-out images"
    console.print(
        f"[bold]{_percent(result['last'])}[/] test accuracy on {as_markup(result['data'])} after the last epoch, "
        f"{_percent(result['best'])} after the best{by}", highlight=False,
    )  # fmt: skip
    effective = result["effective_sparsity"]
    shown_effective = "unknown" if effective is None else f"{effective:.4%}"
    console.print(f"sparsity {result['sparsity']:.4%}, effective {shown_effective}", highlight=False)
    if result["collapsed"]:
        console.print("[yellow]no path leads from input to output: the network cannot learn[/]")
    finding = finding_of(folder)
    if finding is not None and finding.word in {"unstable", "weak"}:
        console.print(f"[yellow]{finding.word}:[/] {as_markup(finding.why)}", highlight=False, soft_wrap=True)
    if result.get("speedup") is not None:
        console.print(
            f"engine: {result['engine']}; a step on the kept weights alone was measured "
            f"{result['speedup']:.2f}× as fast",
            highlight=False,
        )
    works = ", ".join(f"{work} {value:.1f}" for work, value in result["seconds"].items() if work != "pruning")
    console.print(
        f"seconds: {works}; to the sparse network {result['seconds'].get('pruning', 0):.2f}", highlight=False
    )
