"""Do the recipes work? Each small one dense and with DRIVE at 90%, on real data; about two hours on 2 cores.

python benchmarks/recipes.py DATA_DIR RUNS    # CIFAR-10, CIFAR-100 and Tiny ImageNet are below DATA_DIR

Runs that are in the folder RUNS already are not done again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import measure

from driveprune import datasets, recipes
from driveprune.runs.store import read_run
from driveprune.runs.sweep import grid, sweep

NAMES = [name for name in recipes.names() if name.startswith("small-") and "imagenet32" not in name]


def compared(name: str, data_dir: str, root: Path) -> dict[str, object]:
    """Accuracy of DRIVE as a share of the dense network's."""
    recipe = recipes.get(name)
    data = datasets.load(recipe.data, data_dir)
    specs = grid(recipe, data, methods=["dense", "drive"], sparsities=[0.9], seeds=[0], threads=1, channels_last=True)
    sweep(root, specs, data, jobs=2, data_dir=data_dir)
    dense, drive = (read_run(root / spec.id).result or {} for spec in specs)
    ratio = drive["last"] / dense["last"]
    return {
        "question": f"accuracy of DRIVE at 90% / of the dense network, {name}",
        "ratio": round(ratio, 3),
        "limit": ">= 0.9",
        "holds": ratio >= 0.9,
        "data": data.label,
        "dense_last": dense["last"],
        "dense_best": dense["best"],
        "drive_last": drive["last"],
        "drive_best": drive["best"],
        "dense_seconds": {work: round(value, 1) for work, value in dense["seconds"].items()},
        "drive_seconds": {work: round(value, 1) for work, value in drive["seconds"].items()},
    }


if __name__ == "__main__":
    data_dir, root = sys.argv[1:]
    measure.write("recipes", [compared(name, data_dir, Path(root)) for name in NAMES], arguments="DATA_DIR RUNS")
