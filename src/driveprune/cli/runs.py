"""driveprune run, sweep."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from driveprune import collectives
from driveprune.cli.app import app, print_json, told
from driveprune.cli.options import (
    AsJson,
    BudgetName,
    ChannelsLast,
    DataDir,
    Device,
    Engine,
    Epochs,
    Every,
    Holdout,
    ImageCount,
    Kind,
    Knobs,
    Model,
    Name,
    PrecisionName,
    RecipeName,
    RunsDir,
    Size,
    TestCount,
    Threads,
    Width,
    cannot_act,
    check_data_dir,
    check_every,
    find_own,
    knobs_of,
    list_of,
    load_data,
    machine,
    recipe_of,
    said,
    value_of,
)
from driveprune.cli.printed import print_report, print_run
from driveprune.cut import Budget
from driveprune.engine import engine_of
from driveprune.files import read_json
from driveprune.integrations import ray
from driveprune.progress import shown
from driveprune.report import tables
from driveprune.report.groups import finding_of
from driveprune.runs.job import carry_out
from driveprune.runs.spec import DENSE, Spec, make_spec
from driveprune.runs.stopping import asked
from driveprune.runs.store import read_run
from driveprune.runs.sweep import Hire, grid
from driveprune.runs.sweep import sweep as run_all
from driveprune.runs.trust import check_trusted, code_here, foreign, names_code
from driveprune.screen import Screen, as_markup


@app.command()
@told
def run(
    ctx: typer.Context,
    method: Annotated[str, typer.Option(help="a method, see driveprune methods; dense: prune nothing")] = "drive",
    sparsity: Annotated[float, typer.Option(help="the fraction of weights to remove, in [0, 1)")] = 0.98,
    recipe: RecipeName = None,
    kind: Kind = None,
    data: Name = None,
    model: Model = None,
    data_dir: DataDir = None,
    seed: int = 0,
    knob: Knobs = None,
    check: Annotated[str, typer.Option(help="a sanity check after the cut: shuffle, reinit or random")] = "",
    epochs: Epochs = None,
    width: Width = None,
    images: ImageCount = None,
    test_images: TestCount = None,
    budget: BudgetName = "weights",
    holdout: Holdout = 0,
    size: Size = None,
    threads: Threads = None,
    device: Device = None,
    precision: PrecisionName = None,
    engine: Engine = "dense",
    channels_last: ChannelsLast = True,
    runs: RunsDir = Path("runs"),
    every: Every = 60.0,
    spec: Annotated[Path | None, typer.Option(help="repeat the run of this spec.json exactly")] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="with --spec: load its own model, method or folder, which are not known here"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train, prune and train on: one run. Killed or stopped, the same command goes on where it was.

    Under torchrun, all its processes do the run together: each has its share of every batch.
    """
    options = said(ctx)
    check_every(every)
    if spec is not None:
        wanted = _repeated(spec, options, trust)
        check_data_dir(options, wanted.recipe.data)
        loaded = load_data(wanted.recipe.data, data_dir, wanted.size)
    else:
        cannot_act(options, ["trust"], "a run of your own", "it is for --spec, which somebody else may have written")
        _check_dense(options, [method])
        chosen = recipe_of(recipe, kind, data, model, epochs, width, images, test_images)
        check_data_dir(options, chosen.data)
        find_own(method)
        loaded = load_data(chosen.data, data_dir, size)
        wanted = make_spec(
            chosen, loaded, method=method, sparsity=sparsity, seed=seed, knobs=knobs_of(knob), check=check,
            budget=cast(Budget, budget), holdout=holdout, size=size, ranks=collectives.launched(),
            **machine(threads, device, precision, channels_last),
        )  # fmt: skip
    _check_engine(options, engine, wanted)
    title = wanted.id.rpartition("-")[0]
    with asked("\nstopping after a checkpoint; once more ends at once\n") as stop:
        try:
            with collectives.joined(wanted.device), shown(title, collectives.is_first()) as watch:
                result = carry_out(
                    runs,
                    wanted,
                    loaded,
                    every=every,
                    engine=engine_of(engine),
                    trust=True,
                    watch=watch,
                    stop=stop,
                )
                speaks = collectives.is_first()
        except KeyboardInterrupt:
            Screen(stderr=True).print("stopped; the same command goes on from the last checkpoint")
            raise typer.Exit(stop.code) from None
    if not speaks:
        return
    if as_json:
        finding = finding_of(runs / wanted.id)
        stability = None if finding is None else vars(finding)
        print_json({**result, "folder": str(runs / wanted.id), "stability": stability})
    else:
        print_run(runs / wanted.id)


