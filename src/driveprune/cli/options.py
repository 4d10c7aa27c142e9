"""What several commands take, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from driveprune import datasets, methods, models
from driveprune import recipes as known_recipes
from driveprune.batches import Data
from driveprune.recipes import Recipe
from driveprune.runs.spec import DENSE
from driveprune.runs.trust import code_here
from driveprune.screen import Screen, as_markup

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
BudgetName = Annotated[
    str, typer.Option("--budget", help="the sparsity is a fraction of the weights, or of the macs")
]
Holdout = Annotated[int, typer.Option(help="hold out so many training images; the best epoch is chosen by them")]
Size = Annotated[int | None, typer.Option(help="pixels to which the images of a folder are resized")]
Threads = Annotated[int | None, typer.Option(help="threads of a run, part of what it is; by default all cores")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU if there is one")]
PrecisionName = Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp16")]
Engine = Annotated[
    str, typer.Option("--engine", help="what computes after a cut: dense, sparse (kept weights alone, CPU) or auto")
]
ChannelsLast = Annotated[bool, typer.Option(help="the memory format in which convolutions are faster")]
RunsDir = Annotated[Path, typer.Option("--runs", help="the folder of all runs")]
Every = Annotated[float, typer.Option(help="seconds between two checkpoints")]
Knobs = Annotated[list[str] | None, typer.Option("--knob", help="an option of the method, as cuts=50; repeatable")]
AsJson = Annotated[bool, typer.Option("--json", help="for scripts")]


def said(ctx: typer.Context) -> dict[str, str]:
    """The options that somebody has said, by their names in the code, as they are written.

    What is not in it is at its default.
    """
    found = {}
    for each in ctx.command.params:
        source = ctx.get_parameter_source(each.name or "")
        if each.opts[0].startswith("-") and source is not None and not source.name.startswith("DEFAULT"):
            found[each.name or ""] = each.opts[0]
    return found


def cannot_act(options: Mapping[str, str], names: Iterable[str], beside: str, why: str) -> None:
    """An error if one of some options was said that cannot act beside something else.

    >>> cannot_act({"seed": "--seed"}, ["epochs"], "--spec", "the spec says it")
    """
    for name in names:
        if name in options:
            raise ValueError(f"{options[name]} cannot act beside {beside}: {why}")


def check_every(every: float) -> None:
    """An error for a number of seconds that cannot be waited."""
    if not 0 <= every < float("inf"):
        raise ValueError(f"--every must be seconds, at least 0, got {every:g}")


def check_data_dir(options: Mapping[str, str], data: str) -> None:
    """An error if --data-dir was said for data that do not lie there."""
    if data in datasets.names():
        if datasets.embedded(data):
            cannot_act(options, ["data_dir"], f"the data {data}", "they come with a package, not in files")
    else:
        cannot_act(options, ["data_dir"], f"the data {data}", "--data-dir is where the data sets of this package are")


def find_own(*names: str | None) -> None:
    """Let code in the current folder be found if the user names code that is not of this package."""
    known = {*models.names(), *methods.names(), *known_recipes.names(), DENSE}
    with code_here(any(name is not None and name not in known for name in names)):
        pass


def recipe_of(
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
    _check_set(name, kind, data, model)
    find_own(name, model)
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


def _check_set(recipe: str | None, kind: str | None, data: str | None, model: str | None) -> None:
    """An error if --set was said where it chooses nothing."""
    if kind is None:
        return
    if recipe is not None:
        raise ValueError("--set cannot act beside --recipe, which is one of a set already: leave one of them out")
    if data is None and model is None and kind != "demo":
        raise ValueError(f"--set {kind} chooses by data set and model: say --data or --model, too")
    if data is not None and data not in datasets.names() and kind != "strong":
        raise ValueError(f"--set {kind} cannot act beside --data {data}: for folders there is only the set strong")


def machine(threads: int | None, device: str | None, precision: str | None, channels_last: bool) -> dict[str, Any]:
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


def knobs_of(given: Iterable[str] | None) -> dict[str, Any]:
    """name=value, the value as JSON if it is some, else as text.

    >>> knobs_of(["cuts=50", "combine=squares"])
    {'cuts': 50, 'combine': 'squares'}
    """
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"a knob is given as name=value, got {text!r}")
        found[name.strip()] = value_of(value)
    return found


def value_of(text: str) -> Any:
    """A value as JSON if it is some, else as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def list_of(text: str, kind: Callable[[str], Any], what: str) -> list[Any]:
    """Comma-separated values."""
    try:
        found = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{what} must be numbers separated by commas, got {text!r}") from None
    if not found:
        raise ValueError(f"{what} must be separated by commas, got none")
    return found


def load_data(name: str, data_dir: Path | None, size: int | None = None) -> Data:
    """A data set, with a word about it if it is not the official one."""
    data = datasets.load(name, data_dir, size=size)
    if data.note:
        Screen(stderr=True).print(
            f"[yellow]data:[/] {as_markup(data.label)}: {as_markup(data.note)}", highlight=False
        )
    return data
