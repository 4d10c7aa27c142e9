"""The command and how it speaks: errors and warnings as one line."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

from driveprune.screen import Screen, as_markup, printable, printable_json


class _Commands(TyperGroup):
    """The commands; what a wrong word of the command line is called, too, is printable."""

    def invoke(self, ctx: Any) -> Any:
        """Carry out a command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(said := getattr(error, "message", None), str):
                error.message = printable(said)  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    cls=_Commands,
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
    with suppress(OSError, SystemExit):  # whoever looked is gone (rich ends then), or the disk is full
        Screen(stderr=True).print(f"[yellow]warning:[/] {as_markup(message)}", highlight=False, soft_wrap=True)


def print_error(error: BaseException) -> None:
    """An error as one clear line."""
    said = str(error).strip().partition("\n")[0]
    told_well = isinstance(error, ValueError | TypeError | OSError | ImportError) and said
    text = said if told_well else f"{type(error).__name__}: {said}"
    Screen(stderr=True).print(f"[bold red]error:[/] {as_markup(text)}", highlight=False, soft_wrap=True)


def print_json(content: object) -> None:
    """For scripts."""
    print(printable_json(json.dumps(_known(content), indent=1, ensure_ascii=False, allow_nan=False)))


def _known(content: object) -> object:
    """What JSON has no number for is None."""
    if isinstance(content, Mapping):
        return {key: _known(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_known(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content
