"""GMP: gradual magnitude pruning, many small cuts during training."""

from __future__ import annotations

from driveprune.kinds import Count, Fraction, OptionError
from driveprune.methods.magnitude import score
from driveprune.plan import Plan, Prune, Train
from driveprune.schedule import cubic

__all__ = ["plan", "score"]


def plan(
    sparsity: float,
    steps: int,
    steps_per_epoch: int,
    *,
    cuts: Count = 100,
    begin: Fraction = 0.1,
    end: Fraction = 0.75,
) -> Plan:
    """(Train · Prune once) × cuts between two moments of training, along a cubic path, then train to the end.

    Reference: Zhu and Gupta, To prune, or not to prune, 2017.

    Knobs:
        cuts: number of cuts, evenly spaced in time.
        begin: when the path starts from 0, as a fraction of the training.
        end: when the last cut comes.
    """
    if not 0 <= begin <= end <= 1:
        raise ValueError(f"begin and end must satisfy 0 <= begin <= end <= 1, got begin={begin}, end={end}")
    if cuts == 1 and begin != 0.1:
        raise OptionError(f"begin={begin} would do nothing with cuts=1: the one cut comes at end={end}")
    plan: Plan = []
    for n, reached in enumerate(cubic(sparsity, cuts), start=1):
        moment = begin + (end - begin) * n / cuts
        plan += [Train(round(moment * steps)), Prune(score, (reached,))]
    return [*plan, Train(steps)]
