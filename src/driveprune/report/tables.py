"""Tables of runs: accuracy by method and sparsity, times, and what did not finish."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from driveprune.runs.spec import DENSE
from driveprune.runs.store import Run

EARLY = ("snip", "synflow", "drive", "grasp", "force", "erk", "random")
"""Methods that do not train to the end before they cut: the best of them is in bold."""

_ORDER = (DENSE, "imp", "gmp", "magnitude", "random", "erk", "snip", "grasp", "force", "synflow", "drive")


@dataclass(frozen=True)
class Cell:
    """What the runs of one kind gave, over their seeds."""

    method: str
    sparsity: float
    last: tuple[float, ...]
    best: tuple[float, ...]
    pruning_seconds: tuple[float, ...]
    total_seconds: tuple[float, ...]
    collapsed: int
    """How many of the networks no path leads through."""


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: the same data, model and training."""

    title: str
    methods: list[str]
    """As the paper orders them; variants stand beside each other."""
    cells: dict[tuple[str, float], Cell]
    unfinished: tuple[Run, ...]

    @property
    def sparsities(self) -> list[float]:
        """All sparsities; that of the dense network only if there are no others."""
        return sorted({sparsity for method, sparsity in self.cells if method != DENSE}) or [0.0]


def _place(method: str) -> tuple[int, str]:
    name = method.split(" ", maxsplit=1)[0]
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), method)


