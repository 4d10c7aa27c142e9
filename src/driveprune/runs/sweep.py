"""A grid of runs, in several processes: what is done is skipped, what was killed goes on, what fails is told."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from driveprune.batches import Data
from driveprune.cut import Budget
from driveprune.engine import EngineName
from driveprune.files import open_log
from driveprune.plan import Train, total_steps
from driveprune.recipes import Recipe
from driveprune.runs.job import steps_per_epoch
from driveprune.runs.spec import DENSE, Spec, make_spec
from driveprune.runs.store import read_status, result_of, tell_unwritten, write_wanted
from driveprune.runs.trust import check_trusted
from driveprune.screen import Screen, as_markup
from driveprune.train import Precision, Stop, never


def grid(
    recipe: Recipe,
    data: Data,
    *,
    methods: Sequence[str],
    sparsities: Sequence[float],
    seeds: Sequence[int],
    checks: Sequence[str] = (),
    knobs: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    budget: Budget = "weights",
    holdout: int = 0,
    size: int | None = None,
    threads: int = 1,
    device: str = "cpu",
    precision: Precision = "fp32",
    channels_last: bool = False,
) -> list[Spec]:
    """The specs of all combinations, each once; `dense` has neither sparsities nor checks.

    Args:
        checks: sanity checks to run beside each pruned run: "shuffle", "reinit", "random", and "erk", which is
            the method of that name at the same sparsity.
        knobs: method -> knob -> the values that it takes in turn.

    """
    known = set(methods) | ({"erk"} if "erk" in checks else set())
    if foreign := sorted(set(knobs or {}) - known):
        raise ValueError(f"there are knobs for {foreign[0]}, which is not among the methods {', '.join(methods)}")
    if "erk" in checks and "erk" not in methods:
        methods = [*methods, "erk"]
    specs: dict[str, Spec] = {}
    for seed, method, check, sparsity in product(
        seeds, methods, ["", *(c for c in checks if c != "erk")], sparsities
    ):
        if (method == DENSE and check) or (method in {"erk", "random"} and check in {"shuffle", "random"}):
            continue
        for given in _combinations((knobs or {}).get(method, {})):
            spec = make_spec(
                recipe, data, method=method, sparsity=sparsity, seed=seed, knobs=given, check=check, budget=budget,
                holdout=holdout, size=size, threads=threads, device=device, precision=precision,
                channels_last=channels_last,
            )  # fmt: skip
            specs[spec.id] = spec
    return list(specs.values())


def _combinations(knobs: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(knobs, values, strict=True)) for values in product(*knobs.values())]


@dataclass
class Outcome:
    """What became of the runs of a sweep, by id."""

    skipped: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


class Crew(Protocol):
    """Those who do the runs of a sweep."""

    done: list[str]
    failed: dict[str, str]
    """Why, by id."""
    active: set[str]
    """The runs that somebody is working on."""

    def start(self) -> None:
        """Begin."""

    def is_working(self) -> bool:
        """Whether there is a run left that has not ended."""

    def stop(self) -> None:
        """End all work; the runs go on from their last checkpoints next time."""

    def close(self) -> None:
        """Nobody is needed any more."""


Hire = Callable[[Path, Sequence[Spec], Mapping[str, Any]], Crew]
"""Finds those who do runs: from the folder of all runs, the specs and what else a worker is told."""


def sweep(
    root: Path,
    specs: Sequence[Spec],
    data: Data,
    *,
    jobs: int = 1,
    hire: Hire | None = None,
    data_dir: str | None = None,
    share: bool = True,
    every: float = 60.0,
    engine: EngineName = "dense",
    trust: bool = False,
    console: Console | None = None,
    stop: Stop = never,
) -> Outcome:
    """Do the runs that are not done yet, `jobs` at a time.

    Args:
        root: the folder of all runs.
        specs: the runs.
        data: their data; the processes load them again from `data_dir`.
        jobs: number of processes; each run has the threads that its spec says.
        hire: who does the runs instead, as `driveprune.integrations.ray.cluster()`.
        share: compute what runs have in common at their beginning once.
        every: seconds between checkpoints of a run.
        engine: what computes after a cut: "dense", "sparse" or "auto".
        trust: import what the specs name though it is not of this package and no checksum in them proves it.
        console: where to show progress; by default stderr.
        stop: asked all the time whether to stop; then each run that is under way writes a checkpoint first.

    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    for spec in specs:
        check_trusted(spec, trust, has_data=True)
    root.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(skipped=[spec.id for spec in specs if result_of(root / spec.id) is not None])
    left = [spec for spec in specs if spec.id not in outcome.skipped]
    order = {"data_dir": data_dir, "share": share, "every": every, "engine": engine, "trust": trust}
    lengths = {spec.id: total_steps(spec.plan(steps_per_epoch(spec, data))) for spec in specs}
    with suppress(*[] if left else [OSError]):  # a store that cannot be written shows what is done
        write_wanted(root, specs, lengths)
    crew = (hire or _processes(jobs))(root, _spread(left), order)
    lengths = {spec.id: lengths[spec.id] for spec in left}
    with closing(crew), _display(root, lengths, len(outcome.skipped), console or Screen(stderr=True)) as update:
        try:
            crew.start()
            while crew.is_working() and not stop():
                update(crew)
                time.sleep(0.2)
        except KeyboardInterrupt:
            outcome.interrupted = True
        if outcome.interrupted or stop():
            outcome.interrupted = True
            crew.stop()
        update(crew)
    outcome.done, outcome.failed = list(crew.done), dict(crew.failed)
    return outcome


