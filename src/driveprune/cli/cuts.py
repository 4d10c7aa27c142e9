"""driveprune prune, preview: only the mask."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import nn

from driveprune import datasets, models
from driveprune.batches import Batches
from driveprune.cli.app import app, told
from driveprune.cli.options import (
    BudgetName,
    DataDir,
    Knobs,
    cannot_act,
    check_data_dir,
    find_own,
    knobs_of,
    list_of,
    load_data,
    said,
)
from driveprune.cut import Budget
from driveprune.cut import prune as cut_now
from driveprune.netfile import save
from driveprune.preview import preview as preview_all
from driveprune.screen import Screen, as_markup
from driveprune.summary import summary


@app.command()
@told
def prune(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="a model, or package.module.function that makes yours")],
    data: Annotated[str, typer.Argument(help="a data set, or package.module.function that makes your batches")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write")] = Path("net.safetensors"),
    method: Annotated[str, typer.Option(help="a method, see driveprune methods")] = "drive",
    sparsity: Annotated[float, typer.Option(help="the fraction of weights to remove")] = 0.98,
    knob: Knobs = None,
    budget: BudgetName = "weights",
    seed: int = 0,
    batch: Annotated[int, typer.Option(help="examples a batch, for a data set")] = 128,
    data_dir: DataDir = None,
) -> None:
    """Only cut: write the mask and the weights that are left of a model as it is made."""
    find_own(method)
    net, batches = _model_and_batches(said(ctx), model, data, batch, data_dir, seed)
    mask = cut_now(
        net, batches, method=method, sparsity=sparsity, knobs=knobs_of(knob), budget=cast(Budget, budget), seed=seed
    )
    save(output, net, mask)
    Screen().print(summary(mask))
    Screen().print(f"written to {as_markup(output)}", highlight=False, soft_wrap=True)


@app.command()
@told
def preview(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="a model, or package.module.function that makes yours")],
    data: Annotated[str, typer.Argument(help="a data set, or package.module.function that makes your batches")],
    sparsity: Annotated[float, typer.Option(help="the fraction of weights to remove")] = 0.98,
    methods: Annotated[
        str | None, typer.Option(help="methods, separated by commas; by default all that cut in one go")
    ] = None,
    knob: Annotated[
        list[str] | None, typer.Option("--knob", help="a knob of a method, as synflow.cuts=20; repeatable")
    ] = None,
    budget: BudgetName = "weights",
    min_kept: Annotated[int, typer.Option(help="keep at least so many weights of each layer")] = 0,
    include: Annotated[list[str] | None, typer.Option(help="prune these parameters, too, as tokens.*")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="leave these parameters out")] = None,
    frozen: Annotated[bool, typer.Option(help="prune frozen parameters, too")] = False,
    seed: int = 0,
    batch: Annotated[int, typer.Option(help="examples a batch, for a data set")] = 128,
    data_dir: DataDir = None,
) -> None:
    """What every method would leave of a model, layer by layer; nothing is trained or written."""
    chosen = None if methods is None else list_of(methods, str, "methods")
    find_own(*(chosen or ()))
    net, batches = _model_and_batches(said(ctx), model, data, batch, data_dir, seed)
    preview_all(
        net, batches, sparsity=sparsity, methods=chosen, knobs=_knobs_by_method(knob), budget=cast(Budget, budget),
        min_kept=min_kept, include=include or (), exclude=exclude or (), frozen=frozen, seed=seed,
    )  # fmt: skip


def _knobs_by_method(given: Iterable[str] | None) -> dict[str, dict[str, Any]]:
    """method.knob=value.

    >>> _knobs_by_method(["synflow.cuts=20", "drive.cuts=5"])
    {'synflow': {'cuts': 20}, 'drive': {'cuts': 5}}
    """
    found: dict[str, dict[str, Any]] = {}
    for text in given or ():
        method, dot, rest = text.partition("=")[0].rpartition(".")
        if not dot or "=" not in text:
            raise ValueError(f"a knob of a preview is given as method.knob=value, got {text!r}")
        found.setdefault(method.strip(), {}).update(knobs_of([rest + "=" + text.partition("=")[2]]))
    return found


def _model_and_batches(
    options: Mapping[str, str], model: str, data: str, batch: int, data_dir: Path | None, seed: int
) -> tuple[nn.Module, Iterable[Any]]:
    torch.manual_seed(seed)
    find_own(model)
    if data in datasets.names() or Path(data).is_dir():
        check_data_dir(options, data)
        loaded = load_data(data, data_dir)
        shape = loaded.train.x.shape
        net = models.build(model, classes=len(loaded.classes), inputs=shape[1], size=shape[2])
        return net, Batches(loaded.train, batch, mean=loaded.mean, deviation=loaded.deviation, seed=seed)
    cannot_act(options, ["batch", "data_dir"], f"batches of your own ({data})", "they are for a data set by name")
    find_own(data)
    return models.build(model, classes=10), _own(data)()


def _own(name: str) -> Callable[[], Iterable[Any]]:
    module, _, function = name.rpartition(".")
    try:
        found: Callable[[], Iterable[Any]] = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError, ValueError):
        choices = ", ".join(datasets.names())
        raise ValueError(f"unknown data {name!r}; there are {choices}, or a function of your own") from None
    return found
