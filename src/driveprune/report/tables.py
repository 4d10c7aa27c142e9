"""The paper's tables from a group of runs; each for the terminal, as CSV and as LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import table as rich_table

from driveprune.report import paper
from driveprune.report.claims import Claim, signed
from driveprune.report.groups import Cell, Group, base, groups, processor, quantity
from driveprune.report.stability import Finding
from driveprune.runs.spec import DENSE
from driveprune.runs.store import Run
from driveprune.screen import as_markup, printable

DAGGER = "†"
"""The mark of a cell with an unstable run."""
PAPER_IMP_EPOCHS = 1000
"""50 cycles of 20 epochs."""


@dataclass(frozen=True)
class Entry:
    """What stands in a cell of a table."""

    text: str
    strong: bool = False
    """The best of the methods that prune early."""
    collapsed: bool = False
    """No path leads through one of its networks."""
    unstable: bool = False
    """One of its runs ends far below its like."""
    paper: float | None = None
    """What the paper has in this place."""
    difference: float | None = None
    """Ours less the paper's."""


@dataclass(frozen=True)
class Table:
    """A table, before it is known what will show it."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    """The first entry of a row is the method."""


def spread(mean: float, deviation: float | None) -> str:
    """Mean and deviation of fractions, in %.

    >>> spread(0.91, 0.0141)
    '91.00 ± 1.41'
    """
    return f"{100 * mean:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def accuracy(group: Group, of: Literal["last", "best"] = "last") -> Table:
    """The paper's table: mean accuracy in % over seeds, with the deviation where there are several."""
    rows = tuple(
        (Entry(method), *(_accuracy(group, method, sparsity, of) for sparsity in group.sparsities))
        for method in group.methods
    )
    header = ("method", *(f"{100 * sparsity:g}%" for sparsity in group.sparsities))
    return Table(f"accuracy-{of}", f"test accuracy in %, {of} epoch", header, rows)


def _accuracy(group: Group, method: str, sparsity: float, of: Literal["last", "best"]) -> Entry:
    cell = group.cell(method, sparsity)
    mean = None if cell is None else cell.mean(of)
    left = group.left(method, sparsity)
    if cell is None or mean is None:
        return Entry(", ".join(sorted({run.standing for run in left})) or "-")
    printed = _printed(group, method, sparsity)
    return Entry(
        spread(mean, cell.deviation(of)) + (f" ({len(cell.runs)} of {len(cell.runs) + len(left)})" if left else ""),
        strong=method in group.best_early(sparsity, of),
        collapsed=cell.collapsed > 0,
        unstable=bool(cell.seeds("unstable")),
        paper=printed,
        difference=None if printed is None else 100 * mean - printed,
    )


def _printed(group: Group, method: str, sparsity: float) -> float | None:
    """What the paper has for a method: only for the variant that stands for it."""
    name = base(method)
    return paper.accuracy(group.data, group.model, name, sparsity) if method == group.reference(name) else None


def times(group: Group) -> Table:
    """Seconds of pruning and in all, means over seeds and sparsities, and how much faster than IMP."""
    header = ("method", "to the sparse network", "in all", "pruning against IMP", "in all against IMP")
    known = [method for method in group.methods if group.mean_over_cells(method, "total") is not None]
    return Table(
        "times", "seconds, mean over seeds and sparsities", header, tuple(_times(group, name) for name in known)
    )


def _times(group: Group, method: str) -> tuple[Entry, ...]:
    pruning, total = (group.mean_over_cells(method, of) for of in ("pruning", "total"))
    printed = paper.pruning_seconds(group.data, group.model) if method == group.reference(base(method)) else {}
    theirs = printed["imp"] / printed[base(method)] if {"imp", base(method)} <= printed.keys() else None
    faster = {of: speedup(group, method, of) for of in ("pruning", "total")}
    return (
        Entry(method),
        Entry("") if method == DENSE else _beside_paper(f"{pruning:,.2f}", pruning, printed.get(base(method))),
        Entry(f"{total:,.1f}"),
        _beside_paper(_faster(faster["pruning"]), faster["pruning"], theirs),
        Entry(_faster(faster["total"])),
    )


def _beside_paper(text: str, value: float | None, printed: float | None) -> Entry:
    known = value is not None and printed is not None
    return Entry(text, paper=printed, difference=value - printed) if known else Entry(text)  # type: ignore[operator]


def speedup(group: Group, method: str, of: Literal["pruning", "total"]) -> float | None:
    """How many times the time of a method IMP takes, at the sparsities that both have.

    None for IMP itself and for the dense network.
    """
    imp = group.reference("imp")
    if imp is None or base(method) in {"imp", DENSE}:
        return None
    common = [s for s in group.sparsities if (imp, s) in group.cells and (method, s) in group.cells]
    ours, theirs = (sum(group.cells[name, s].mean(of) or 0.0 for s in common) for name in (method, imp))
    return theirs / ours if ours and theirs else None


def _faster(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:,.1f}× faster" if ratio >= 1 else f"{1 / ratio:,.1f}× slower"


