"""ERK: random weights, with layer densities that favour small layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from driveprune.collectives import counted
from driveprune.kinds import Amount
from driveprune.mask import all_weights, kept_count
from driveprune.methods.random import score
from driveprune.plan import Plan, Prune, Train, early

__all__ = ["allocation", "plan", "score"]


def allocation(mask: Mapping[str, Tensor], sparsity: float) -> dict[str, int]:
    """Kept weights by layer: density ∝ Σ dims / Π dims, at most what the mask has; the sum is exact.

    What a full layer cannot take goes to the others. Fractions are rounded by largest remainders.

    Reference: Evci et al., Rigging the Lottery: Making All Tickets Winners, 2020.

    >>> import torch
    >>> allocation({"a": torch.ones(10, 10), "b": torch.ones(100, 100)}, sparsity=0.9)
    {'a': 92, 'b': 918}
    """
    count = kept_count(all_weights(mask), sparsity)
    room = counted(mask)
    full: set[str] = set()
    while True:
        wanted = {name: sum(kept.shape) for name, kept in mask.items() if name not in full}
        rest = count - sum(room[name] for name in full)
        factor = rest / max(1, sum(wanted.values()))
        over = {name for name, share in wanted.items() if share * factor > room[name]}
        if not over:
            break
        full |= over
    shares = {name: room[name] if name in full else wanted[name] * factor for name in mask}
    return _rounded(shares, count)


def _rounded(shares: Mapping[str, float], count: int) -> dict[str, int]:
    whole = {name: int(share) for name, share in shares.items()}
    missing = count - sum(whole.values())
    for name in sorted(shares, key=lambda name: whole[name] - shares[name])[:missing]:
        whole[name] += 1
    return whole


def plan(sparsity: float, steps: int, steps_per_epoch: int, *, early_epochs: Amount = 0.0) -> Plan:
    """Cut once at random to the allocated densities, then train.

    Knobs:
        early_epochs: epochs of dense training before the cut.
    """
    return [*early(early_epochs, steps_per_epoch), Prune(score, (sparsity,), scope=allocation), Train(steps)]
