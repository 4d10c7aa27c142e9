"""Runs in groups that may be compared, and in cells: one method at one sparsity, over its seeds."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from driveprune.report.stability import Finding, Word, judged
from driveprune.report.variants import described, wanted_knobs
from driveprune.runs.spec import DENSE, Spec
from driveprune.runs.store import Run, read_run

Quantity = Literal["last", "best", "pruning", "total", "effective", "bytes", "speedup"]
"""Accuracy after the last and the best epoch; seconds to the sparse network and in all; effective sparsity; the size
of the file; how much faster than the dense network the sparse one was measured to run."""

WORKS = ("loading", "early training", "scoring", "selection", "training", "evaluation", "saving")
"""What the time of a run is made of, in the order of a figure."""

_LATE = {DENSE, "imp", "gmp", "magnitude"}
"""Methods that train (almost) to the end before they have their sparse network; the others prune early."""

_ORDER = (
    DENSE,
    "imp",
    "gmp",
    "magnitude",
    "random",
    "erk",
    "snip",
    "grasp",
    "force",
    "synflow",
    "driveflow",
    "drive",
)


@dataclass(frozen=True)
class Cell:
    """The finished runs of one method at one sparsity, over their seeds."""

    method: str
    sparsity: float
    runs: tuple[Run, ...]
    dense: float | None = None
    """The mean accuracy of the dense runs that this cell may be compared with."""

    def values(self, of: Quantity) -> tuple[float, ...]:
        """A number of each run that has it."""
        found = (quantity(run, of) for run in self.runs)
        return tuple(value for value in found if value is not None)

    def mean(self, of: Quantity) -> float | None:
        """The mean over seeds; None if no run has it."""
        values = self.values(of)
        return statistics.mean(values) if values else None

    def deviation(self, of: Quantity) -> float | None:
        """The standard deviation over seeds; None if there are not two."""
        values = self.values(of)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def collapsed(self) -> int:
        """How many of the networks no path leads through."""
        return sum(bool((run.result or {})["collapsed"]) for run in self.runs)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is to be said of each run, seen beside the others."""
        return tuple(judged(run, [other for other in self.runs if other is not run], self.dense) for run in self.runs)

    def seeds(self, word: Word) -> list[int]:
        """The seeds of the runs of which this is to be said."""
        found = zip(self.runs, self.findings, strict=True)
        return sorted(run.spec["seed"] for run, finding in found if finding.word == word)


def quantity(run: Run, of: Quantity) -> float | None:
    """A number that a finished run gave, if it did."""
    result = run.result or {}
    match of:
        case "last" | "best":
            value = result[of]
        case "pruning":
            value = result["seconds"].get("pruning", 0.0)
        case "total":
            value = sum(seconds for work, seconds in result["seconds"].items() if work != "pruning")
        case "effective":
            value = result["effective_sparsity"]
        case "bytes":
            value = result["net_bytes"]
        case "speedup":
            value = result.get("speedup")
    return None if value is None or not isfinite(value) else float(value)


def processor(run: Run) -> str:
    """The processor that a finished run says it was computed on; runs of earlier versions say its family only."""
    machine = (run.result or {}).get("environment", {}).get("machine", {})
    known = [str(machine[name]) for name in ("model", "instructions") if machine.get(name)]
    return ", ".join(known) or str(machine.get("processor", "unknown"))


