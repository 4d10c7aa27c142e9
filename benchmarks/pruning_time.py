"""How much faster does DRIVE obtain a sparse network than IMP? By the costs of a step and of a cut, at full size.

python benchmarks/pruning_time.py             # all, about 15 minutes on 2 cores
python benchmarks/pruning_time.py vgg16-cifar10  # only recipes whose name ends so

IMP trains 1000 epochs before its last cut, DRIVE a few and then cuts 100 times. If a cut cost just one training step
and everything else nothing, that would be the ideal ratio. The times of a step and of a cut are measured by the real
loop on images of the right size in memory: some early steps, then some cuts, then IMP's cut and rewind.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from math import ceil

import measure
import torch

import driveprune as dp
from driveprune import recipes
from driveprune.batches import Data, Images
from driveprune.fit import fit

CYCLES, CYCLE_EPOCHS = 50, 20
SIZES = {"cifar10": (50_000, 10, 32), "cifar100": (50_000, 100, 32), "tiny-imagenet": (100_000, 200, 64),
         "imagenet32": (1_281_167, 1000, 32)}  # fmt: skip
"""Training images, classes and pixels."""


def random_data(recipe: dp.Recipe) -> Data:
    """Images for a few batches."""
    _, classes, pixels = SIZES[recipe.data]
    generator = torch.Generator().manual_seed(0)
    count = steps_of(recipe) * recipe.batch
    x = torch.randint(256, (count, 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    images = Images(x, torch.randint(classes, (count,), generator=generator))
    names = tuple(str(number) for number in range(classes))
    return Data(recipe.data, images, images.take(torch.arange(2)), names, (0.5,) * 3, (0.25,) * 3, official=False)


def steps_of(recipe: dp.Recipe) -> int:
    """How many steps and cuts are measured: fewer where one takes ten seconds."""
    return 2 if "imagenet" in recipe.data else 4


def measured(name: str) -> dict[str, object]:
    """Seconds of a step, of a cut of DRIVE and of a cut and rewind of IMP, and the ratio that follows."""
    recipe = recipes.get(name)
    data, some = random_data(recipe), steps_of(recipe)
    _, classes, pixels = SIZES[recipe.data]

    def train(method: str, knobs: dict[str, float], images: int | None = None) -> dict[str, float]:
        torch.manual_seed(0)
        net = dp.models.build(recipe.model, classes=classes, size=pixels)
        short = replace(recipe, epochs=1, drops=(), cosine=False, images=images)
        trained = fit(
            net, data, method=method, knobs=knobs, sparsity=0.9, recipe=short, channels_last=True, progress=False
        )
        return trained.seconds

    train("snip", {}, images=recipe.batch)  # warm up
    drive = train("drive", {"early_epochs": (some - 1) / some, "cuts": some})
    imp = train("imp", {"cycles": 1, "cycle_epochs": (some - 1) / some})
    early = drive["early training"] + imp["early training"]
    loading = (drive["loading"] + imp["loading"]) / (3 * some - 1)
    step = early / (2 * (some - 1)) + loading
    cut = (drive["scoring"] + drive["selection"]) / some
    imp_cut = imp["scoring"] + imp["selection"]
    steps = ceil(SIZES[recipe.data][0] / recipe.batch)
    epochs = recipe.knobs["drive"]["early_epochs"]
    ideal = CYCLES * CYCLE_EPOCHS * steps / (epochs * steps + 100)
    drive_seconds = epochs * steps * step + 100 * cut
    imp_seconds = CYCLES * (CYCLE_EPOCHS * steps * step + imp_cut)
    ratio = imp_seconds / drive_seconds
    return {
        "question": f"IMP's pruning time / DRIVE's, {name}",
        "ratio": round(ratio, 1),
        "ideal": round(ideal, 1),
        "share of the ideal": round(ratio / ideal, 3),
        "limit": ">= 0.95 of the ideal",
        "holds": ratio >= 0.95 * ideal,
        "step_s": round(step, 4),
        "of that loading_s": round(loading, 4),
        "cut_s": round(cut, 4),
        "of that scoring_s": round(drive["scoring"] / some, 4),
        "of that selection_s": round(drive["selection"] / some, 4),
        "imp_cut_and_rewind_s": round(imp_cut, 4),
        "drive_pruning_s": round(drive_seconds, 1),
        "imp_pruning_s": round(imp_seconds, 1),
    }


if __name__ == "__main__":
    names = [name for name in recipes.names() if name.startswith("paper-") and not name.endswith("-curve")]
    chosen = [name for name in names if not sys.argv[1:] or name.endswith(tuple(sys.argv[1:]))]
    measure.write("pruning_time", [measured(name) for name in chosen])
