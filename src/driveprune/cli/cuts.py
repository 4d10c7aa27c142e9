"""driveprune prune, preview: only the mask."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import nn

from driveprune import datasets, models
from driveprune.batches import Batches
from driveprune.cli.app import app, with_own_code
from driveprune.cli.options import BudgetName, DataDir, Knobs, knobs_of, load_data
from driveprune.cut import Budget
from driveprune.cut import prune as cut_now
from driveprune.netfile import save
from driveprune.preview import preview as preview_all
from driveprune.screen import Screen, as_markup
from driveprune.summary import summary


@app.command()
@with_own_code
def prune(
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
    net, batches = _model_and_batches(model, data, batch, data_dir, seed)
    mask = cut_now(
        net, batches, method=method, sparsity=sparsity, knobs=knobs_of(knob), budget=cast(Budget, budget), seed=seed
    )
    save(output, net, mask)
    Screen().print(summary(mask))
    Screen().print(f"written to {as_markup(output)}", highlight=False, soft_wrap=True)


@app.command()
@with_own_code
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
    Screen().print(preview_all(net, batches, sparsity=sparsity, seed=seed))


def _model_and_batches(
    model: str, data: str, batch: int, data_dir: Path | None, seed: int
) -> tuple[nn.Module, Iterable[Any]]:
    torch.manual_seed(seed)
    if data in datasets.names() or Path(data).is_dir():
        loaded = load_data(data, data_dir)
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
