"""The one visible training loop, driving a Pruner over tensors in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from driveprune import methods
from driveprune.gradients import cross_entropy, evaluating
from driveprune.mask import Loss, Mask
from driveprune.pruner import Pruner
from driveprune.seeds import generator_for


@dataclass(frozen=True)
class Batches:
    """Inputs and targets in memory, in batches of a size; shuffled by (seed, epoch), the last one may be smaller.

    Iterating gives an epoch of its own, for scoring.

    >>> data = Batches(torch.arange(5), torch.arange(5), size=2)
    >>> len(data), [len(x) for x, y in data.epoch(0)]
    (3, [2, 2, 1])
    """

    x: Tensor
    y: Tensor
    size: int = 128
    seed: int = 0

    def __len__(self) -> int:
        return ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch("scoring")

    def epoch(self, number: int | str) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch."""
        order = torch.randperm(len(self.x), generator=generator_for(self.seed, "epoch", number))
        for chosen in order.split(self.size):  # type: ignore[no-untyped-call]
            yield self.x[chosen], self.y[chosen]


@dataclass(frozen=True)
class Trained:
    """What came of a training."""

    mask: Mask
    accuracies: tuple[float, ...]
    """Accuracy on the test data after each epoch, over all cycles; empty without test data."""
    seconds: float
    pruning_seconds: float
    """From the start to the last cut: what it took to obtain the sparse network that was then trained."""


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: Batches,
    *,
    sparsity: float,
    epochs: int,
    method: methods.Method = "drive",
    knobs: Mapping[str, Any] | None = None,
    loss: Loss = cross_entropy,
    scheduler: LRScheduler | None = None,
    test: Batches | None = None,
    seed: int = 0,
) -> Trained:
    """Train a network by the plan of a method: early training, cuts, rewinds and the training that follows."""
    start = time.perf_counter()
    pruner = Pruner(
        model, optimizer, data, sparsity=sparsity, epochs=epochs, steps_per_epoch=len(data), method=method,
        knobs=knobs, loss=loss, scheduler=scheduler, seed=seed,
    )  # fmt: skip
    pruned = time.perf_counter() if pruner.cuts_left == 0 else None
    accuracies = []
    for epoch in range(pruner.epochs):
        model.train()
        for batch in data.epoch(epoch):
            optimizer.zero_grad(set_to_none=True)
            loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            pruner.step()
            if pruned is None and pruner.cuts_left == 0:
                pruned = time.perf_counter()
        if test is not None:
            accuracies.append(accuracy(model, test))
    if pruner.held is not None:
        pruner.held.release()
    end = time.perf_counter()
    return Trained(pruner.mask, tuple(accuracies), end - start, (pruned or start) - start)


@torch.no_grad()
def accuracy(model: nn.Module, data: Batches) -> float:
    """The fraction of examples whose largest output is the target."""
    with evaluating(model):
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data)
    return right / len(data.x)
