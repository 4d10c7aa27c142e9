"""driveprune export, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from driveprune import export as exports
from driveprune import models
from driveprune.bench import bench as measure
from driveprune.cli.app import app, print_json, with_own_code
from driveprune.cli.options import AsJson, list_of
from driveprune.delivery import gained
from driveprune.netfile import Outline, load, outline
from driveprune.report import speed
from driveprune.screen import Screen, as_markup

Net = Annotated[Path, typer.Argument(metavar="NET", help="a file written by driveprune.save, or a run's folder")]
ModelOf = Annotated[
    str | None, typer.Option("--model", help="the model, or package.module.function that makes yours")
]
Shape = Annotated[str | None, typer.Option("--input", help="the shape of its input, as 3,32,32")]
Classes = Annotated[int, typer.Option(help="classes, for a model by name")]


@app.command()
@with_own_code
def export(
    path: Net,
    format: Annotated[str, typer.Option(help=f"one of {', '.join(exports.names())}")] = "onnx",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the file (csr: the folder) to write")] = None,
    model: ModelOf = None,
    example: Shape = None,
    classes: Classes = 10,
    as_json: AsJson = False,
) -> None:
    """Write a network for other programs, and say what was gained by pruning it."""
    file = _file(path)
    net, shape = _network_of(file, model, example, classes)
    mask = load(file, net)
    x = torch.zeros(1, *shape)
    target = output or file.with_name(f"{file.stem}.{_ENDINGS.get(format, format)}")
    if target.resolve() == file.resolve():
        raise ValueError(f"{target} is the network itself: write to another file")
    exports.export(target, net, mask, x, format=format)
    facts = gained(net, mask, x, file)
    if as_json:
        print_json({"written": str(target), **facts})
        return
    table = Table("", box=None, padding=(0, 2, 0, 0))
    for title in ("dense", "now", ""):
        table.add_column(title, justify="right")
    for name, (dense, small) in facts.items():
        numbers = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (dense, small))
        table.add_row(name, *numbers, f"{dense / small:,.1f}× less" if small else "")
    Screen().print(table)
    Screen().print(f"written to {as_markup(target)}", highlight=False, soft_wrap=True)


_ENDINGS = {"safetensors": "dense.safetensors", "torch-prune": "torch-prune.safetensors"}


@app.command()
@with_own_code
def bench(
    path: Net,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="a picture to write: .svg, .png or .pdf")
    ] = None,
    batches: Annotated[str, typer.Option(help="sizes of batches, as 1,32,128")] = "1,32,128",
    threads: Annotated[int | None, typer.Option(help="threads to use; by default all cores")] = None,
    rounds: Annotated[int | None, typer.Option(help="how often to measure; by default for two seconds each")] = None,
    model: ModelOf = None,
    example: Shape = None,
    classes: Classes = 10,
    as_json: AsJson = False,
) -> None:
    """Dense against sparse on this machine: inference and training steps, and where nothing is gained."""
    file = _file(path)
    if output is not None:
        speed.check_kind(output)
    net, shape = _network_of(file, model, example, classes)
    mask = load(file, net)
    sizes = list_of(batches, int, "--batches")
    with Screen(stderr=True).status("", spinner="line") as status:
        found = measure(
            net, mask, torch.zeros(1, *shape), batches=sizes, threads=threads, rounds=rounds, watch=status.update
        )
    if as_json:
        print_json(found.to_json())
    else:
        Screen().print(found, highlight=False)
    if output is not None:
        speed.write(output, found, path.name)
        Screen(stderr=as_json).print(f"picture: {as_markup(output)}", highlight=False, soft_wrap=True)


def _file(path: Path) -> Path:
    """The network's file: the path itself, or in the folder of a run."""
    return path / "net.safetensors" if path.is_dir() else path


def _network_of(
    file: Path, model: str | None, example: str | None, classes: int
) -> tuple[nn.Module, tuple[int, ...]]:
    """The network that a file is of, freshly built, and the shape of an input.

    What a file says of itself is taken for the models of this package only: code of the user's is named by the user.
    """
    found = outline(file)
    about = found.provenance.get("network")
    about = about if isinstance(about, dict) else {}
    if model is None and about.get("name") not in models.names():
        raise ValueError(f"{file} does not say which model of this package it is: name it with --model")
    if model is None or (model == about.get("name") and example is None):
        return _as_it_says(found, about)
    if example is None:
        raise ValueError("say the shape of an input with --input, such as --input 3,32,32")
    shape = tuple(list_of(example, int, "--input"))
    sizes = {"inputs": shape[0], "size": shape[-1]}
    return models.build(model, classes=classes, **sizes), shape


def _as_it_says(found: Outline, about: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    """The network of a file, of the sizes that it says, and the shape of its input.

    They are words of whoever wrote the file: nothing is made of them before they agree with its tensors' shapes.
    """
    for key, (kinds, most) in _SIZES.items():
        if type(value := about.get(key)) not in kinds or not 0 < value <= most:
            raise ValueError(f"{found.path} says that its network has the {key} {value!r:.40}, not one up to {most}")
    found.check_size()
    wanted = {key: about[key] for key in ("name", "classes", "width", "inputs", "size")}
    if about["name"] in models.names():
        with torch.device("meta"):
            sketch = models.build(**wanted)
        found.check_model(sketch)
    return models.build(**wanted), (about["inputs"], about["size"], about["size"])


_SIZES = {"classes": ({int}, 1 << 20), "inputs": ({int}, 1 << 10), "size": ({int}, 512), "width": ({int, float}, 64)}
"""What a file may say of its network without being asked for --model and --input."""
