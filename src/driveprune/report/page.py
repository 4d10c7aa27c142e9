"""Runs as a single HTML page that works offline, opened from disk: tables, claims, figures, every run.

The tables, the overview and all that is wrong with a store stand in the page itself; `page.js` adds the figures, the
filters and the details of a run from the numbers that are embedded as JSON.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from itertools import count
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from driveprune import datasets, methods, models
from driveprune.files import checked_json
from driveprune.report import palette, tables
from driveprune.report.claims import claims, signed
from driveprune.report.groups import WORKS, Cell, Group, base, is_check, prunes_early, quantity, tested_rows
from driveprune.runs.spec import DENSE
from driveprune.runs.store import Run
from driveprune.screen import printable, printable_json

NEAR = 1.0
"""Points of accuracy that a network may lose and still be advised in the overview."""

_SYMBOLS = {
    "o": "circle", "s": "square", "^": "triangle", "D": "diamond", "v": "downwards", "P": "cross",
    "X": "wye", "*": "star",
}  # fmt: skip
"""The marks of the other figures, as page.js names them."""
_SCRIPTS = (
    "vendor/d3.min.js", "vendor/plot.umd.min.js", "page_files/marks.js", "page_files/figures.js",
    "page_files/page.js",
)  # fmt: skip
_DASHES = ("", "6 3", "2 2", "8 3 2 3")


def page(groups: Sequence[Group], *, title: str = "Pruning runs") -> str:
    """The page as the text of an HTML file."""
    flat = [(number, label, run) for number, group in enumerate(groups) for label, run in _labelled(group)]
    methods = _methods(flat)
    names = _unique([printable(run.path.name or str(run.path)) for _, _, run in flat])
    shorts = _shorts(groups)
    return _template().render(
        title=title,
        made=f"driveprune {version('driveprune')}, {datetime.now(UTC):%Y-%m-%d}",
        total=len(flat),
        standings=_standings(run for _, _, run in flat),
        groups=groups,
        parts=[_part(number, group, shorts[number]) for number, group in enumerate(groups) if group.methods],
        advice=[_advice(number, group) for number, group in enumerate(groups) if group.cells],
        near=NEAR,
        claims=claims(groups),
        methods=methods,
        colours=[palette.colour(label, methods) for label in methods],
        works=palette.WORKS,
        data_sets=sorted({group.data for group in groups}),
        models=sorted({group.model for group in groups}),
        odd=_odd(flat, names, groups),
        environments=_environments(run for _, _, run in flat),
        seeds=[(group.title, _seeds(group), _conditions(group)) for group in groups if group.methods],
        data=_embedded(_shown(_data(groups, methods, flat, names))),
        specs=_embedded([checked_json(run.spec) if run.spec else "" for _, _, run in flat]),
        css=Markup(_file("page_files/page.css")),
        scripts=[Markup(_file(name)) for name in _SCRIPTS],
    )


def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters |= {"time": said_time, "signed": signed, "percent": percent, "printed": _printed}
    return environment.from_string(_file("page_files/page.html"))


def _shown(value: Any) -> Any:
    """What stands on the page: text of others without what turns the direction of writing or is not seen."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, lines=True)
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, list) else value


def _file(name: str) -> str:
    return (files("driveprune.report") / name).read_text(encoding="utf-8")