def notes(group: Group) -> list[str]:
    """What a reader must know beside the tables."""
    lines = []
    if counts := sorted({len(cell.values("last")) for cell in group.cells.values()}):
        span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        lines.append(f"{span} seed{'' if span == '1' else 's'} a cell")
    if group.unfinished and group.cells:
        lines.append("(1 of 3): so many of the wanted runs are done")
    if any(cell.collapsed for cell in group.cells.values()):
        lines.append("* underlined: no path leads from input to output any more, the network cannot learn")
    lines += _unstable(group)
    drive = group.reference("drive")
    if ratio := speedup(group, drive, "pruning") if drive else None:
        lines.append(f"{drive} obtains its sparse networks {_faster(ratio)} than {group.reference('imp')}")
    if odd := paper.differences(group.spec, _knobs(group)):
        lines.append(f"the paper's numbers are for other settings: {odd}")
    if machines := group.processors:
        lines.append(f"computed on {'; '.join(machines)}")
    if len(machines) > 1:
        lines.append("on another kind of processor the same run gives other last bits, and so another accuracy")
    if group.repeats:
        lines.append(f"{group.repeats} runs repeat others, in another store: they count once")
    if ratio and (epochs := _imp_epochs(group)) and epochs != PAPER_IMP_EPOCHS:
        lines.append(f"imp trains {epochs:g} epochs before its last cut here, {PAPER_IMP_EPOCHS} in the paper")
    if group.data == "tiny-imagenet" and "snip" in group.methods:
        lines.append("the paper prints the same SNIP numbers for VGG-16 and ResNet-18 on Tiny ImageNet: a slip")
    return [printable(line) for line in lines]


def _unstable(group: Group) -> list[str]:
    """Which runs are unstable, and where all of them are weak, which is something else."""
    cells = _in_order(group)
    unstable = [f"{_place(cell)} {_listed(cell.seeds('unstable'))}" for cell in cells if cell.seeds("unstable")]
    weak = [_place(cell) for cell in cells if len(cell.seeds("weak")) == len(cell.runs)]
    said = f"{DAGGER} unstable, far below the other seeds, the dense network or its own beginning"
    lines = [f"{said}: {'; '.join(unstable)}"] if unstable else []
    if weak:
        lines.append(f"weak, far below the dense network with every seed: {'; '.join(weak)}")
    return lines


def _place(cell: Cell) -> str:
    return cell.method if cell.method == DENSE else f"{cell.method} at {100 * cell.sparsity:g}%"


def _listed(seeds: Sequence[int]) -> str:
    shown = ", ".join(map(str, seeds[:10])) + (f" and {len(seeds) - 10} more" if len(seeds) > 10 else "")
    return f"seed{'' if len(seeds) == 1 else 's'} {shown}"


def _knobs(group: Group) -> dict[str, dict[str, Any]]:
    """The knobs of the variant that stands for each method."""
    found: dict[str, dict[str, Any]] = {}
    for label, run in zip(group.labels, group.runs, strict=True):
        if run.spec and label == group.reference(base(label)):
            found.setdefault(base(label), run.spec["knobs"])
    return found


def _imp_epochs(group: Group) -> float | None:
    knobs = [run.spec["knobs"] for run in group.runs if run.spec and run.spec["method"] == "imp"]
    lengths = {each["cycles"] * each["cycle_epochs"] for each in knobs}
    return lengths.pop() if len(lengths) == 1 else None


def unfinished(group: Group) -> list[str]:
    """A line for each run that gave no result."""
    return [printable(f"{run.standing}: {run.path.name}{_why(run)}") for run in group.unfinished]


def _why(run: Run) -> str:
    return f": {run.error.strip().splitlines()[-1]}" if run.error and run.error.strip() else ""


def to_rich(table: Table) -> rich_table.Table:
    """A table for the terminal."""
    made = rich_table.Table(title=table.title, title_justify="left", min_width=len(table.title) + 1)
    made.add_column(table.header[0], no_wrap=True)
    for name in table.header[1:]:
        made.add_column(name, justify="right")
    for row in table.rows:
        made.add_row(*(_rich(entry) for entry in row))
    return made


def _rich(entry: Entry) -> str:
    plain = as_markup(entry.text)
    text = f"[underline]{plain}[/]*" if entry.collapsed else plain
    text = f"{text}{DAGGER}" if entry.unstable else text
    text = f"[bold]{text}[/]" if entry.strong else text
    return text + _beside(entry)


def _beside(entry: Entry) -> str:
    """The paper's value, and how far ours is from it."""
    if entry.paper is None or entry.difference is None:
        return ""
    return f" (paper {entry.paper:,.2f}, {signed(entry.difference)})"


