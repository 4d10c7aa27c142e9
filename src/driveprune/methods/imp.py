"""IMP: train, cut the smallest weights, go back to the initial weights; again and again."""

from __future__ import annotations

from driveprune.kinds import Amount, Count, OptionError, Positive
from driveprune.methods.magnitude import score
from driveprune.plan import Plan, Prune, Rewind, Train
from driveprune.schedule import exponential

__all__ = ["plan", "score"]


def plan(
    sparsity: float,
    steps: int,
    steps_per_epoch: int,
    *,
    cycles: Count = 50,
    cycle_epochs: Positive = 20.0,
    rewind_epochs: Amount = 0.0,
) -> Plan:
    """(Train · Prune once · Rewind) × cycles, then train to the end.

    Reference: Frankle and Carbin, The Lottery Ticket Hypothesis, 2019.

    Knobs:
        cycles: how often to train, cut and rewind.
        cycle_epochs: epochs of training in each cycle.
        rewind_epochs: go back to the weights of this epoch instead of the initial ones.
    """
    if rewind_epochs > cycle_epochs:
        raise OptionError(
            f"rewind_epochs must not be more than a cycle has: got rewind_epochs={rewind_epochs} and "
            f"cycle_epochs={cycle_epochs}"
        )
    plan: Plan = []
    for reached in exponential(sparsity, cycles):
        plan += [
            Train(round(cycle_epochs * steps_per_epoch)),
            Prune(score, (reached,)),
            Rewind(round(rewind_epochs * steps_per_epoch)),
        ]
    return [*plan, Train(steps)]
