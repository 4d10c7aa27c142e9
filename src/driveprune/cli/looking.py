"""driveprune methods, recipes, show, compare."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from driveprune import methods as known
from driveprune import recipes as known_recipes
from driveprune.cli.app import app, print_json, told
from driveprune.cli.options import AsJson
from driveprune.cli.printed import print_run
from driveprune.netfile import outline, shared
from driveprune.report import tables
from driveprune.report.groups import finding_of
from driveprune.runs.store import read_run
from driveprune.screen import Screen, as_markup
from driveprune.summary import counted, overlaps


@app.command()
@told
def methods(as_json: AsJson = False) -> None:
    """List the methods of pruning, with their knobs."""
    if as_json:
        print_json({name: {"about": _about(name), "knobs": known.knobs(name)} for name in known.names()})
        return
    table = Table("method", "what it does", "knobs and defaults", show_lines=True)
    for name in known.names():
        knobs = "\n".join(f"{knob} = {default}" for knob, default in known.knobs(name).items())
        table.add_row(f"[bold]{name}[/]", _about(name), knobs)
    Screen().print(table)


def _about(method: str) -> str:
    return (inspect.getdoc(importlib.import_module(f"driveprune.methods.{method}")) or "").partition(": ")[2]


@app.command()
@told
def recipes(
    words: Annotated[list[str] | None, typer.Argument(metavar="[list | show NAME]")] = None, as_json: AsJson = False
) -> None:
    """List the recipes, or show all settings of one."""
    match words or ["list"]:
        case ["list"]:
            name = None
        case ["show", name] | [name]:
            pass
        case _:
            raise ValueError(f"say `recipes list` or `recipes show NAME`, got {' '.join(words or ())!r}")
    if name is not None:
        settings = known_recipes.get(name).to_json()
        if as_json:
            print_json(settings)
            return
        table = Table("setting", "value", title=name)
        for setting, value in settings.items():
            table.add_row(setting, as_markup(json.dumps(value)))
        Screen().print(table)
    elif as_json:
        print_json({each: known_recipes.get(each).to_json() for each in known_recipes.names()})
    else:
        table = Table("recipe", "what it is")
        for each in known_recipes.names():
            table.add_row(f"[bold]{each}[/]", known_recipes.describe(each))
        Screen().print(table)


@app.command()
@told
def show(
    path: Annotated[Path, typer.Argument(help="a file written by driveprune.save, or the folder of a run")],
    as_json: AsJson = False,
) -> None:
    """Show what is kept of a network, layer by layer, and what is known of its run."""
    if path.is_dir() and not (path / "net.safetensors").exists():
        if not (path / "spec.json").exists():
            raise ValueError(f"{path} is no folder of a run")
        print_json(tables.plain(read_run(path), finding_of(path))) if as_json else print_run(path)
        return
    file = _file(path)
    found = outline(file)
    table, sizes = counted(found.kept, found.kinds), {"bytes": found.bytes, "dense_bytes": found.dense_bytes}
    if as_json:
        layers = [{**vars(layer), "shape": list(layer.shape)} for layer in table.layers]
        finding = finding_of(path) if (path / "spec.json").exists() else None
        facts = {**sizes, "provenance": found.provenance, "stability": None if finding is None else vars(finding)}
        print_json({"layers": layers, **facts})
        return
    console = Screen()
    console.print(table)
    effective = found.provenance.get("effective_sparsity")
    if isinstance(effective, float):
        console.print(f"effective sparsity {effective:.4%}", highlight=False)
    console.print(f"file {found.bytes:,} bytes, all weights dense {found.dense_bytes:,} bytes", highlight=False)
    if path.is_dir():
        print_run(path)
    for key, value in found.provenance.items():
        console.print(f"[bold]{as_markup(key)}[/]: {as_markup(value)}", highlight=False)


@app.command()
@told
def compare(
    first: Annotated[Path, typer.Argument(help="a network's file, or the folder of a run")],
    second: Annotated[Path, typer.Argument(help="another one of the same model")],
    as_json: AsJson = False,
) -> None:
    """How much two masks have in common, layer by layer."""
    found = overlaps(shared(_file(first), _file(second)))
    for path in (first, second):
        finding = finding_of(path) if (path / "spec.json").exists() else None
        if finding is not None and finding.word != "sound":
            said = f"[yellow]{finding.word}:[/] {as_markup(path)}: {as_markup(finding.why)}"
            Screen(stderr=True).print(said, highlight=False, soft_wrap=True)
    if as_json:
        print_json([{**vars(layer), "overlap": layer.overlap, "chance": layer.chance} for layer in found])
        return
    table = Table("layer", title="weights kept in both, as a share of those kept in either")
    for title in ("first", "second", "both", "overlap", "by chance"):
        table.add_column(title, justify="right")
    table.add_column("")
    for layer in found:
        table.add_row(
            as_markup(layer.name), f"{layer.first:,}", f"{layer.second:,}", f"{layer.both:,}", f"{layer.overlap:.1%}",
            f"{layer.chance:.1%}", "█" * round(20 * layer.overlap), end_section=layer in found[-2:-1],
        )  # fmt: skip
    Screen().print(table)


def _file(path: Path) -> Path:
    return path / "net.safetensors" if path.is_dir() else path
