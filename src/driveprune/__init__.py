"""driveprune: neural networks that are small from the start.

Prune a network early, by DRIVE, IMP, SNIP, SynFlow and others, in your own training loop; removed weights stay
exactly zero, counts are exact, and what is saved is small.
"""

from driveprune import datasets, methods, models, recipes
from driveprune.batches import Batches, Data, Images
from driveprune.bench import Bench, bench
from driveprune.compact import CompactWarning, Gains, compact
from driveprune.cut import prune
from driveprune.fit import RecipeWarning, fit
from driveprune.graph import CollapseWarning, effective_sparsity
from driveprune.hold import Held, HoldWarning, hold
from driveprune.kinds import OptionError
from driveprune.mask import Mask, apply, mask_of, prunable, sparsity
from driveprune.netfile import load, save
from driveprune.plan import Plan, Prune, Reinit, Rewind, Shuffle, Train
from driveprune.preview import Preview, preview
from driveprune.pruner import Pruner
from driveprune.recipes import Recipe
from driveprune.selection import keep_top
from driveprune.sparse import Explanation, SparseWarning, densify, explain, sparsify
from driveprune.summary import Summary, summary
from driveprune.ties import ScoreWarning
from driveprune.train import Trained

__all__ = [
    "Batches",
    "Bench",
    "CollapseWarning",
    "CompactWarning",
    "Data",
    "Explanation",
    "Gains",
    "Held",
    "HoldWarning",
    "Images",
    "Mask",
    "OptionError",
    "Plan",
    "Preview",
    "Prune",
    "Pruner",
    "Recipe",
    "RecipeWarning",
    "Reinit",
    "Rewind",
    "ScoreWarning",
    "Shuffle",
    "SparseWarning",
    "Summary",
    "Train",
    "Trained",
    "apply",
    "bench",
    "compact",
    "datasets",
    "densify",
    "effective_sparsity",
    "explain",
    "fit",
    "hold",
    "keep_top",
    "load",
    "mask_of",
    "methods",
    "models",
    "preview",
    "prunable",
    "prune",
    "recipes",
    "save",
    "sparsify",
    "sparsity",
    "summary",
]
