"""Runs made up for tests of reports: real specs, results of the real shape, numbers that the test chooses."""

from pathlib import Path

from driveprune import datasets, recipes
from driveprune.files import write_json
from driveprune.recipes import Recipe
from driveprune.runs.job import environment
from driveprune.runs.spec import Spec, make_spec
from driveprune.runs.store import Run
from tests.runs.kills import SMALL

DIGITS = datasets.load("digits")
PAPER = recipes.get("paper-vgg16-cifar10")


def result(last, *, best=None, pruning=1.0, training=2.0, collapsed=False, effective=None, sparsity=0.9, **more):
    rows = [
        {"cycle": 0, "epoch": epoch, "rate": 0.1, "loss": 1.0, "sparsity": sparsity, "test": last * epoch / 4}
        for epoch in range(1, 5)
    ]
    layers = [
        {"name": f"{place}.weight", "shape": [10, 10], "weights": 100, "kept": kept}
        for place, kept in ((0, 40), (1, 10), (2, 0))
    ]
    return {
        "id": "x", "data": "digits", "last": last, "best": best or last, "best_by": "test", "holdout": None,
        "rows": rows, "seconds": {"early training": pruning, "training": training, "pruning": pruning},
        "sparsity": sparsity, "effective_sparsity": 1.0 if collapsed else (effective or sparsity),
        "collapsed": collapsed, "macs": 1000, "dense_macs": 10000, "macs_examples": 1,
        "net_bytes": int(1000 * (1.1 - sparsity)),
        "layers": layers, "environment": environment(), **more,
    }  # fmt: skip


def spec_of(method: str, sparsity: float = 0.9, recipe: Recipe = SMALL, **options) -> Spec:
    return make_spec(recipe, DIGITS, method=method, sparsity=sparsity, **options)


def run(method, sparsity, last, *, seed=0, recipe=SMALL, knobs=None, check="", **numbers) -> Run:
    """A finished run that is in no folder."""
    spec = spec_of(method, sparsity, recipe, seed=seed, knobs=knobs, check=check)
    return Run(Path(spec.id), "done", spec.to_json(), result(last, sparsity=spec.sparsity, **numbers))


def unfinished(method, sparsity, standing, *, seed=0, error=None, status=None) -> Run:
    spec = spec_of(method, sparsity, seed=seed)
    return Run(Path(spec.id), standing, spec.to_json(), error=error, status=status)


def write(root: Path, runs) -> None:
    """Make a store of runs."""
    for each in runs:
        folder = root / each.path.name
        folder.mkdir(parents=True)
        write_json(folder / "spec.json", each.spec)
        if each.result is not None:
            write_json(folder / "result.json", each.result)
        elif each.error:
            (folder / "error.txt").write_text(each.error)
