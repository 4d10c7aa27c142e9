"""driveprune export, bench."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from driveprune import datasets, models
from driveprune import export as exports
from driveprune.bench import bench as measure
from driveprune.cli.app import app, print_json, told
from driveprune.cli.options import AsJson, cannot_act, find_own, list_of, said
from driveprune.delivery import gained
from driveprune.export import Pixels
from driveprune.export._pixels import described
from driveprune.files import read_json
from driveprune.netfile import Outline, load, outline
from driveprune.report import speed
from driveprune.runs.job import processor_here
from driveprune.runs.spec import Spec
from driveprune.screen import Screen, as_markup

Net = Annotated[Path, typer.Argument(metavar="NET", help="a file written by driveprune.save, or a run's folder")]
ModelOf = Annotated[
    str | None, typer.Option("--model", help="the model, or package.module.function that makes yours")
]
Shape = Annotated[str | None, typer.Option("--input", help="the shape of its input, as 3,32,32")]
Classes = Annotated[int, typer.Option(help="classes, for a model by name")]


@app.command()
@told
def export(
    ctx: typer.Context,
    path: Net,
    format: Annotated[str, typer.Option(help=f"one of {', '.join(exports.names())}")] = "onnx",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the file (csr: the folder) to write")] = None,
    model: ModelOf = None,
    example: Shape = None,
    classes: Classes = 10,
    preprocess: Annotated[
        bool, typer.Option(help="onnx: put the normalisation of images into the graph, where the file knows it")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write a network for other programs, and say what was gained by pruning it."""
    file, options = _file(path), said(ctx)
    pixels = _pixels_of(file, options, format, preprocess)
    net, shape = _network_of(file, options, model, example, classes)
    mask = load(file, net)
    x = torch.zeros(1, *shape)
    target = output or file.with_name(f"{file.stem}.{_ENDINGS.get(format, format)}")
    if target.resolve() == file.resolve():
        raise ValueError(f"{target} is the network itself: write to another file")
    exports.export(target, net, mask, x, format=format, pixels=pixels, preprocess=preprocess)
    facts = gained(net, mask, x, file)
    takes = described(x, pixels, preprocess)["input"] if format == "onnx" else None
    if as_json:
        print_json({"written": str(target), "bytes written": _size(target), "input": takes, **facts})
        return
    facts = _named(facts, file, target)
    table = Table("", box=None, padding=(0, 2, 0, 0))
    for title in ("dense", "now", ""):
        table.add_column(title, justify="right")
    for name, (dense, small) in facts.items():
        numbers = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (dense, small))
        table.add_row(name, *numbers, f"{dense / small:,.1f}× less" if small else "")
    Screen().print(table)
    Screen().print(f"written to {as_markup(target)}: {_size(target):,} bytes", highlight=False, soft_wrap=True)
    if takes is not None:
        Screen().print(f"it takes {as_markup(takes)}", highlight=False, soft_wrap=True)


def _pixels_of(file: Path, options: Mapping[str, str], format: str, preprocess: bool) -> Pixels | None:
    """How images were normalised in training, as the network's file says; None if it does not."""
    if format != "onnx":
        cannot_act(options, ["preprocess"], f"--format {format}", "only onnx has a graph")
        return None
    known = outline(file).provenance.get("images")
    found = Pixels.from_json(known) if isinstance(known, dict) else _pixels_of_data(file.with_name("spec.json"))
    if found is not None:
        return found
    why = f"{file.name} does not say how images were normalised in its training"
    if preprocess:
        cannot_act(options, ["preprocess"], str(file), why)
    return None


def _pixels_of_data(spec: Path) -> Pixels | None:
    """The same by the data set of a run, for runs of earlier versions; None if it is not at hand."""
    if not spec.exists():
        return None
    wanted = Spec.from_json(read_json(spec))
    if wanted.recipe.data not in datasets.names():
        return None
    try:
        data = datasets.load(wanted.recipe.data)
    except FileNotFoundError:
        return None
    return Pixels(data.mean, data.deviation, data.classes) if data.fingerprint == wanted.fingerprint else None


def _size(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size


def _named(facts: Mapping[str, tuple[float, float]], file: Path, target: Path) -> dict[str, tuple[float, float]]:
    """What was gained, each file by its name."""
    dense, small = facts["bytes of the file"]
    rest = {name: value for name, value in facts.items() if name != "bytes of the file"}
    return {f"bytes of {file.name}": (dense, small), f"bytes of {target.name}": (dense, _size(target)), **rest}


_ENDINGS = {"safetensors": "dense.safetensors", "torch-prune": "torch-prune.safetensors"}


@app.command()
@told
def bench(
    ctx: typer.Context,
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
    net, shape = _network_of(file, said(ctx), model, example, classes)
    mask = load(file, net)
    sizes = list_of(batches, int, "--batches")
    with Screen(stderr=True).status("", spinner="line") as status:
        found = measure(
            net, mask, torch.zeros(1, *shape), batches=sizes, threads=threads, rounds=rounds, watch=status.update
        )
    if as_json:
        print_json({**found.to_json(), "processor": processor_here()})
    else:
        Screen().print(found, highlight=False)
    if output is not None:
        speed.write(output, found, f"{path.name}, {processor_here()}")
        Screen(stderr=as_json).print(f"picture: {as_markup(output)}", highlight=False, soft_wrap=True)


def _file(path: Path) -> Path:
    """The network's file: the path itself, or in the folder of a run."""
    return path / "net.safetensors" if path.is_dir() else path


def _network_of(
    file: Path, options: Mapping[str, str], model: str | None, example: str | None, classes: int
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
        known = "it says them itself; for others name --model and --input, too"
        cannot_act(options, ["example", "classes"], str(file), known)
        return _as_it_says(found, about)
    if example is None:
        raise ValueError("say the shape of an input with --input, such as --input 3,32,32")
    find_own(model)
    if not models.takes(model, "classes"):
        cannot_act(options, ["classes"], f"--model {model}", "that function has no argument classes")
    shape = tuple(list_of(example, int, "--input"))
    sizes = {"inputs": shape[0], "size": shape[-1]}
    return models.build(model, classes=classes, **sizes), shape


def _as_it_says(found: Outline, about: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    """The network of a file, of the sizes that it says, and the shape of its input.

    They are words of whoever wrote the file: nothing is made of them before they agree with its tensors' shapes.
    """
    for key, (kinds, most) in _SIZES.items():
        value: Any = about.get(key)
        if type(value) not in kinds or not 0 < value <= most:
            raise ValueError(f"{found.path} says that its network has the {key} {value!r:.40}, not one up to {most}")
    found.check_size()
    wanted = {key: about[key] for key in ("name", "classes", "width", "inputs", "size")}
    if about["name"] in models.names():
        with torch.device("meta"):
            sketch = models.build(**wanted)
        found.check_model(sketch)
    return models.build(**wanted), (about["inputs"], about["size"], about["size"])


_SIZES: dict[str, tuple[set[type], int]] = {
    "classes": ({int}, 1 << 20),
    "inputs": ({int}, 1 << 10),
    "size": ({int}, 512),
    "width": ({int, float}, 64),
}
"""What a file may say of its network without being asked for --model and --input."""
