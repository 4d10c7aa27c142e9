"""What the paper printed, from the CSV files beside this one (one a table or figure of the paper)."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from driveprune import methods, recipes
from driveprune.runs.spec import DENSE


@cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    """The lines of a file: accuracy, imagenet, pruning_seconds, total_hours, relative_to_imp, alexnet_time."""
    text = (files("driveprune.report") / "paper_data" / f"{name}.csv").read_text()
    return tuple(csv.DictReader(text.splitlines()))


@cache
def _accuracies() -> dict[tuple[str, str, str, float], float]:
    found = (*rows("accuracy"), *rows("imagenet"))
    tables = {(r["data"], r["model"], r["method"], float(r["sparsity"])): float(r["accuracy"]) for r in found}
    return {**_from_figure(), **tables}


def _from_figure() -> dict[tuple[str, str, str, float], float]:
    """Cells that only the figure of changes relative to IMP has.

    At 90% and 95% it mixes up the order of subtraction; those cells are in the table.
    """
    found = {}
    for row in rows("relative_to_imp"):
        place = row["data"], row["model"]
        found[*place, row["method"], float(row["sparsity"])] = float(row["minuend"])
        found[*place, "imp", float(row["sparsity"])] = float(row["subtrahend"])
    return found


def accuracy(data: str, model: str, method: str, sparsity: float) -> float | None:
    """Test accuracy in %, if the paper has that cell.

    >>> accuracy("cifar10", "vgg16", "drive", 0.98)
    91.36
    """
    return _accuracies().get((data, model, method, 0.0 if method == DENSE else sparsity))


def settings() -> list[tuple[str, str]]:
    """Data and model of each part of the paper's tables."""
    return sorted({(data, model) for data, model, _, _ in _accuracies()})


def sparsities(data: str, model: str) -> list[float]:
    """The sparsities of a part of the paper's tables."""
    return sorted({s for d, m, method, s in _accuracies() if (d, m) == (data, model) and method != DENSE})


@cache
def pruning_seconds(data: str, model: str) -> dict[str, float]:
    """Seconds to the sparse network by method; empty if the paper has none.

    >>> pruning_seconds("cifar10", "alexnet")["drive"]
    220.0
    """
    found = rows("pruning_seconds")
    return {row["method"]: float(row["seconds"]) for row in found if (row["data"], row["model"]) == (data, model)}


@cache
def total_hours(data: str, model: str) -> dict[str, float]:
    """Hours of pruning and training by method; empty if the paper has none."""
    found = rows("total_hours")
    return {row["method"]: float(row["hours"]) for row in found if (row["data"], row["model"]) == (data, model)}


def default_knobs(method: str) -> dict[str, Any] | None:
    """The knobs of a method of this package, as a spec has them; None for one of the user's: it is not imported."""
    if method not in methods.names():
        return None
    stated = {name: value for name, value in methods.knobs(method).items() if not methods.came_later(method, name)}
    found: dict[str, Any] = json.loads(json.dumps(stated))
    return found


def paper_knobs(data: str, model: str, method: str) -> dict[str, Any] | None:
    """The knobs with which the paper used a method; None if it did not."""
    name, defaults = f"paper-{model}-{data}", default_knobs(method)
    if name not in recipes.names() or defaults is None or method not in {"imp", "snip", "synflow", "drive"}:
        return None
    found: dict[str, Any] = json.loads(json.dumps({**defaults, **recipes.get(name).knobs.get(method, {})}))
    return found


def differences(spec: Mapping[str, Any], knobs: Mapping[str, Mapping[str, Any]]) -> str:
    """In which settings runs are not the paper's; empty if in none, or if the paper has nothing to compare with.

    Args:
        spec: what the runs have in common.
        knobs: method -> the knobs with which it was run.

    """
    wanted = spec.get("recipe", {})
    name = f"paper-{wanted.get('model')}-{wanted.get('data')}"
    if name not in recipes.names():
        return ""
    theirs = recipes.get(name).to_json()
    odd = [key for key, value in wanted.items() if key not in {"knobs", "sparsities"} and theirs[key] != value]
    said = [f"{key.replace('_', ' ')} {_said(wanted[key])} (paper {_said(theirs[key])})" for key in odd]
    for method, ours in knobs.items():
        printed = paper_knobs(wanted["data"], wanted["model"], method) or ours
        said += [
            f"{method}'s {key.replace('_', ' ')} {_said(ours.get(key))} (paper {_said(value)})"
            for key, value in printed.items()
            if ours.get(key) != value
        ]
    return ", ".join([*said, *([] if spec["official"] else ["data that are not the official ones"])])


def _said(value: object) -> str:
    if value is None:
        return "all"
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
