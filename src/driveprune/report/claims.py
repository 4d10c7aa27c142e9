"""The claims of the paper, tested by a set of runs, and by the paper's own tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from driveprune.report import paper
from driveprune.report.groups import Group, base
from driveprune.runs.spec import DENSE

Verdict = Literal["held", "did not hold", "not tested"]

MARGIN = 1.0
"""Points of accuracy that we take for the paper's "marginally"."""
COMPARABLE = 1.15
"""Ratio of total times that we take for the paper's "comparable"; in its own figure it is up to 1.11."""
METHODS = ("drive", "imp", "snip", "synflow")
HIGH = 0.993
"""The paper's highest sparsity."""


@dataclass(frozen=True)
class Check:
    """One test of a claim."""

    group: str
    """The title of the runs that it was made with."""
    where: str
    verdict: Verdict
    numbers: str
    variants: tuple[str, ...] = ()
    """The variants of the methods in it, by their knobs."""


@dataclass(frozen=True)
class Claim:
    """What the paper claims, and what became of it."""

    text: str
    verdict: Verdict
    summary: str
    in_paper: str
    """The same test on the paper's own numbers."""
    checks: tuple[Check, ...]

    @property
    def variants(self) -> str:
        """What was compared: the variants of the methods by their knobs, each once."""
        return " · ".join(dict.fromkeys(text for check in self.checks for text in check.variants))


@dataclass(frozen=True)
class Evidence:
    """The numbers that claims are about: of a group of runs, or of the paper."""

    title: str
    data: str
    model: str
    accuracies: Mapping[tuple[str, float], tuple[float, float | None]]
    """(method, sparsity) -> mean and deviation in %; the dense network at sparsity 0."""
    pruning: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)
    collapsed: frozenset[tuple[str, float]] = frozenset()

    references: Mapping[str, str] = field(default_factory=dict)
    """Method -> the variant that stands for it."""
    unstable: Mapping[tuple[str, float], tuple[int, int]] = field(default_factory=dict)
    """(method, sparsity) -> how many runs end far below their like, of how many."""
    described: Mapping[str, str] = field(default_factory=dict)
    """Method -> its variant by its knobs."""

    def of(self, name: str) -> list[str]:
        """The variant that stands for a method, if there is one."""
        return [self.references[name]] if name in self.references else []

    def pairs(self, rival: str) -> list[tuple[str, str]]:
        """DRIVE and another method."""
        return [(drive, other) for drive in self.of("drive") for other in self.of(rival)]

    def sparsities(self, *methods: str) -> list[float]:
        """The sparsities at which all of some methods have an accuracy."""
        found = [{s for method, s in self.accuracies if method == wanted} for wanted in methods]
        return sorted(set.intersection(*found))

    def check(self, where: str, held: bool, numbers: str) -> Check:
        """What a test gave."""
        variants = tuple(text for name, text in self.described.items() if name in where.split())
        return Check(self.title, where, "held" if held else "did not hold", numbers, variants)


def of_runs(group: Group) -> Evidence:
    """The numbers of a group of runs, after the last epoch."""
    accuracies = {}
    for key, cell in group.cells.items():
        mean, deviation = cell.mean("last"), cell.deviation("last")
        if mean is not None:
            accuracies[key] = (100 * mean, None if deviation is None else 100 * deviation)
    references = {name: label for name in METHODS if (label := group.reference(name)) is not None}
    pruning, total = (_common_seconds(group, list(references.values()), of) for of in ("pruning", "total"))
    collapsed = frozenset(key for key, cell in group.cells.items() if cell.collapsed)
    unstable = {
        key: (len(seeds), len(cell.runs)) for key, cell in group.cells.items() if (seeds := cell.seeds("unstable"))
    }
    described = {name: group.described(label) for name, label in references.items()}
    return Evidence(
        group.title, group.data, group.model, accuracies, pruning, total, collapsed, references, unstable, described
    )


