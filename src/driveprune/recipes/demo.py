"""A demonstration on handwritten digits, a few seconds a run."""

from __future__ import annotations

from driveprune.recipes.recipe import Recipe


def digits() -> Recipe:
    """A small network on 8×8 digits: 12 epochs; DRIVE after one of them; IMP in 10 cycles of two."""
    return Recipe(
        data="digits", model="digits_net", epochs=12, batch=64, optimizer="sgd", rate=0.05, cosine=True,
        padding=0, flip=False,
        knobs={
            "drive": {"early_epochs": 1.0, "cuts": 100},
            "driveflow": {"early_epochs": 1.0, "cuts": 100},
            "imp": {"cycles": 10, "cycle_epochs": 2.0, "rewind_epochs": 0.0},
            "synflow": {"cuts": 100},
        },
    )  # fmt: skip