def _spread(specs: Sequence[Spec]) -> list[Spec]:
    """An order in which processes wait for each other as little as possible.

    First one run for each common beginning, then those that have none, then the others.
    """
    first: list[Spec] = []
    without: list[Spec] = []
    later: list[Spec] = []
    begun: set[str] = set()
    for spec in specs:
        if not isinstance(spec.plan(100)[0], Train):
            without.append(spec)
        elif spec.beginning not in begun and spec.method != DENSE:
            begun.add(spec.beginning)
            first.append(spec)
        else:
            later.append(spec)
    return [*first, *without, *later]


def _processes(jobs: int) -> Hire:
    return lambda root, specs, order: _Processes(root, specs, order, min(jobs, max(1, len(specs))))


GRACE = 60.0
"""Seconds that a process has to write a checkpoint and end."""


def _log_of(root: Path) -> IO[str]:
    """Where processes say what belongs to no run; it is only for looking at."""
    try:
        return open_log(root / "workers.log")
    except OSError as error:
        tell_unwritten(root, f"{error}: what the processes of the sweep say is not kept")
        return open(os.devnull, "w")


class _Processes:
    """Worker processes, each with a thread that gives it one run after the other."""

    def __init__(self, root: Path, specs: Sequence[Spec], order: Mapping[str, Any], size: int) -> None:
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.active: set[str] = set()
        self._root, self._order, self._stopping = root, order, False
        self._log = _log_of(root)
        self._specs: queue.SimpleQueue[Spec] = queue.SimpleQueue()
        for spec in specs:
            self._specs.put(spec)
        self._processes: list[subprocess.Popen[str] | None] = [None] * size
        self._threads = [threading.Thread(target=self._attend, args=(place,), daemon=True) for place in range(size)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def is_working(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Have all processes write a checkpoint and end; those that take too long are killed."""
        self._stopping = True
        end = time.monotonic() + GRACE
        try:
            for process in filter(None, self._processes):
                process.terminate()
            for thread in self._threads:
                thread.join(timeout=max(0.0, end - time.monotonic()))
        finally:
            for process in filter(None, self._processes):
                process.kill()
            for thread in self._threads:
                thread.join(timeout=10)

    def close(self) -> None:
        self._log.close()

    def _attend(self, place: int) -> None:
        while not self._stopping:
            try:
                spec = self._specs.get_nowait()
            except queue.Empty:
                break
            self.active.add(spec.id)
            try:
                error = self._ask(place, spec)
            except Exception as unexpected:
                error = f"{type(unexpected).__name__}: {unexpected}"
            self.active.discard(spec.id)
            if not self._stopping:
                if error is None:
                    self.done.append(spec.id)
                else:
                    self.failed[spec.id] = error
        process = self._processes[place]
        if process is not None:
            _close(process)

    def _ask(self, place: int, spec: Spec) -> str | None:
        """Have a run done: None, or why it failed. A process that died is replaced for the next run."""
        process = self._processes[place]
        if process is None:  # -P: what lies in the current folder is found only by runs that name code of their own
            process = self._processes[place] = subprocess.Popen(
                [sys.executable, "-P", "-m", "driveprune.runs.worker", str(self._root), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"spec": spec.to_json(), **self._order}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._processes[place] = None
            return f"its process ended with exit code {_close(process)}"
        error: str | None = json.loads(answer)["error"]
        return error


def _close(process: subprocess.Popen[str]) -> int:
    """Let a process end: it does when its stdin does."""
    with suppress(BrokenPipeError), process:
        pass
    return process.wait()


@contextmanager
def _display(root: Path, lengths: Mapping[str, int], skipped: int, console: Console) -> Iterator[Any]:
    if not console.is_terminal:
        yield _Lines(root, len(lengths), skipped, console)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[last]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        yield _Bars(root, lengths, skipped, bars)


class _Lines:
    """A plain line for each run that has ended."""

    def __init__(self, root: Path, total: int, skipped: int, console: Console) -> None:
        self._root, self._total, self._console, self._told = root, total, console, set[str]()
        self._print(f"{total} runs to do, {skipped} done already")

    def __call__(self, crew: Crew) -> None:
        for name in [*crew.done, *crew.failed]:
            if name not in self._told:
                self._told.add(name)
                self._print(f"[{len(self._told)}/{self._total}] {ended(self._root / name, crew.failed.get(name))}")

    def _print(self, text: str) -> None:
        with suppress(OSError, SystemExit):  # whoever looked is gone (rich ends then), or the disk is full
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class _Bars:
    """One bar for all runs, with the time left, and one for each run under way."""

    def __init__(self, root: Path, lengths: Mapping[str, int], skipped: int, bars: Progress) -> None:
        self._root, self._lengths, self._bars, self._told = root, lengths, bars, set[str]()
        about = f"{len(lengths)} runs" + (f" ({skipped} more done before)" if skipped else "")
        self._all = bars.add_task(f"[bold]{about}[/]", total=max(1, sum(lengths.values())), last="")
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, crew: Crew) -> None:
        ended_runs = [*crew.done, *crew.failed]
        steps = sum(self._lengths[name] for name in ended_runs)
        for name in list(crew.active):
            steps += self._show(name, read_status(self._root / name))
        for name in ended_runs:
            if name not in self._told:
                self._told.add(name)
                self._bars.console.print(
                    ended(self._root / name, crew.failed.get(name)), markup=False, highlight=False
                )
            if name in self._tasks:
                self._bars.remove_task(self._tasks.pop(name))
        self._bars.update(self._all, completed=steps, last=f"{len(ended_runs)}/{len(self._lengths)} runs")

    def _show(self, name: str, status: Mapping[str, Any]) -> int:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name.rpartition("-")[0], total=self._lengths[name], last="")
        values, step = status.get("values") or [], int(status.get("step", 0))
        last = f"{status.get('work', 'starting')}" + (f", test {100 * values[-1]:.1f}%" if values else "")
        self._bars.update(self._tasks[name], completed=step, last=as_markup(last))
        return step


def ended(folder: Path, error: str | None) -> str:
    """What became of a run, in one line."""
    if error is not None:
        why = next((folder / name for name in ("error.txt", "log.txt") if (folder / name).exists()), folder)
        return f"failed {folder.name}: {error} (see {why})"
    result = result_of(folder) or {}
    seconds = sum(value for work, value in result.get("seconds", {}).items() if work != "pruning")
    cut = ", cut: no path from input to output is left" if result.get("collapsed") else ""
    return f"done {folder.name}: test {100 * (result.get('last') or 0):.2f}% in {seconds:.0f} s{cut}"