def _repeated(path: Path, options: Mapping[str, str], trust: bool) -> Spec:
    """The spec of a run that shall be repeated: it says all that the run is, and it is not believed blindly."""
    free = {"spec", "trust", "runs", "every", "engine", "as_json", "data_dir"}
    odd = [name for name in options if name not in free]
    cannot_act(options, odd, "--spec", "the spec says all that the run is; leave one of them out")
    wanted = Spec.from_json(read_json(path))
    with code_here(names_code(wanted)):
        check_trusted(wanted, trust)
    for each in foreign(wanted):
        where = as_markup(f"the spec's {each.what} {each.name}: {each.place}")
        Screen(stderr=True).print(f"[yellow]loading:[/] {where}", highlight=False, soft_wrap=True)
    return wanted


def _check_dense(options: Mapping[str, str], methods: Iterable[str]) -> None:
    """An error if an option was said that is about a cut, and nothing is cut."""
    if set(methods) == {DENSE}:
        about = ("sparsity", "sparsities", "knob", "check", "checks", "budget", "engine")
        cannot_act(options, about, "the method dense", "nothing is cut")


def _check_engine(options: Mapping[str, str], engine: str, spec: Spec) -> None:
    """An error if --engine was said where only the ordinary network can compute."""
    if spec.method == DENSE:
        cannot_act(options, ["engine"], "the method dense", "nothing is cut")
    if engine_of(engine) != "dense" and torch.device(spec.device).type != "cpu":
        cannot_act(options, ["engine"], f"--device {spec.device}", "the sparse engine runs on the CPU")
    if engine_of(engine) != "dense" and spec.precision != "fp32":
        cannot_act(options, ["engine"], f"--precision {spec.precision}", "the sparse engine computes in fp32")


