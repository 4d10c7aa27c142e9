"""driveprune report, watch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from driveprune.cli.app import app, print_json, told
from driveprune.cli.options import AsJson, cannot_act, check_every, said
from driveprune.cli.printed import print_report
from driveprune.files import write_atomically
from driveprune.report import figures as draw
from driveprune.report import tables
from driveprune.report.claims import claims as test_claims
from driveprune.report.groups import groups
from driveprune.report.live import watch as watch_runs
from driveprune.report.page import page
from driveprune.runs.store import Run, read_runs
from driveprune.screen import Screen, as_markup


@app.command()
@told
def report(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="a page (.html) or a text (any other name) to write")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="a folder for the figures (SVG, PNG) and the tables (CSV, LaTeX)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What runs gave: tables here, or a page with figures, and what did not finish. Nothing in them is run."""
    found = _runs(runs)
    if as_json:
        print_json(tables.plain_all(found))
    elif output is None and figures is None:
        print_report(found)
    if output is not None:
        _write_report(output, found)
        Screen(stderr=as_json).print(f"report: {as_markup(output)}", highlight=False, soft_wrap=True)
    if figures is not None:
        made = groups(found)
        written = draw.write_all(figures, made, test_claims(made))
        Screen(stderr=as_json).print(f"{len(written)} files in {as_markup(figures)}", highlight=False, soft_wrap=True)


def _runs(paths: list[Path]) -> list[Run]:
    found = read_runs(paths)
    if not found:
        raise ValueError(f"there are no runs in {', '.join(map(str, paths))}")
    return found


def _write_report(path: Path, found: Iterable[Run]) -> None:
    if path.suffix.lower() in {".html", ".htm"}:
        write_atomically(path, page(groups(found)).encode())
        return
    text = io.StringIO()
    print_report(found, Screen(file=text, width=120))
    write_atomically(path, text.getvalue().encode())


@app.command()
@told
def watch(
    ctx: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="folders of runs")],
    every: Annotated[float, typer.Option(help="seconds between two looks")] = 1.0,
) -> None:
    """Watch a running sweep: the table filling up, learning curves, the time left. Ctrl-C ends the watching only."""
    check_every(every)
    _runs(runs)
    console = Screen()
    if not console.is_terminal:
        cannot_act(said(ctx), ["every"], "output that is no terminal", "the screen is printed once")
    with contextlib.suppress(KeyboardInterrupt):
        watch_runs(runs, console, every=every)
