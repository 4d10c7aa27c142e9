"""Networks cut by DRIVE and by SynFlow, full size, on CIFAR-10: what the benchmarks of delivery are about.

Made once and kept in .benchmarks/masks: about 8 minutes on 2 cores. DRIVE trains an epoch of 5,000 images before it
cuts; both cut on from one sparsity to the next.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import driveprune as dp
from driveprune import datasets, recipes
from driveprune.batches import subset

MODELS = ("vgg16", "resnet18", "alexnet")
METHODS = ("drive", "synflow")
SPARSITIES = (0.9, 0.95, 0.98, 0.993)
CUTS = {"drive": 10, "synflow": 25}
HOME = Path(__file__).parent.parent / ".benchmarks" / "masks"


def networks(data_dir: str | None) -> Iterator[tuple[str, str, float, nn.Module, dp.Mask, Path]]:
    """(model, method, sparsity, network, mask, file) for every combination."""
    for model in MODELS:
        for method in METHODS:
            if not all(_file(model, method, sparsity).exists() for sparsity in SPARSITIES):
                _make(model, method, data_dir)
            for sparsity in SPARSITIES:
                net = dp.models.build(model, classes=10)
                file = _file(model, method, sparsity)
                yield model, method, sparsity, net, dp.load(file, net), file


def _file(model: str, method: str, sparsity: float) -> Path:
    return HOME / f"{model}-{method}-{100 * sparsity:g}.safetensors"


def _make(model: str, method: str, data_dir: str | None) -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    data = datasets.load("cifar10", data_dir)
    images = subset(data.train, 5_000)
    batches = dp.Batches(images, 64, mean=data.mean, deviation=data.deviation, padding=4, flip=True, seed=0)
    torch.manual_seed(0)
    net = dp.models.build(model, classes=10)
    if method == "drive":
        _train(net, batches, recipes.get(f"paper-{model}-cifar10").make_optimizer(net))
    for sparsity in SPARSITIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dp.CollapseWarning)
            mask = dp.prune(net, batches, method=method, sparsity=sparsity, knobs={"cuts": CUTS[method]})
        dp.save(_file(model, method, sparsity), net, mask)


def _train(net: nn.Module, batches: dp.Batches, optimizer: torch.optim.Optimizer) -> None:
    """One epoch, so that DRIVE has something to look at."""
    net.train()
    for x, y in batches.epoch(0, 0):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    for *about, _ in networks(sys.argv[1] if len(sys.argv) > 1 else None):
        print(*about[:3], f"{dp.sparsity(about[4]):.4f}", flush=True)