def labels(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods of runs by name, with the knobs in which the runs of that method differ, and the sanity check."""
    variants: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for spec in specs:
        variants[spec["method"]].append(_settings(spec))
    return [_label(spec, variants[spec["method"]]) for spec in specs]


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec["knobs"], "code": spec["method_code"][:8]}


def _label(spec: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> str:
    odd = [
        f"{name}={value}" for name, value in _settings(spec).items() if any(v.get(name) != value for v in variants)
    ]
    return " ".join([spec["method"], *odd, *([f"+{spec['check']}"] if spec["check"] else [])])


def groups(runs: Iterable[Run]) -> list[Group]:
    """Runs in groups that may be compared: all but method, sparsity and seed is the same in a group."""
    gathered: dict[str, dict[Path, Run]] = defaultdict(dict)
    for run in runs:
        gathered[json.dumps(_common(run.spec), sort_keys=True)][run.path.resolve()] = run
    titles = _titles([next(iter(found.values())).spec for found in gathered.values()])
    found = [_group(title, list(each.values())) for title, each in zip(titles, gathered.values(), strict=True)]
    return sorted(found, key=lambda group: group.title)


def _group(title: str, runs: Sequence[Run]) -> Group:
    known = [run for run in runs if run.spec]
    names = labels([run.spec for run in known])
    gathered: dict[tuple[str, float], list[Run]] = defaultdict(list)
    for name, run in zip(names, known, strict=True):
        if run.result is not None:
            gathered[name, run.spec["sparsity"]].append(run)
    cells = {key: _cell(*key, [run.result or {} for run in found]) for key, found in gathered.items()}
    unfinished = tuple(run for run in runs if run.standing != "done")
    return Group(title, sorted(set(names), key=_place), cells, unfinished)


def _common(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a fair comparison, flat."""
    own = {"method", "method_code", "sparsity", "seed", "knobs", "check", "recipe"}
    recipe = {name: value for name, value in spec.get("recipe", {}).items() if name not in {"knobs", "sparsities"}}
    return {**{name: value for name, value in spec.items() if name not in own}, **recipe}


def _titles(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A title for each group; where two would be the same, with the settings in which they differ."""
    titles = [_title(spec) if spec else "damaged" for spec in specs]
    full = []
    for title, spec in zip(titles, specs, strict=True):
        alike = [_common(other) for other, name in zip(specs, titles, strict=True) if name == title]
        odd = [name for name, value in _common(spec).items() if any(other.get(name) != value for other in alike)]
        extra = ", ".join(f"{name} {_common(spec)[name]}" for name in odd)
        full.append(f"{title}; {extra}" if extra else title)
    return full


def _title(spec: Mapping[str, Any]) -> str:
    recipe = spec["recipe"]
    width = "" if recipe["width"] == 1 else f" (width {recipe['width']:g})"
    images = "" if recipe["images"] is None else f", {recipe['images']:,} images"
    strange = "" if spec["official"] else " (not the official data)"
    smooth = ", smoothed labels" if recipe["label_smoothing"] else ""
    return (
        f"{recipe['model']}{width} on {recipe['data']}{strange}{images}, {recipe['epochs']} epochs of "
        f"{recipe['optimizer']} at {recipe['rate']:g}, batch {recipe['batch']}{smooth}"
    )


def _cell(method: str, sparsity: float, results: Sequence[dict[str, Any]]) -> Cell:
    seconds = [result["seconds"] for result in results]
    return Cell(
        method=method,
        sparsity=sparsity,
        last=tuple(result["last"] for result in results if result["last"] is not None),
        best=tuple(result["best"] for result in results if result["best"] is not None),
        pruning_seconds=tuple(each.get("pruning", 0.0) for each in seconds),
        total_seconds=tuple(sum(v for work, v in each.items() if work != "pruning") for each in seconds),
        collapsed=sum(bool(result["collapsed"]) for result in results),
    )


def accuracy_table(group: Group, of: str = "last") -> Table:
    """The paper's table: mean accuracy in % over seeds, with the deviation where there are several."""
    title = f"test accuracy in %, {of} epoch"
    table = Table(title=title, title_justify="left", min_width=len(title) + 1)
    table.add_column("method", no_wrap=True)
    for sparsity in group.sparsities:
        table.add_column(f"{100 * sparsity:g}%", justify="right")
    for method in group.methods:
        table.add_row(escape(method), *(_accuracy(group, method, sparsity, of) for sparsity in group.sparsities))
    return table


def _accuracy(group: Group, method: str, sparsity: float, of: str) -> str:
    cell = group.cells.get((method, 0.0 if method == DENSE else sparsity))
    values: tuple[float, ...] = () if cell is None else getattr(cell, of)
    if cell is None or not values:
        return "-"
    text = spread(values)
    if cell.collapsed:
        text = f"[underline]{text}[/]*"
    return f"[bold]{text}[/]" if method == best_early(group, sparsity, of) else text


def spread(values: Sequence[float]) -> str:
    """Mean and deviation of fractions, in %.

    >>> spread([0.9, 0.92])
    '91.00 ± 1.41'
    """
    mean = f"{100 * statistics.mean(values):.2f}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else mean


def best_early(group: Group, sparsity: float, of: str = "last") -> str | None:
    """The method with the highest mean among those that prune early, if there are several."""
    means = {
        method: statistics.mean(getattr(cell, of))
        for (method, reached), cell in group.cells.items()
        if reached == sparsity and method in EARLY and getattr(cell, of)
    }
    return max(means, key=lambda method: means[method]) if len(means) > 1 else None


def time_table(group: Group) -> Table:
    """Seconds of pruning and in all, means over seeds and sparsities, and how much faster than IMP."""
    table = Table(title="seconds, mean over seeds and sparsities", title_justify="left")
    table.add_column("method", no_wrap=True)
    for title in ("to the sparse network", "in all", "pruning against IMP"):
        table.add_column(title, justify="right")
    imp = _mean_seconds(group, "imp")
    for method in group.methods:
        seconds = _mean_seconds(group, method)
        if seconds is not None:
            faster = f"{imp[0] / seconds[0]:,.1f}× faster" if imp and seconds[0] > 0 and method != "imp" else ""
            pruning = "" if method == DENSE else f"{seconds[0]:,.2f}"
            table.add_row(escape(method), pruning, f"{seconds[1]:,.1f}", "" if method == DENSE else faster)
    return table


def _mean_seconds(group: Group, method: str) -> tuple[float, float] | None:
    cells = [cell for (name, _), cell in group.cells.items() if name == method]
    pruning = [value for cell in cells for value in cell.pruning_seconds]
    total = [value for cell in cells for value in cell.total_seconds]
    return (statistics.mean(pruning), statistics.mean(total)) if total else None


def _seeds(least: int, most: int) -> str:
    count = str(least) if least == most else f"{least} to {most}"
    return f"{count} seed{'' if count == '1' else 's'} a cell"


def notes(group: Group) -> list[str]:
    """What a reader must know beside the tables."""
    cells = list(group.cells.values())
    seeds = sorted({len(cell.last) for cell in cells})
    lines = [_seeds(seeds[0], seeds[-1])] if cells else []
    if any(cell.collapsed for cell in cells):
        lines.append("* underlined: no path leads from input to output any more, the network cannot learn")
    drive, imp = _mean_seconds(group, "drive"), _mean_seconds(group, "imp")
    if drive and imp:
        lines.append(f"drive obtains its sparse networks {imp[0] / drive[0]:,.1f}× faster than imp")
    for run in group.unfinished:
        why = f": {run.error.splitlines()[-1]}" if run.error else ""
        lines.append(f"{run.standing}: {run.path.name}{why}")
    return lines