def to_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lines of comma-separated values; what is None is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_plain_cell(name) for name in header])
    writer.writerows([_plain_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _plain_cell(value: object) -> object:
    """What a spreadsheet shows as it is: one line, and no text that it would compute."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text[:1] in _FORMULA and len(text) > 1 and not _is_number(text) else text


_FORMULA = ("=", "+", "-", "@")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def table_csv(table: Table) -> str:
    """A table as it is read, the paper's numbers beside ours."""
    return to_csv(
        table.header,
        ([entry.text + _marks(entry) + _beside(entry) for entry in row] for row in table.rows),
    )


def _marks(entry: Entry) -> str:
    return "*" * entry.collapsed + DAGGER * entry.unstable


def claims(found: Iterable[Claim]) -> Table:
    """What became of each claim of the paper."""
    rows = tuple(
        (Entry(claim.text), Entry(claim.verdict), Entry(claim.summary), Entry(claim.in_paper), Entry(claim.variants))
        for claim in found
    )
    header = ("the paper claims", "in these runs", "tests", "in the paper's own numbers", "with")
    return Table("claims", "the paper's claims", header, rows)


def cells_csv(group: Group) -> str:
    """The accuracies and times of every cell, as numbers."""
    header = (
        "method", "sparsity", "seeds", "last_mean", "last_deviation", "best_mean", "best_deviation",
        "pruning_seconds", "total_seconds", "effective_sparsity", "collapsed", "unstable", "paper_accuracy",
    )  # fmt: skip
    return to_csv(header, (_cell_row(group, cell) for cell in _in_order(group)))


def _in_order(group: Group) -> list[Cell]:
    return sorted(group.cells.values(), key=lambda cell: (group.methods.index(cell.method), cell.sparsity))


def _cell_row(group: Group, cell: Cell) -> list[object]:
    return [
        cell.method, cell.sparsity, len(cell.runs), cell.mean("last"), cell.deviation("last"), cell.mean("best"),
        cell.deviation("best"), cell.mean("pruning"), cell.mean("total"), cell.mean("effective"), cell.collapsed,
        len(cell.seeds("unstable")), _printed(group, cell.method, cell.sparsity),
    ]  # fmt: skip


def runs_csv(found: Iterable[Group]) -> str:
    """Every run, finished or not."""
    header = (
        "run", "group", "standing", "method", "sparsity", "seed", "last", "best", "pruning_seconds", "total_seconds",
        "effective_sparsity", "net_bytes", "collapsed", "error", "stability", "processor",
    )  # fmt: skip
    rows = (
        _run_row(group, label, run) for group in found for label, run in zip(group.labels, group.runs, strict=True)
    )
    return to_csv(header, rows)


def _run_row(group: Group, label: str, run: Run) -> list[object]:
    about = [run.path.name, group.title, run.standing, label, run.spec.get("sparsity"), run.spec.get("seed")]
    if run.result is None:
        return [*about, *[None] * 7, _why(run)[2:], None, None]
    numbers = [quantity(run, of) for of in ("last", "best", "pruning", "total", "effective", "bytes")]
    return [*about, *numbers, run.result["collapsed"], None, group.finding(run).word, processor(run)]


_LATEX: Mapping[str, str] = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "≥": r"$\ge$",
    "≤": r"$\le$", "<": r"\textless{}", ">": r"\textgreater{}", "−": r"$-$", "†": r"$^\dagger$",
}  # fmt: skip


def latex_escape(text: str) -> str:
    r"""Text that LaTeX prints as it is.

    >>> latex_escape("drive_2 at 98%")
    'drive\\_2 at 98\\%'
    """
    return "".join(_LATEX.get(letter, letter) for letter in printable(text))


def to_latex(table: Table, about: str) -> str:
    """A table for a paper (with the package booktabs)."""
    lines = [
        r"\begin{table}", r"\centering",
        rf"\caption{{{latex_escape(f'{about}: {table.title}{_explained(table)}')}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", r"\toprule",
        " & ".join(latex_escape(name) for name in table.header) + r" \\", r"\midrule",
        *(" & ".join(_latex(entry) for entry in row) + r" \\" for row in table.rows),
        r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _explained(table: Table) -> str:
    entries = [entry for row in table.rows for entry in row]
    said = "; underlined: no path is left from input to output" if any(entry.collapsed for entry in entries) else ""
    unstable = "; †: unstable, a seed ends far below the others or the dense network"
    return said + (unstable if any(entry.unstable for entry in entries) else "")


def _latex(entry: Entry) -> str:
    text = latex_escape(entry.text)
    text = rf"\underline{{{text}}}" if entry.collapsed else text
    text = rf"{text}$^\dagger$" if entry.unstable else text
    text = rf"\textbf{{{text}}}" if entry.strong else text
    return text + latex_escape(_beside(entry))


def plain(run: Run, finding: Finding | None = None) -> dict[str, Any]:
    """A run as JSON knows it, and what is to be said of it."""
    return {**vars(run), "path": str(run.path), "stability": None if finding is None else vars(finding)}


def plain_all(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Runs as JSON knows them, each seen beside its like."""
    found = {id(run): group.finding(run) for group in groups(runs) for run in group.runs if run.result is not None}
    return [plain(run, found.get(id(run))) for run in runs]