def _common_seconds(group: Group, labels: Sequence[str], of: Literal["pruning", "total"]) -> dict[str, float]:
    """Mean seconds of some methods over the sparsities that all of them have that were run at all."""
    run = [label for label in labels if any(method == label for method, _ in group.cells)]
    common = [s for s in group.sparsities if all((label, s) in group.cells for label in run)]
    if not common:
        return {}
    return {label: sum(group.cells[label, s].mean(of) or 0.0 for s in common) / len(common) for label in run}


def of_paper() -> list[Evidence]:
    """The numbers of the paper, one piece of evidence for each data set and model."""
    found = []
    for data, model in paper.settings():
        printed = [row for name in ("accuracy", "imagenet") for row in paper.rows(name)]
        printed = [row for row in printed if (row["data"], row["model"]) == (data, model)]
        cells = {(row["method"], float(row["sparsity"])): float(row["accuracy"]) for row in printed}
        collapsed = {(row["method"], float(row["sparsity"])) for row in printed if row["collapsed"] == "1"}
        accuracies = {key: (value, None) for key, value in cells.items()}
        pruning, total = paper.pruning_seconds(data, model), paper.total_hours(data, model)
        names = {name: name for name in METHODS}
        found.append(
            Evidence(f"{model} on {data}", data, model, accuracies, pruning, total, frozenset(collapsed), names)
        )
    return found


def _beats(rival: str) -> Callable[[Evidence], list[Check]]:
    def test(evidence: Evidence) -> list[Check]:
        return [
            _compare(evidence, drive, other, sparsity, margin=0.0)
            for drive, other in evidence.pairs(rival)
            for sparsity in evidence.sparsities(drive, other)
        ]

    return test


def _near_imp(evidence: Evidence) -> list[Check]:
    return [
        _compare(evidence, drive, imp, sparsity, margin=MARGIN)
        for drive, imp in evidence.pairs("imp")
        for sparsity in evidence.sparsities(drive, imp)
    ]


def _compare(evidence: Evidence, drive: str, other: str, sparsity: float, margin: float) -> Check:
    ours, theirs = evidence.accuracies[drive, sparsity], evidence.accuracies[other, sparsity]
    difference = ours[0] - theirs[0]
    numbers = f"{_spread(*ours)} against {_spread(*theirs)} ({signed(difference)})"
    return evidence.check(f"{drive} and {other} at {100 * sparsity:g}%", round(difference + margin, 9) >= 0, numbers)


def signed(number: float) -> str:
    """A difference, with the minus sign of mathematics.

    >>> signed(-1.5), signed(0.001)
    ('−1.50', '±0.00')
    """
    text = f"{number:+.2f}"
    return {"+0.00": "±0.00", "-0.00": "±0.00"}.get(text, text).replace("-", "−")