def tested_rows(run: Run) -> list[dict[str, Any]]:
    """The epochs of the last cycle that were tested (IMP trains many times)."""
    rows = [row for row in (run.result or {})["rows"] if row.get("test") is not None]
    return [row for row in rows if row["cycle"] == rows[-1]["cycle"]]


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: the same data, model and training."""

    title: str
    runs: tuple[Run, ...]
    labels: tuple[str, ...]
    """The method of each run, with the knobs in which the runs of that method differ; "?" for a damaged one."""

    @cached_property
    def cells(self) -> dict[tuple[str, float], Cell]:
        """The finished runs by method and sparsity."""
        gathered: dict[tuple[str, float], dict[int, Run]] = defaultdict(dict)
        for label, run in zip(self.labels, self.runs, strict=True):
            if run.result is not None:
                gathered[label, run.spec["sparsity"]].setdefault(run.spec["seed"], run)
        cells = {key: Cell(*key, tuple(found.values())) for key, found in gathered.items()}
        dense = cells[DENSE, 0.0].mean("last") if (DENSE, 0.0) in cells else None
        return {key: cell if key[0] == DENSE else replace(cell, dense=dense) for key, cell in cells.items()}

    def finding(self, run: Run) -> Finding:
        """What is to be said of a finished run of this group, seen beside its other seeds and the dense network."""
        return self._findings[self._label_of[id(run)], run.spec["sparsity"], run.spec["seed"]]

    @cached_property
    def _label_of(self) -> dict[int, str]:
        return {id(run): label for label, run in zip(self.labels, self.runs, strict=True)}

    @cached_property
    def _findings(self) -> dict[tuple[str, float, int], Finding]:
        return {
            (*key, run.spec["seed"]): found
            for key, cell in self.cells.items()
            for run, found in zip(cell.runs, cell.findings, strict=True)
        }

    @cached_property
    def processors(self) -> list[str]:
        """What the finished runs were computed on: the same bits are to be had on the same kind only."""
        counts = Counter(processor(run) for cell in self.cells.values() for run in cell.runs)
        said = (f"{name} ({count} run{'' if count == 1 else 's'})" for name, count in counts.most_common())
        return list(counts) if len(counts) == 1 else list(said)

    @property
    def repeats(self) -> int:
        """How many finished runs repeat another one, in another store: they count once."""
        done = sum(run.result is not None for run in self.runs)
        return done - sum(len(cell.runs) for cell in self.cells.values())

    @cached_property
    def methods(self) -> list[str]:
        """As the paper orders them; variants stand beside each other."""
        return sorted({label for label, run in zip(self.labels, self.runs, strict=True) if run.spec}, key=_place)

    @cached_property
    def sparsities(self) -> list[float]:
        """All sparsities; that of the dense network only if there are no others."""
        known = [run for run in self.runs if run.spec]
        return sorted({run.spec["sparsity"] for run in known if run.spec["method"] != DENSE}) or [0.0]

    @property
    def unfinished(self) -> list[Run]:
        """Runs that gave no result: missing, failed, damaged, running or stopped."""
        return [run for run in self.runs if run.standing != "done"]

    @property
    def spec(self) -> dict[str, Any]:
        """What all its runs have in common, as the spec of one of them; empty if all are damaged."""
        return next((run.spec for run in self.runs if run.spec), {})

    @property
    def data(self) -> str:
        """The data set's name."""
        return str(self.spec["recipe"]["data"]) if self.spec else "?"

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.spec["recipe"]["model"]) if self.spec else "?"

    @property
    def name(self) -> str:
        """Its title as the name of a folder, and a few letters by which groups of the same title differ."""
        words = re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-.")[:90]
        return f"{words or 'runs'}-{hashlib.sha256(_key(self.spec).encode()).hexdigest()[:6]}"

    def cell(self, method: str, sparsity: float) -> Cell | None:
        """The cell of a table; the dense network is the same in every column."""
        return self.cells.get((method, 0.0 if method == DENSE else sparsity))

    def left(self, method: str, sparsity: float) -> list[Run]:
        """The runs of a cell of a table that gave no result."""
        wanted = (method, 0.0 if method == DENSE else sparsity)
        pairs = zip(self.labels, self.runs, strict=True)
        return [run for label, run in pairs if run.result is None and (label, run.spec.get("sparsity")) == wanted]

    def reference(self, name: str) -> str | None:
        """The variant of a method that stands for it, if the group has one."""
        return self._references.get(name)

    @cached_property
    def _references(self) -> dict[str, str]:
        """Of each method the variant with the recipe's knobs, or the one that is nearest to them.

        How many runs a variant has, and what else was run, does not matter.
        """
        variants: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for label, run in zip(self.labels, self.runs, strict=True):
            if run.spec and not run.spec["check"]:
                variants[run.spec["method"]].setdefault(label, run.spec["knobs"])
        return {name: self._chosen(name, found) for name, found in variants.items()}

    def _chosen(self, name: str, variants: Mapping[str, dict[str, Any]]) -> str:
        wanted = wanted_knobs(self.spec, name)
        return min(variants, key=lambda label: (len(wanted.odd(variants[label])), label))

    def described(self, label: str) -> str:
        """The variant of a label by its knobs, and whether they are the recipe's."""
        pairs = zip(self.labels, self.runs, strict=True)
        return described(next(run.spec for each, run in pairs if each == label))

    def best_early(self, sparsity: float, of: Quantity = "last") -> list[str]:
        """The methods with the highest mean among those that prune early, if there are several to compare."""
        early = [cell for cell in self.cells.values() if cell.sparsity == sparsity and prunes_early(cell.method)]
        means = {cell.method: mean for cell in early if (mean := cell.mean(of)) is not None}
        sound = [mean for cell in early if not cell.collapsed and (mean := cell.mean(of)) is not None]
        best = max(sound or means.values(), default=None)
        return [method for method in means if len(means) > 1 and means[method] == best]

    def mean_over_cells(self, method: str, of: Quantity) -> float | None:
        """The mean of a number over all runs of a method, at any sparsity."""
        values = [value for cell in self.cells.values() if cell.method == method for value in cell.values(of)]
        return statistics.mean(values) if values else None


