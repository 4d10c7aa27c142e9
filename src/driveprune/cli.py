"""The command `driveprune`: one short function a command."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from driveprune import datasets, models
from driveprune import methods as known
from driveprune import recipes as known_recipes
from driveprune.batches import Batches, Data
from driveprune.cut import prune as cut_now
from driveprune.files import read_json, write_atomically
from driveprune.netfile import read, save
from driveprune.preview import preview as preview_all
from driveprune.progress import shown
from driveprune.recipes import Recipe
from driveprune.report import figures as draw
from driveprune.report import tables
from driveprune.report.claims import claims as test_claims
from driveprune.report.groups import groups
from driveprune.report.live import watch as watch_runs
from driveprune.report.page import page
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec, make_spec
from driveprune.runs.store import Run, read_run, read_runs
from driveprune.runs.sweep import grid
from driveprune.runs.sweep import sweep as run_all
from driveprune.summary import compared, summary

app = typer.Typer(
    help="Neural networks that are small from the start: train a little, prune 90-99%, train on.",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
)  # fmt: skip
data_app = typer.Typer(help="List, download and check data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

P = ParamSpec("P")
R = TypeVar("R")


def told(command: Callable[P, R]) -> Callable[P, R]:
    """Errors as one clear line and exit code 2, warnings as one line; no tracebacks."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        warnings.showwarning = _one_line
        sys.path.insert(0, os.getcwd())  # models and data of the user's own, by dotted name
        try:
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except Exception as error:
            _print_error(error)
            raise typer.Exit(2) from None

    return wrapped


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    Console(stderr=True).print(f"[yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


def _print_error(error: BaseException) -> None:
    said = str(error).strip().partition("\n")[0]
    told_well = isinstance(error, ValueError | TypeError | OSError | ImportError) and said
    text = said if told_well else f"{type(error).__name__}: {said}"
    Console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=1, ensure_ascii=False))


# What several commands take.

Name = Annotated[str | None, typer.Option("--data", help="a data set, or a folder of class folders")]
DataDir = Annotated[Path | None, typer.Option(help="where data sets are; by default the cache folder")]
Model = Annotated[str | None, typer.Option(help="a model, or the dotted name of a function that makes yours")]
RecipeName = Annotated[str | None, typer.Option("--recipe", help="settings by name: see driveprune recipes")]
Kind = Annotated[
    str | None,
    typer.Option("--set", help="the settings for --data and --model: paper (the default), strong, small"),
]
Epochs = Annotated[int | None, typer.Option(help="other epochs than the recipe's, in its proportions")]
Width = Annotated[float | None, typer.Option(help="multiplies the channels of the model")]
ImageCount = Annotated[int | None, typer.Option(help="use so many training images only")]
TestCount = Annotated[int | None, typer.Option(help="use so many test images only")]
Holdout = Annotated[int, typer.Option(help="hold out so many training images; the best epoch is chosen by them")]
Size = Annotated[int | None, typer.Option(help="pixels to which the images of a folder are resized")]
Threads = Annotated[int | None, typer.Option(help="threads of a run, part of what it is; by default all cores")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU if there is one")]
PrecisionName = Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp16")]
ChannelsLast = Annotated[bool, typer.Option(help="the memory format in which convolutions are faster")]
RunsDir = Annotated[Path, typer.Option("--runs", help="the folder of all runs")]
Every = Annotated[float, typer.Option(help="seconds between two checkpoints")]
Knobs = Annotated[list[str] | None, typer.Option("--knob", help="an option of the method, as cuts=50; repeatable")]
AsJson = Annotated[bool, typer.Option("--json", help="for scripts")]


def _recipe(
    name: str | None,
    kind: str | None,
    data: str | None,
    model: str | None,
    epochs: int | None,
    width: float | None,
    images: int | None,
    test_images: int | None,
) -> Recipe:
    """The recipe that the options ask for: by name, or for a data set and a model; the demo's if nothing is said."""
    if kind not in {None, "paper", "strong", "small", "demo"}:
        raise ValueError(f"--set must be paper, strong, small or demo, got {kind!r}")
    if name is not None:
        recipe = known_recipes.get(name)
        recipe = replace(recipe, data=data or recipe.data, model=model or recipe.model)
    elif data is None and model is None:
        recipe = known_recipes.get("demo-digits")
    elif data is not None and data not in datasets.names():
        recipe = known_recipes.get("strong-folder")
        recipe = replace(recipe, data=data, model=model or recipe.model)
    elif model is not None and model not in models.names():
        recipe = replace(known_recipes.find(data or "digits", None, kind), model=model)
    else:
        recipe = known_recipes.find(data or "cifar10", model, kind)
    return known_recipes.scaled(recipe, epochs=epochs, width=width, images=images, test_images=test_images)


def _machine(threads: int | None, device: str | None, precision: str | None, channels_last: bool) -> dict[str, Any]:
    """Where and how to compute; what is not said is what pays on this machine."""
    device = str(torch.device(device)) if device else ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = torch.device(device).type == "cuda"
    precision = precision or ("bf16" if on_gpu else "fp32")
    return {
        "threads": torch.get_num_threads() if threads is None else threads,
        "device": device,
        "precision": precision,
        "channels_last": channels_last,
    }


def _knobs(given: Iterable[str] | None) -> dict[str, Any]:
    """name=value, the value as JSON if it is some, else as text.

    >>> _knobs(["cuts=50", "combine=squares"])
    {'cuts': 50, 'combine': 'squares'}
    """
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"a knob is given as name=value, got {text!r}")
        found[name.strip()] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _list(text: str, kind: Callable[[str], Any], what: str) -> list[Any]:
    """Comma-separated values."""
    try:
        found = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{what} must be numbers separated by commas, got {text!r}") from None
    if not found:
        raise ValueError(f"{what} must be separated by commas, got none")
    return found


