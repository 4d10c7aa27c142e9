"""driveprune data list, get, check."""

from __future__ import annotations

import typer
from rich.table import Table

from driveprune import datasets
from driveprune.cli.app import data_app, print_json, told
from driveprune.cli.options import AsJson, DataDir, Size, check_data_dir, said
from driveprune.screen import Screen, as_markup


@data_app.command("list")
@told
def data_list(as_json: AsJson = False) -> None:
    """List the data sets."""
    if as_json:
        print_json({name: str(datasets.describe(name)) for name in datasets.names()})
        return
    table = Table("data", "what it is")
    for name in datasets.names():
        table.add_row(f"[bold]{name}[/]", as_markup(datasets.describe(name)))
    table.add_row("[bold]FOLDER[/]", "any folder of class folders")
    Screen().print(table)


@data_app.command("get")
@told
def data_get(ctx: typer.Context, name: str, data_dir: DataDir = None) -> None:
    """Download a data set, with its checksum."""
    check_data_dir(said(ctx), name)
    Screen().print(as_markup(datasets.get(name, data_dir)), highlight=False, soft_wrap=True)


@data_app.command("check")
@told
def data_check(
    ctx: typer.Context, name: str, data_dir: DataDir = None, size: Size = None, as_json: AsJson = False
) -> None:
    """Read a data set and say what is there, and whether it is the official one."""
    check_data_dir(said(ctx), name)
    data = datasets.load(name, data_dir, size=size)
    facts = {
        "name": data.label,
        "training images": len(data.train),
        "test images": len(data.test),
        "shape": list(data.train.x.shape[1:]),
        "classes": len(data.classes),
        "official": data.official,
        "note": data.note,
        "fingerprint": data.fingerprint,
    }
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        Screen().print(f"[bold]{key}[/]: {as_markup(value)}", highlight=False, soft_wrap=True)