@app.command()
@told
def sweep(
    ctx: typer.Context,
    methods: Annotated[str, typer.Option(help="methods, separated by commas")] = "dense,imp,snip,synflow,drive",
    sparsities: Annotated[str | None, typer.Option(help="by default the recipe's, as 0.9,0.95,0.98,0.993")] = None,
    seeds: Annotated[str, typer.Option(help="seeds, separated by commas")] = "0",
    checks: Annotated[str, typer.Option(help="sanity checks beside each run: shuffle,reinit,random,erk")] = "",
    recipe: RecipeName = None,
    kind: Kind = None,
    data: Name = None,
    model: Model = None,
    data_dir: DataDir = None,
    knob: Annotated[
        list[str] | None, typer.Option("--knob", help="values of a method's knob, as drive.cuts=1,10,100; repeatable")
    ] = None,
    epochs: Epochs = None,
    width: Width = None,
    images: ImageCount = None,
    test_images: TestCount = None,
    budget: BudgetName = "weights",
    holdout: Holdout = 0,
    size: Size = None,
    threads: Threads = None,
    device: Device = None,
    precision: PrecisionName = None,
    engine: Engine = "dense",
    channels_last: ChannelsLast = True,
    runs: RunsDir = Path("runs"),
    jobs: Annotated[int, typer.Option(help="runs at the same time; never changes what comes out")] = 1,
    cluster: Annotated[str | None, typer.Option(help="ray: do the runs on a Ray cluster")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="of the cluster: HOST:PORT or auto; by default RAY_ADDRESS, or one is started here"),
    ] = None,
    cpus_per_run: Annotated[
        float | None, typer.Option(help="CPUs of the cluster for a run, as 0.5; by default its threads")
    ] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(help="GPUs of the cluster for a run, as 0.25; by default 1 with --device cuda")
    ] = None,
    retries: Annotated[
        int | None, typer.Option(help="how often a run goes on after its worker was lost; by default 3")
    ] = None,
    share: Annotated[bool, typer.Option(help="compute a common dense beginning once")] = True,
    every: Every = 60.0,
    as_json: AsJson = False,
) -> None:
    """Run a grid: methods × sparsities × seeds. What is done is skipped, what was killed goes on."""
    if collectives.launched() > 1:
        raise ValueError("a sweep starts processes of its own, see --jobs: torchrun is for driveprune run")
    options, names = said(ctx), list_of(methods, str, "methods")
    check_every(every)
    hire = _hired(options, cluster, address, cpus_per_run, gpus_per_run, retries)
    chosen = recipe_of(recipe, kind, data, model, epochs, width, images, test_images)
    find_own(*names)
    check_data_dir(options, chosen.data)
    _check_dense(options, names)
    loaded = load_data(chosen.data, data_dir, size)
    specs = grid(
        chosen, loaded, methods=names,
        sparsities=list_of(sparsities, float, "sparsities") if sparsities else chosen.sparsities,
        seeds=list_of(seeds, int, "seeds"), checks=list_of(checks, str, "checks") if checks else [],
        knobs=_grid_knobs(knob), budget=cast(Budget, budget), holdout=holdout, size=size,
        **machine(threads, device, precision, channels_last),
    )  # fmt: skip
    _check_engine(options, engine, max(specs, key=lambda spec: spec.method != DENSE))
    _check_checks(list_of(checks, str, "checks") if checks else [], names, specs)
    with asked("\nstopping after a checkpoint of each run; once more ends at once\n") as stop:
        outcome = run_all(
            runs, specs, loaded, jobs=jobs, hire=hire, data_dir=None if data_dir is None else str(data_dir),
            share=share, every=every, engine=engine_of(engine), trust=True, stop=stop,
        )  # fmt: skip
    found = [read_run(runs / spec.id) for spec in specs if (runs / spec.id / "spec.json").exists()]
    if as_json:
        print_json({**vars(outcome), "runs": tables.plain_all(found)})
    else:
        print_report(found)
    for name, error in outcome.failed.items():
        Screen(stderr=True).print(f"[bold red]failed:[/] {as_markup(name)}: {as_markup(error)}", soft_wrap=True)
    if outcome.interrupted:
        Screen(stderr=True).print("stopped; the same command goes on with what is left")
        raise typer.Exit(stop.code)
    if outcome.failed:
        raise typer.Exit(1)


def _check_checks(checks: Iterable[str], methods: Iterable[str], specs: Iterable[Spec]) -> None:
    """An error if a sanity check adds no run."""
    made = {spec.check for spec in specs}
    for check in checks:
        if check == "erk" and check in methods:
            raise ValueError("--checks erk cannot act beside --methods with erk: these runs are there already")
        if check not in made and check != "erk":
            raise ValueError(f"--checks {check} cannot act beside --methods {','.join(methods)}: it would add no run")


def _hired(
    options: Mapping[str, str],
    cluster: str | None,
    address: str | None,
    cpus_per_run: float | None,
    gpus_per_run: float | None,
    retries: int | None,
) -> Hire | None:
    """Who does the runs: a cluster, or None for processes on this machine."""
    if cluster is None:
        for name in ("address", "cpus_per_run", "gpus_per_run", "retries"):
            if name in options:
                raise ValueError(f"{options[name]} is for a cluster: say --cluster ray, too")
        return None
    if cluster != "ray":
        raise ValueError(f"--cluster must be ray, got {cluster!r}")
    if "jobs" in options:
        raise ValueError("--jobs is for this machine alone: on a cluster --cpus-per-run says how many runs fit")
    return ray.cluster(
        address or os.environ.get("RAY_ADDRESS") or ray.LOCAL, cpus_per_run=cpus_per_run, gpus_per_run=gpus_per_run,
        retries=3 if retries is None else retries,
    )  # fmt: skip


def _grid_knobs(given: Iterable[str] | None) -> dict[str, dict[str, list[Any]]]:
    """method.knob=value,value,...

    >>> _grid_knobs(["drive.cuts=1,10"])
    {'drive': {'cuts': [1, 10]}}
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for text in given or ():
        left, equals, values = text.partition("=")
        method, dot, name = left.strip().rpartition(".")
        if not equals or not dot:
            raise ValueError(f"a knob of a sweep is given as method.knob=value,value, got {text!r}")
        found.setdefault(method, {})[name] = [value_of(value) for value in values.split(",")]
    return found