# Runs.


@app.command()
@told
def run(
    method: Annotated[str, typer.Option(help="a method, see driveprune methods; dense: prune nothing")] = "drive",
    sparsity: Annotated[float, typer.Option(help="the fraction of weights to remove, in [0, 1)")] = 0.98,
    recipe: RecipeName = None,
    kind: Kind = None,
    data: Name = None,
    model: Model = None,
    data_dir: DataDir = None,
    seed: int = 0,
    knob: Knobs = None,
    check: Annotated[str, typer.Option(help="a sanity check after the cut: shuffle, reinit or random")] = "",
    epochs: Epochs = None,
    width: Width = None,
    images: ImageCount = None,
    test_images: TestCount = None,
    holdout: Holdout = 0,
    size: Size = None,
    threads: Threads = None,
    device: Device = None,
    precision: PrecisionName = None,
    channels_last: ChannelsLast = True,
    runs: RunsDir = Path("runs"),
    every: Every = 60.0,
    spec: Annotated[Path | None, typer.Option(help="repeat the run of this spec.json exactly")] = None,
    as_json: AsJson = False,
) -> None:
    """Train, prune and train on: one run. Killed or stopped, the same command goes on where it was."""
    if spec is not None:
        wanted = Spec.from_json(read_json(spec))
        loaded = _load(wanted.recipe.data, data_dir, wanted.size)
    else:
        chosen = _recipe(recipe, kind, data, model, epochs, width, images, test_images)
        loaded = _load(chosen.data, data_dir, size)
        wanted = make_spec(
            chosen, loaded, method=method, sparsity=sparsity, seed=seed, knobs=_knobs(knob), check=check,
            holdout=holdout, size=size, **_machine(threads, device, precision, channels_last),
        )  # fmt: skip
    try:
        with shown(wanted.id.rpartition("-")[0]) as watch:
            result = carry_out(runs, wanted, loaded, every=every, watch=watch)
    except KeyboardInterrupt:
        Console(stderr=True).print("\nstopped; the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None
    if as_json:
        _print_json({**result, "folder": str(runs / wanted.id)})
    else:
        _print_run(runs / wanted.id)


def _load(name: str, data_dir: Path | None, size: int | None = None) -> Data:
    data = datasets.load(name, data_dir, size=size)
    if data.note:
        Console(stderr=True).print(f"[yellow]data:[/] {escape(data.label)}: {escape(data.note)}", highlight=False)
    return data


def _print_run(folder: Path) -> None:
    found = read_run(folder)
    console = Console()
    console.print(escape(str(folder)), highlight=False, soft_wrap=True)
    if found.result is None:
        console.print(f"{found.standing}{': ' + escape(found.error) if found.error else ''}", highlight=False)
        return
    result = found.result
    by = "" if result["best_by"] == "test" else ", chosen by held-out images"
    console.print(
        f"[bold]{100 * result['last']:.2f}%[/] test accuracy on {escape(result['data'])} after the last epoch, "
        f"{100 * result['best']:.2f}% after the best{by}", highlight=False,
    )  # fmt: skip
    effective = result["effective_sparsity"]
    shown_effective = "unknown" if effective is None else f"{effective:.4%}"
    console.print(f"sparsity {result['sparsity']:.4%}, effective {shown_effective}", highlight=False)
    if result["collapsed"]:
        console.print("[yellow]no path leads from input to output: the network cannot learn[/]")
    works = ", ".join(f"{work} {value:.1f}" for work, value in result["seconds"].items() if work != "pruning")
    console.print(
        f"seconds: {works}; to the sparse network {result['seconds'].get('pruning', 0):.2f}", highlight=False
    )


@app.command()
@told
def sweep(
    methods: Annotated[str, typer.Option(help="methods, separated by commas")] = "dense,imp,snip,synflow,drive",
    sparsities: Annotated[str | None, typer.Option(help="by default the recipe's, as 0.9,0.95,0.98,0.993")] = None,
    seeds: Annotated[str, typer.Option(help="seeds, separated by commas")] = "0",
    checks: Annotated[str, typer.Option(help="sanity checks beside each run: shuffle,reinit,random,erk")] = "",
    recipe: RecipeName = None,
    kind: Kind = None,
    data: Name = None,
    model: Model = None,
    data_dir: DataDir = None,
    knob: Annotated[
        list[str] | None, typer.Option("--knob", help="values of a method's knob, as drive.cuts=1,10,100; repeatable")
    ] = None,
    epochs: Epochs = None,
    width: Width = None,
    images: ImageCount = None,
    test_images: TestCount = None,
    holdout: Holdout = 0,
    size: Size = None,
    threads: Threads = None,
    device: Device = None,
    precision: PrecisionName = None,
    channels_last: ChannelsLast = True,
    runs: RunsDir = Path("runs"),
    jobs: Annotated[int, typer.Option(help="runs at the same time; never changes what comes out")] = 1,
    share: Annotated[bool, typer.Option(help="compute a common dense beginning once")] = True,
    every: Every = 60.0,
    as_json: AsJson = False,
) -> None:
    """Run a grid: methods × sparsities × seeds. What is done is skipped, what was killed goes on."""
    chosen = _recipe(recipe, kind, data, model, epochs, width, images, test_images)
    loaded = _load(chosen.data, data_dir, size)
    specs = grid(
        chosen, loaded, methods=_list(methods, str, "methods"),
        sparsities=_list(sparsities, float, "sparsities") if sparsities else chosen.sparsities,
        seeds=_list(seeds, int, "seeds"), checks=_list(checks, str, "checks") if checks else [],
        knobs=_grid_knobs(knob), holdout=holdout, size=size, **_machine(threads, device, precision, channels_last),
    )  # fmt: skip
    outcome = run_all(
        runs, specs, loaded, jobs=jobs, data_dir=None if data_dir is None else str(data_dir), share=share, every=every
    )
    found = [read_run(runs / spec.id) for spec in specs if (runs / spec.id / "spec.json").exists()]
    if as_json:
        _print_json({**vars(outcome), "runs": [tables.plain(each) for each in found]})
    else:
        _print_report(found)
    for name, error in outcome.failed.items():
        Console(stderr=True).print(f"[bold red]failed:[/] {escape(name)}: {escape(error)}", soft_wrap=True)
    if outcome.interrupted:
        Console(stderr=True).print("stopped; the same command goes on with what is left")
        raise typer.Exit(130)
    if outcome.failed:
        raise typer.Exit(1)


def _grid_knobs(given: Iterable[str] | None) -> dict[str, dict[str, list[Any]]]:
    """method.knob=value,value,...

    >>> _grid_knobs(["drive.cuts=1,10"])
    {'drive': {'cuts': [1, 10]}}
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for text in given or ():
        left, equals, values = text.partition("=")
        method, dot, name = left.strip().rpartition(".")
        if not equals or not dot:
            raise ValueError(f"a knob of a sweep is given as method.knob=value,value, got {text!r}")
        found.setdefault(method, {})[name] = [_value(value) for value in values.split(",")]
    return found


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
        _print_json([tables.plain(each) for each in found])
    elif output is None and figures is None:
        _print_report(found)
    if output is not None:
        _write_report(output, found)
        Console().print(f"report: {escape(str(output))}", highlight=False, soft_wrap=True)
    if figures is not None:
        made = groups(found)
        written = draw.write_all(figures, made, test_claims(made))
        Console().print(f"{len(written)} files in {escape(str(figures))}", highlight=False, soft_wrap=True)


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
    _print_report(found, Console(file=text, width=120))
    write_atomically(path, text.getvalue().encode())


def _print_report(runs: Iterable[Run], console: Console | None = None) -> None:
    console = console or Console()
    for group in groups(runs):
        console.print(f"\n[bold]{escape(group.title)}[/]", highlight=False, soft_wrap=True)
        if group.methods:
            for table in (tables.accuracy(group, "last"), tables.accuracy(group, "best"), tables.times(group)):
                console.print(tables.to_rich(table))
        for line in (*tables.notes(group), *tables.unfinished(group)):
            console.print(escape(line), highlight=False, soft_wrap=True)


@app.command()
@told
def watch(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs")],
    every: Annotated[float, typer.Option(help="seconds between two looks")] = 1.0,
) -> None:
    """Watch a running sweep: the table filling up, learning curves, the time left. Ctrl-C ends the watching only."""
    _runs(runs)
    with contextlib.suppress(KeyboardInterrupt):
        watch_runs(runs, Console(), every=every)


# Only the mask.


@app.command()
@told
def prune(
    model: Annotated[str, typer.Argument(help="a model, or package.module.function that makes yours")],
    data: Annotated[str, typer.Argument(help="a data set, or package.module.function that makes your batches")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write")] = Path("net.safetensors"),
    method: Annotated[str, typer.Option(help="a method, see driveprune methods")] = "drive",
    sparsity: Annotated[float, typer.Option(help="the fraction of weights to remove")] = 0.98,
    knob: Knobs = None,
    seed: int = 0,
    batch: Annotated[int, typer.Option(help="examples a batch, for a data set")] = 128,
    data_dir: DataDir = None,
) -> None:
    """Only cut: write the mask and the weights that are left of a model as it is made."""
    net, batches = _model_and_batches(model, data, batch, data_dir, seed)
    mask = cut_now(net, batches, method=method, sparsity=sparsity, knobs=_knobs(knob), seed=seed)
    save(output, net, mask)
    Console().print(summary(mask))
    Console().print(f"written to {escape(str(output))}", highlight=False, soft_wrap=True)


@app.command()
@told
def preview(
    model: Annotated[str, typer.Argument(help="a model, or package.module.function that makes yours")],
    data: Annotated[str, typer.Argument(help="a data set, or package.module.function that makes your batches")],
    sparsity: Annotated[float, typer.Option(help="the fraction of weights to remove")] = 0.98,
    seed: int = 0,
    batch: Annotated[int, typer.Option(help="examples a batch, for a data set")] = 128,
    data_dir: DataDir = None,
) -> None:
    """What every method would leave of a model, layer by layer; nothing is trained or written."""
    net, batches = _model_and_batches(model, data, batch, data_dir, seed)
    Console().print(preview_all(net, batches, sparsity=sparsity, seed=seed))


def _model_and_batches(
    model: str, data: str, batch: int, data_dir: Path | None, seed: int
) -> tuple[nn.Module, Iterable[Any]]:
    torch.manual_seed(seed)
    if data in datasets.names() or Path(data).is_dir():
        loaded = _load(data, data_dir)
        shape = loaded.train.x.shape
        net = models.build(model, classes=len(loaded.classes), inputs=shape[1], size=shape[2])
        return net, Batches(loaded.train, batch, mean=loaded.mean, deviation=loaded.deviation, seed=seed)
    return models.build(model, classes=10), _own(data)()


def _own(name: str) -> Callable[[], Iterable[Any]]:
    module, _, function = name.rpartition(".")
    try:
        found: Callable[[], Iterable[Any]] = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError, ValueError):
        choices = ", ".join(datasets.names())
        raise ValueError(f"unknown data {name!r}; there are {choices}, or a function of your own") from None
    return found


# Looking at things.


@app.command()
@told
def methods(as_json: AsJson = False) -> None:
    """List the methods of pruning, with their knobs."""
    if as_json:
        _print_json({name: {"about": _about(name), "knobs": known.knobs(name)} for name in known.names()})
        return
    table = Table("method", "what it does", "knobs and defaults", show_lines=True)
    for name in known.names():
        knobs = "\n".join(f"{knob} = {default}" for knob, default in known.knobs(name).items())
        table.add_row(f"[bold]{name}[/]", _about(name), knobs)
    Console().print(table)


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
            _print_json(settings)
            return
        table = Table("setting", "value", title=name)
        for setting, value in settings.items():
            table.add_row(setting, escape(json.dumps(value)))
        Console().print(table)
    elif as_json:
        _print_json({each: known_recipes.get(each).to_json() for each in known_recipes.names()})
    else:
        table = Table("recipe", "what it is")
        for each in known_recipes.names():
            table.add_row(f"[bold]{each}[/]", known_recipes.describe(each))
        Console().print(table)


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
        _print_json(tables.plain(read_run(path))) if as_json else _print_run(path)
        return
    file = path / "net.safetensors" if path.is_dir() else path
    weights, mask = read(file)
    dense = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    layers = [{**vars(layer), "shape": list(layer.shape)} for layer in summary(mask).layers]
    if as_json:
        _print_json(
            {"layers": layers, "bytes": file.stat().st_size, "dense_bytes": dense, "provenance": mask.provenance}
        )
        return
    console = Console()
    console.print(summary(mask))
    effective = mask.provenance.get("effective_sparsity")
    if effective is not None:
        console.print(f"effective sparsity {effective:.4%}", highlight=False)
    console.print(f"file {file.stat().st_size:,} bytes, all weights dense {dense:,} bytes", highlight=False)
    if path.is_dir():
        _print_run(path)
    for key, value in mask.provenance.items():
        console.print(f"[bold]{escape(key)}[/]: {escape(str(value))}", highlight=False)


@app.command()
@told
def compare(
    first: Annotated[Path, typer.Argument(help="a network's file, or the folder of a run")],
    second: Annotated[Path, typer.Argument(help="another one of the same model")],
    as_json: AsJson = False,
) -> None:
    """How much two masks have in common, layer by layer."""
    found = compared(_mask(first), _mask(second))
    if as_json:
        _print_json([{**vars(layer), "overlap": layer.overlap, "chance": layer.chance} for layer in found])
        return
    table = Table("layer", title="weights kept in both, as a share of those kept in either")
    for title in ("first", "second", "both", "overlap", "by chance"):
        table.add_column(title, justify="right")
    table.add_column("")
    for layer in found:
        table.add_row(
            escape(layer.name), f"{layer.first:,}", f"{layer.second:,}", f"{layer.both:,}", f"{layer.overlap:.1%}",
            f"{layer.chance:.1%}", "█" * round(20 * layer.overlap), end_section=layer is found[-2],
        )  # fmt: skip
    Console().print(table)


def _mask(path: Path) -> Mapping[str, Tensor]:
    return read(path / "net.safetensors" if path.is_dir() else path)[1]


# Data.


@data_app.command("list")
@told
def data_list(as_json: AsJson = False) -> None:
    """List the data sets."""
    if as_json:
        _print_json({name: str(datasets.describe(name)) for name in datasets.names()})
        return
    table = Table("data", "what it is")
    for name in datasets.names():
        table.add_row(f"[bold]{name}[/]", escape(str(datasets.describe(name))))
    table.add_row("[bold]FOLDER[/]", "any folder of class folders")
    Console().print(table)


@data_app.command("get")
@told
def data_get(name: str, data_dir: DataDir = None) -> None:
    """Download a data set, with its checksum."""
    Console().print(escape(str(datasets.get(name, data_dir))), highlight=False, soft_wrap=True)


@data_app.command("check")
@told
def data_check(name: str, data_dir: DataDir = None, size: Size = None, as_json: AsJson = False) -> None:
    """Read a data set and say what is there, and whether it is the official one."""
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
        _print_json(facts)
        return
    for key, value in facts.items():
        Console().print(f"[bold]{key}[/]: {escape(str(value))}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command."""
    app()
