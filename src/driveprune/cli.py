"""The command `driveprune`: one short function a command."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from driveprune import methods as known
from driveprune.netfile import read
from driveprune.summary import summary

app = typer.Typer(help="Neural networks that are small from the start.", no_args_is_help=True, add_completion=False)


@app.callback()
def _main() -> None:
    """Neural networks that are small from the start."""


@app.command()
def methods() -> None:
    """List the methods of pruning, with their knobs."""
    table = Table("method", "what it does", "knobs and defaults", show_lines=True)
    for name in known.names():
        about = inspect.getdoc(import_module(f"driveprune.methods.{name}")) or ""
        knobs = "\n".join(f"{knob} = {default}" for knob, default in known.knobs(name).items())
        table.add_row(f"[bold]{name}[/]", about.partition(": ")[2], knobs)
    Console().print(table)


@app.command()
def show(file: Annotated[Path, typer.Argument(help="a file written by driveprune.save")]) -> None:
    """Show what is kept in a pruned network's file, layer by layer."""
    try:
        _, mask = read(file)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    console = Console()
    console.print(summary(mask))
    for key, value in mask.provenance.items():
        console.print(f"[bold]{escape(key)}[/]: {escape(str(value))}")