def _embedded(content: object) -> Markup:
    """JSON that no text in it can break out of."""
    text = printable_json(json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def said_time(seconds: float) -> str:
    """Seconds as a person says them.

    >>> [said_time(seconds) for seconds in (0.081, 45.27, 1500, 24000)]
    ['0.08 s', '45.3 s', '25 min', '6.7 h']
    """
    if seconds < 600:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def percent(fraction: float) -> str:
    """A sparsity.

    >>> percent(0.993)
    '99.3%'
    """
    return f"{100 * fraction:.6g}%"


def _printed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _labelled(group: Group) -> Iterable[tuple[str, Run]]:
    return zip(group.labels, group.runs, strict=True)


def _standings(runs: Iterable[Run]) -> list[tuple[str, int]]:
    """How many runs are done, then how many are not, and why."""
    return sorted(Counter(run.standing for run in runs).items(), key=lambda item: (item[0] != "done", item[0]))


def _methods(flat: Sequence[tuple[int, str, Run]]) -> list[str]:
    """All methods of all groups in the order of a table; last "?", that of runs whose spec is damaged."""
    labels = tuple(label for _, label, _ in flat)
    return [*Group("all", tuple(run for _, _, run in flat), labels).methods, *(["?"] if "?" in labels else [])]


def _shorts(groups: Sequence[Group]) -> list[str]:
    """Model and data; where that is not enough, the whole title."""
    shorts = [f"{group.model} on {group.data}" for group in groups]
    return [short if shorts.count(short) == 1 else group.title for short, group in zip(shorts, groups, strict=True)]


def _unique(names: Sequence[str]) -> list[str]:
    """The same name in two stores is two runs.

    >>> _unique(["a", "b", "a"])
    ['a', 'b', 'a~2']
    """
    found: dict[str, None] = {}
    for name in names:
        free = (name if number == 1 else f"{name}~{number}" for number in count(1))
        found[next(each for each in free if each not in found)] = None
    return list(found)


def _styles(methods: Sequence[str]) -> list[dict[str, Any]]:
    """How each method is drawn: variants share the colour; symbol and dashes tell them apart."""
    variants: Counter[str] = Counter()
    marked = [label for label in methods if label != DENSE]  # a line without marks
    found = []
    for place, label in enumerate(methods):
        dash = _DASHES[variants[base(label)] % len(_DASHES)]
        variants[base(label)] += 1
        symbol = "circle" if label == DENSE else _SYMBOLS[palette.mark(label, marked)]
        drawn = {"colour": f"var(--m{place})", "symbol": symbol, "dash": dash}
        found.append({"name": label, "check": is_check(label), **drawn})
    return found


@dataclass(frozen=True)
class _Part:
    """A group as the page shows it."""

    number: int
    group: Group
    short: str
    tables: tuple[tables.Table, ...]
    notes: list[str]
    figures: tuple[_Figure, ...]


def _part(number: int, group: Group, short: str) -> _Part:
    made = (tables.accuracy(group, "last"), tables.accuracy(group, "best"), tables.times(group))
    return _Part(number, group, short, made, tables.notes(group), tuple(_figures(group)))


@dataclass(frozen=True)
class _Figure:
    """A figure that page.js draws, by name."""

    name: str
    heading: str
    about: str
    wide: bool = False


_FIGURES = (
    _Figure("accuracy", "Accuracy against sparsity",
            "Line: mean after the last epoch. Band: ± one deviation over seeds. Each point is a run; hollow, at the "
            "foot: a collapsed network; ringed: an unstable run, far below its like."),
    _Figure("relative", "Change relative to IMP",
            "Points of accuracy above or below the mean of IMP at the same sparsity, last epoch."),
    _Figure("cost", "Accuracy against the time to obtain the network",
            "Grey: the Pareto front, through the methods that no other beats in both time and accuracy.", wide=True),
    _Figure("phases", "Where the time goes", "Mean over seeds and sparsities."),
    _Figure("effective", "Effective against nominal sparsity",
            "Effective: weights on no path from input to output count as removed. Dashed: there are none."),
    _Figure("size", "Size of the file", "In % of the dense network's file."),
    _Figure("speedup", "Measured speed-up", "How many times as fast as the dense network the sparse one ran."),
    _Figure("layers", "Density of each layer",
            "What is kept of each layer, from input to output; mean over seeds. Hollow: nothing is kept.", wide=True),
    _Figure("curves", "Learning curves",
            "Test accuracy after each epoch of the last training; mean over seeds.", wide=True),
)  # fmt: skip


def _figures(group: Group) -> list[_Figure]:
    """The figures for which a group has numbers; one that would stand beside nothing is wide."""
    pruned = [run for cell in group.cells.values() if cell.method != DENSE for run in cell.runs]
    dense = [run for cell in group.cells.values() if cell.method == DENSE for run in cell.runs]
    methods = {run.spec["method"] for run in pruned}
    has = {
        "accuracy": bool(pruned),
        "relative": group.reference("imp") is not None and len(methods) > 1,
        "cost": bool(pruned),
        "phases": bool(group.cells),
        "effective": _have(pruned, "effective_sparsity"),
        "layers": _have(pruned, "layers"),
        "curves": _have([*pruned, *dense], "rows"),
        "size": _have(pruned, "net_bytes") and _have(dense, "net_bytes"),
        "speedup": _have(pruned, "speedup"),
    }
    figures = [figure for figure in _FIGURES if has[figure.name]]
    narrow = [figure for figure in figures if not figure.wide]
    alone = narrow[-1] if len(narrow) % 2 else None
    return [replace(figure, wide=True) if figure is alone else figure for figure in figures]


def _have(runs: Iterable[Run], key: str) -> bool:
    return any((run.result or {}).get(key) for run in runs)


@dataclass(frozen=True)
class _Choice:
    """The best method that prunes early at one sparsity, and what it costs; in points, seconds and times."""

    sparsity: float
    method: str
    accuracy: float
    deviation: float | None
    to_dense: float | None
    to_imp: float | None
    seconds: float
    imp_seconds: float | None
    collapsed: bool
    unstable: bool


@dataclass(frozen=True)
class _Advice:
    """The answer of a group to: which method, at what sparsity, at what cost."""

    number: int
    group: Group
    seeds: int
    dense: float | None
    choices: tuple[_Choice, ...]
    best: _Choice | None
    """At the highest sparsity at which a method that prunes early is still near the dense network."""
    near: bool


def _advice(number: int, group: Group) -> _Advice:
    choices = tuple(choice for sparsity in group.sparsities if (choice := _choice(group, sparsity)) is not None)
    sound = [choice for choice in choices if not choice.collapsed and not choice.unstable]
    sound = sound or [choice for choice in choices if not choice.collapsed]
    near = [choice for choice in sound if choice.to_dense is not None and choice.to_dense >= -NEAR]
    dense = group.cell(DENSE, 0.0)
    return _Advice(
        number,
        group,
        min(len(cell.runs) for cell in group.cells.values()),
        None if dense is None else dense.mean("last"),
        choices,
        near[-1] if near else max(sound, key=lambda choice: choice.accuracy, default=None),
        bool(near),
    )


def _choice(group: Group, sparsity: float) -> _Choice | None:
    early = [cell for cell in group.cells.values() if cell.sparsity == sparsity and prunes_early(cell.method)]
    means = {cell.method: mean for cell in early if (mean := cell.mean("last")) is not None}
    if not means:
        return None
    cell = max((cell for cell in early if cell.method in means), key=lambda c: (not c.collapsed, means[c.method]))
    accuracy = means[cell.method]
    dense, imp = group.cell(DENSE, 0.0), group.cell(group.reference("imp") or "", sparsity)
    return _Choice(
        sparsity,
        cell.method,
        accuracy,
        cell.deviation("last"),
        _points_above(accuracy, dense),
        _points_above(accuracy, imp),
        cell.mean("pruning") or 0.0,
        None if imp is None else imp.mean("pruning"),
        cell.collapsed > 0,
        bool(cell.seeds("unstable")),
    )


def _points_above(accuracy: float, other: Cell | None) -> float | None:
    mean = None if other is None else other.mean("last")
    return None if mean is None else 100 * (accuracy - mean)


@dataclass(frozen=True)
class _Odd:
    """A run that gave no result."""

    number: int
    name: str
    group: str
    label: str
    run: Run
    why: str


def _odd(flat: Sequence[tuple[int, str, Run]], names: Sequence[str], groups: Sequence[Group]) -> list[_Odd]:
    found = [
        _Odd(place, names[place], groups[number].title, label, run, _why(run))
        for place, (number, label, run) in enumerate(flat)
        if run.standing != "done"
    ]
    return sorted(found, key=lambda odd: (odd.run.standing, odd.group))


def _why(run: Run) -> str:
    """The last line of an error, or how far the run came."""
    lines = (run.error or "").strip().splitlines()
    if lines:
        return lines[-1]
    status = run.status or {}
    step, steps = status.get("step"), status.get("steps")
    if isinstance(step, int) and isinstance(steps, int) and steps > 0:
        return f"{100 * step / steps:.0f}%: step {step:,} of {steps:,}, {status.get('work', '')}".rstrip(", ")
    return ""


def _environments(runs: Iterable[Run]) -> list[tuple[dict[str, str], int, str]]:
    """Versions and machines, how many runs come from each, and the days."""
    gathered: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        known = (run.result or {}).get("environment") or {}
        if known:
            parts = {**known.get("versions", {}), **known.get("machine", {})}
            gathered[json.dumps(parts, sort_keys=False)].append(str(known.get("date", "")))
    return [
        ({str(name): str(value) for name, value in json.loads(parts).items()}, len(dates), _span(sorted(set(dates))))
        for parts, dates in gathered.items()
    ]


def _span(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _seeds(group: Group) -> str:
    return ", ".join(str(seed) for seed in sorted({run.spec["seed"] for run in group.runs if run.spec}))


def _conditions(group: Group) -> str:
    """What else of the specs of a group decides the bits of a result."""
    spec = group.spec
    words = [f"{spec['threads']} thread{'' if spec['threads'] == 1 else 's'}", spec["device"], spec["precision"]]
    words += [f"{spec['ranks']} ranks"] if "ranks" in spec else []
    words += ["channels last"] if spec["channels_last"] else []
    words += [f"{spec['holdout']:,} images held out"] if spec["holdout"] else []
    return ", ".join([*words, f"data {spec['fingerprint'][:12]}"])


def _data(
    groups: Sequence[Group],
    methods: Sequence[str],
    flat: Sequence[tuple[int, str, Run]],
    names: Sequence[str],
) -> dict[str, Any]:
    """The numbers that the script needs, small: 5,000 runs are a page that still opens at once."""
    places = {label: place for place, label in enumerate(methods)}
    return {
        "works": WORKS,
        "labels": _styles(methods),
        "groups": [
            {
                "title": group.title,
                "data": group.data,
                "model": group.model,
                "layers": _layer_names(group),
                "imp": group.reference("imp"),
            }
            for group in groups
        ],
        "runs": [
            {"id": name, "group": number, "label": places[label], **_run(run), **_found(groups[number], run)}
            for name, (number, label, run) in zip(names, flat, strict=True)
        ],
    }


def _found(group: Group, run: Run) -> dict[str, Any]:
    """What is to be said of a run beside its like, if there is something."""
    finding = None if run.result is None else group.finding(run)
    return {} if finding is None or finding.word == "sound" else {"word": finding.word, "finding": str(finding)}


def _layer_names(group: Group) -> list[str]:
    found = ((run.result or {}).get("layers") for run in group.runs)
    return [str(layer["name"]) for layer in next((layers for layers in found if layers), ())]


def _run(run: Run) -> dict[str, Any]:
    spec, result = run.spec, run.result
    about: dict[str, Any] = {
        "standing": run.standing,
        "sparsity": spec.get("sparsity"),
        "seed": spec.get("seed"),
        "command": _command(run) if spec else "",
        "named": _named(spec) if spec else "",
    }
    if run.standing != "done":
        about |= {"why": _why(run), "error": run.error or ""}
    return about if result is None else about | _numbers(run, result)


def _command(run: Run) -> str:
    """What does the run again, elsewhere: a run that is done is not done again in its own store."""
    spec = "spec.json" if run.standing == "missing" else str(run.path / "spec.json")  # the one below, to download
    ranks = run.spec.get("ranks", 1)
    start = "driveprune" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m driveprune"
    return f"{start} run --spec {shlex.quote(spec)} --runs repeated"


def _named(spec: Mapping[str, Any]) -> str:
    """What repeating a run would load beside this package, and when it does; empty if nothing."""
    recipe = spec["recipe"]
    known = {*models.names(), *methods.names(), *datasets.names(), DENSE}
    found = [name for name in (recipe["model"], spec["method"], recipe["data"]) if name not in known]
    return f"loads {' and '.join(found)}: only if it is known there by its checksum, or with --trust" if found else ""


def _numbers(run: Run, result: Mapping[str, Any]) -> dict[str, Any]:
    tested = tested_rows(run)
    return {
        "last": _number(quantity(run, "last"), 17),  # whole: it is shown with the digits of the tables
        "best": _number(quantity(run, "best"), 17),
        "pruning": _number(quantity(run, "pruning")),
        "total": _number(quantity(run, "total")),
        "seconds": [_number(result["seconds"].get(work, 0.0)) for work in WORKS],
        "effective": _number(result.get("effective_sparsity"), 8),
        "removed": _number(result.get("sparsity"), 8),
        "collapsed": bool(result.get("collapsed")),
        "macs": [_number(result.get("macs")), _number(result.get("dense_macs"))],
        "bytes": _number(result.get("net_bytes")),
        "speedup": _number(result.get("speedup")),
        "kept": [_number(layer["kept"] / max(1, layer["weights"]), 6) for layer in result.get("layers") or ()],
        "epochs": [row["epoch"] for row in tested],
        "curve": [_number(row["test"]) for row in tested],
        "data": result.get("data"),
        "best_by": result.get("best_by", "test"),
    }


def _number(value: float | None, digits: int = 4) -> float | None:
    """Rounded; JSON knows no NaN."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
