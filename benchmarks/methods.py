"""What do the methods keep of the accuracy? All of them on the handwritten digits; half an hour on one core.

python benchmarks/methods.py RUNS

Runs that are in the folder RUNS already are not done again.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import measure

from driveprune import datasets, methods, recipes
from driveprune.runs.spec import DENSE, Spec
from driveprune.runs.store import read_run
from driveprune.runs.sweep import grid, sweep

SEEDS = (0, 1, 2)
AFTER_AN_EPOCH = {"snip": [0.0, 1.0], "synflow": [0.0, 1.0], "magnitude": [1.0, 6.0]}
"""Methods that are tried at more than one moment: epochs of dense training before the first cut."""


def label(spec: Spec) -> str:
    early = spec.knobs.get("early_epochs")
    return f"{spec.method}, epoch {early:g}" if spec.method in AFTER_AN_EPOCH else spec.method


def measured(root: Path) -> list[dict[str, object]]:
    """Mean and deviation of the last epoch's test accuracy over seeds, for each method and sparsity."""
    recipe, data = recipes.get("demo-digits"), datasets.load("digits")
    specs = grid(
        recipe, data, methods=[DENSE, *methods.names()], sparsities=recipe.sparsities, seeds=SEEDS, threads=1,
        channels_last=True, knobs={name: {"early_epochs": values} for name, values in AFTER_AN_EPOCH.items()},
    )  # fmt: skip
    sweep(root, specs, data)
    found: dict[tuple[str, float], list[float]] = {}
    for spec in specs:
        result = read_run(root / spec.id).result or {}
        found.setdefault((label(spec), spec.sparsity), []).append(result["last"])
    return [
        {
            "method": method,
            "sparsity": sparsity,
            "seeds": len(values),
            "accuracy": round(statistics.mean(values), 4),
            "deviation": round(statistics.stdev(values), 4),
        }
        for (method, sparsity), values in found.items()
    ]


if __name__ == "__main__":
    measure.write("methods", measured(Path(sys.argv[1])), arguments="RUNS")
