"""driveprune: neural networks that are small from the start.

Prune a network early, by DRIVE, IMP, SNIP, SynFlow and others, in your own training loop; removed weights stay
exactly zero, counts are exact, and what is saved is small.
"""

from driveprune import methods, models
from driveprune.cut import prune
from driveprune.graph import CollapseWarning, effective_sparsity
from driveprune.hold import Held, hold
from driveprune.mask import Mask, apply, prunable, sparsity
from driveprune.netfile import load, save
from driveprune.plan import Plan, Prune, Reinit, Rewind, Shuffle, Train
from driveprune.preview import Preview, preview
from driveprune.pruner import Pruner
from driveprune.selection import keep_top
from driveprune.summary import Summary, summary

__all__ = [
    "CollapseWarning",
    "Held",
    "Mask",
    "Plan",
    "Preview",
    "Prune",
    "Pruner",
    "Reinit",
    "Rewind",
    "Shuffle",
    "Summary",
    "Train",
    "apply",
    "effective_sparsity",
    "hold",
    "keep_top",
    "load",
    "methods",
    "models",
    "preview",
    "prunable",
    "prune",
    "save",
    "sparsity",
    "summary",
]
