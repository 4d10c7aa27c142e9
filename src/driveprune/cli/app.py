"""The command and how it speaks: errors and warnings as one line."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

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
        try:
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except Exception as error:
            print_error(error)
            raise typer.Exit(2) from None

    return wrapped


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    Console(stderr=True).print(f"[yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


def print_error(error: BaseException) -> None:
    """An error as one clear line."""
    said = str(error).strip().partition("\n")[0]
    told_well = isinstance(error, ValueError | TypeError | OSError | ImportError) and said
    text = said if told_well else f"{type(error).__name__}: {said}"
    Console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)


def print_json(content: object) -> None:
    """For scripts."""
    print(json.dumps(content, indent=1, ensure_ascii=False))
