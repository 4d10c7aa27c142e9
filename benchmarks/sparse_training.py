"""What does the sparse engine save of a whole training? AlexNet on CIFAR-10, cut to 98%, trained on by both engines.

python benchmarks/sparse_training.py DATA_DIR                                # about 13 minutes on 2 cores
python benchmarks/sparse_training.py DATA_DIR --batch 64 --rate 4e-4         # as in our small recipe
python benchmarks/sparse_training.py DATA_DIR --images 50000 --epochs 50     # the paper's settings: hours

The same recipe, seed and data with both engines: early training, 100 cuts of DRIVE and the test of each epoch are the
same work in both. The two take turns, so that a busy machine disturbs them alike; of each the fastest is taken.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

import measure
import torch

import driveprune as dp
from driveprune import datasets, recipes

ENGINES = ("dense", "sparse")
SPARSITY = 0.98


def trained(engine: str, data: dp.Data, recipe: dp.Recipe, cuts: int) -> tuple[float, dp.Trained]:
    """Seconds of the whole job, and what came of it."""
    torch.manual_seed(0)
    net = dp.models.build(recipe.model, classes=len(data.classes))
    start = time.perf_counter()
    found = dp.fit(
        net, data, recipe=recipe, method="drive", sparsity=SPARSITY, knobs={"cuts": cuts}, engine=engine,
        channels_last=True, progress=False,
    )  # fmt: skip
    return time.perf_counter() - start, found


def row(data: dp.Data, recipe: dp.Recipe, cuts: int, repeats: int) -> dict[str, object]:
    runs: dict[str, list[tuple[float, dp.Trained]]] = {engine: [] for engine in ENGINES}
    for turn in range(repeats):
        for engine in ENGINES if turn % 2 == 0 else reversed(ENGINES):
            runs[engine].append(trained(engine, data, recipe, cuts))
            seconds, found = runs[engine][-1]
            print(engine, f"{seconds:.1f} s, accuracy {found.last():.4f}", flush=True)
    best = {engine: min(each, key=lambda pair: pair[1].seconds["training"]) for engine, each in runs.items()}
    ratio = best["dense"][1].seconds["training"] / best["sparse"][1].seconds["training"]
    facts: dict[str, object] = {}
    for engine, (whole, found) in best.items():
        facts[f"{engine}_last"] = found.last()
        facts[f"{engine}_best"] = found.best()
        facts[f"{engine}_wall_s"] = round(whole, 1)
        facts[f"{engine}_seconds"] = {work: round(value, 1) for work, value in found.seconds.items()}
    return {
        "question": f"AlexNet on CIFAR-10 after DRIVE at {100 * SPARSITY:g}%: training by the dense / sparse engine",
        "ratio": round(ratio, 2),
        "ratio_of_the_whole_job": round(best["dense"][0] / best["sparse"][0], 2),
        "data": data.label,
        "images": recipe.images or len(data.train),
        "epochs": recipe.epochs,
        "batch": recipe.batch,
        "cuts": cuts,
        **facts,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data_dir", nargs="?", help="where CIFAR-10 is")
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--test-images", type=int, default=1_000)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    paper = recipes.get("paper-alexnet-cifar10")
    recipe = recipes.scaled(
        replace(paper, rate=given.rate),
        epochs=given.epochs,
        batch=given.batch,
        images=given.images,
        test_images=given.test_images,
    )
    load = round(os.getloadavg()[0], 2)
    found = row(datasets.load("cifar10", given.data_dir), recipe, given.cuts, given.repeats)
    numbers = {name: value for name, value in vars(given).items() if name != "data_dir"}
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in numbers.items())
    measure.write("sparse_training", [{**found, "load": load}], f"DATA_DIR {words}")