def _spread(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def _faster(evidence: Evidence) -> list[Check]:
    found = []
    for drive, imp in evidence.pairs("imp"):
        if evidence.pruning.get(drive) and imp in evidence.pruning:
            ratio = evidence.pruning[imp] / evidence.pruning[drive]
            numbers = f"{evidence.pruning[drive]:,.2f} s against {evidence.pruning[imp]:,.2f} s: {ratio:,.1f}×"
            found.append(evidence.check(f"{drive} and {imp}", ratio >= 43, numbers))
    return found


def _comparable(evidence: Evidence) -> list[Check]:
    found = []
    for drive, other in (*evidence.pairs("snip"), *evidence.pairs("synflow")):
        if drive in evidence.total and evidence.total.get(other):
            ratio = evidence.total[drive] / evidence.total[other]
            found.append(evidence.check(f"{drive} and {other}", ratio <= COMPARABLE, f"{ratio:.2f}× the time"))
    return found


def _stable(evidence: Evidence) -> list[Check]:
    found = []
    for drive, other in (*evidence.pairs("snip"), *evidence.pairs("synflow")):
        low = [sparsity for sparsity in evidence.sparsities(drive, other) if 0.9 <= sparsity <= HIGH]
        if len(low) > 1 and low[-1] == HIGH:
            falls = [evidence.accuracies[m, low[0]][0] - evidence.accuracies[m, HIGH][0] for m in (drive, other)]
            where = f"{drive} and {other}, from {100 * low[0]:g}% to {100 * HIGH:g}%"
            numbers = f"{falls[0]:.2f} points lost against {falls[1]:.2f}"
            found.append(evidence.check(where, falls[0] <= falls[1], numbers))
    return found


def _whole(evidence: Evidence) -> list[Check]:
    found = []
    for drive in evidence.of("drive"):
        for sparsity in evidence.sparsities(drive):
            cut, fallen = (drive, sparsity) in evidence.collapsed, evidence.unstable.get((drive, sparsity))
            rivals = [m for m, s in sorted(evidence.collapsed) if s == sparsity and base(m) in {"snip", "synflow"}]
            said = "not collapsed" + (f" ({', '.join(rivals)} did)" if rivals else "")
            if fallen is not None:
                said = f"unstable: {fallen[0]} of {fallen[1]} runs end far below their like"
            said = "no path is left" if cut else said
            found.append(evidence.check(f"{drive} at {100 * sparsity:g}%", not cut and not fallen, said))
    return found


def _above_dense(evidence: Evidence) -> list[Check]:
    dense = evidence.accuracies.get((DENSE, 0.0))
    if dense is None or (evidence.data, evidence.model) != ("cifar10", "alexnet"):
        return []
    return [
        evidence.check(
            f"{drive} at {100 * s:g}%", ours[0] >= dense[0], f"{_spread(*ours)}, unpruned {_spread(*dense)}"
        )
        for drive in evidence.of("drive")
        for s in evidence.sparsities(drive)
        if s <= 0.98 and (ours := evidence.accuracies[drive, s])
    ]


_CLAIMS: dict[str, Callable[[Evidence], list[Check]]] = {
    "DRIVE is at least as accurate as SNIP at each sparsity": _beats("snip"),
    "DRIVE is at least as accurate as SynFlow at each sparsity": _beats("synflow"),
    f"IMP is at most marginally better than DRIVE (we take {MARGIN:g} point)": _near_imp,
    "DRIVE obtains its sparse network 43 to 869 times faster than IMP": _faster,
    f"In all DRIVE takes a time comparable to SNIP and SynFlow (we take {COMPARABLE:g}×)": _comparable,
    "DRIVE is more stable: up to 99.3% it loses no more accuracy than SNIP and SynFlow do": _stable,
    "DRIVE's networks do not collapse": _whole,  # nor does a seed fall far below the others, with paths left
    "AlexNet on CIFAR-10: DRIVE is better than the unpruned network up to 98%": _above_dense,
}


def claims(groups: Sequence[Group]) -> list[Claim]:
    """Every claim of the paper that can be tested, as these runs show it."""
    runs, printed = [of_runs(group) for group in groups], of_paper()
    return [_claim(text, test, runs, printed) for text, test in _CLAIMS.items()]


def _claim(
    text: str, test: Callable[[Evidence], list[Check]], runs: Sequence[Evidence], printed: Sequence[Evidence]
) -> Claim:
    checks = tuple(check for evidence in runs for check in test(evidence))
    in_paper = [check for evidence in printed for check in test(evidence)]
    return Claim(text, _verdict(checks), _summary(checks), _summary(in_paper), checks)


def _verdict(checks: Sequence[Check]) -> Verdict:
    if not checks:
        return "not tested"
    return "held" if all(check.verdict == "held" for check in checks) else "did not hold"


def _summary(checks: Sequence[Check]) -> str:
    held = sum(check.verdict == "held" for check in checks)
    return f"held in {held} of {len(checks)}" if checks else "not tested"