def base(label: str) -> str:
    """The method's name in a label.

    >>> base("drive cuts=10 +shuffle")
    'drive'
    """
    return label.split(" ", maxsplit=1)[0]


def is_check(label: str) -> bool:
    """Whether a label is that of a sanity check."""
    return " +" in label


def prunes_early(label: str) -> bool:
    """Whether a label is that of a method that prunes early, in earnest."""
    return base(label) not in _LATE and not is_check(label)


def _place(label: str) -> tuple[int, str]:
    return (_ORDER.index(base(label)) if base(label) in _ORDER else len(_ORDER), label)


def groups(runs: Iterable[Run]) -> list[Group]:
    """Runs in groups that may be compared: all but method, sparsity and seed is the same in a group."""
    gathered: dict[str, dict[Path, Run]] = defaultdict(dict)
    for run in runs:
        gathered[_key(run.spec)][run.path.resolve()] = run
    titles = _titles([next(iter(found.values())).spec for found in gathered.values()])
    made = [
        Group(title, tuple(found.values()), tuple(labels([run.spec for run in found.values()])))
        for title, found in zip(titles, gathered.values(), strict=True)
    ]
    return sorted(made, key=lambda group: group.title)


def finding_of(folder: Path) -> Finding | None:
    """What is to be said of a run beside its like in the same store; None if it is not done."""
    run = read_run(folder)
    if run.result is None:
        return None
    spec = Spec.from_json(run.spec)
    dense = replace(spec, method=DENSE, method_code="", sparsity=0.0, knobs={}, check="", budget="weights")
    begins = tuple(f"{each.id.rpartition('-seed')[0]}-seed" for each in (spec, dense))
    here = folder.resolve()
    like = [each for each in here.parent.iterdir() if each.name.startswith(begins) and each != here]
    found = groups([run, *(read_run(each) for each in like if (each / "spec.json").exists())])
    return next(group for group in found if any(each is run for each in group.runs)).finding(run)


def labels(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods of runs by name, with the knobs in which the runs of that method differ, and the sanity check."""
    variants: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    known = [spec for spec in specs if spec]
    names: dict[str, set[str]] = defaultdict(set)
    for spec in known:
        names[spec["method"]] |= _settings(spec).keys()
    for spec in known:
        for name in names[spec["method"]]:
            variants[spec["method"]][name].add(json.dumps(_settings(spec).get(name)))
    return [_label(spec, variants[spec["method"]]) if spec else "?" for spec in specs]


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec["knobs"], "code": spec["method_code"][:8]}


def _label(spec: Mapping[str, Any], variants: Mapping[str, set[str]]) -> str:
    odd = [f"{name}={value}" for name, value in _settings(spec).items() if len(variants[name]) > 1]
    return " ".join([spec["method"], *odd, *([f"+{spec['check']}"] if spec["check"] else [])])


def _key(spec: Mapping[str, Any]) -> str:
    return json.dumps(_common(spec), sort_keys=True)


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
        written = {name: json.dumps(value) for name, value in _common(spec).items()}
        odd = [name for name, text in written.items() if any(json.dumps(o.get(name)) != text for o in alike)]
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
