"""Which network does the work of a training: the ordinary one, or, while a mask holds, its sparse form."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from driveprune.collectives import from_first
from driveprune.mask import Loss
from driveprune.sparse import SparseWarning, sparsify, write_back
from driveprune.sparse.carry import carried
from driveprune.sparse.choice import timed, undisturbed

EngineName = Literal["dense", "sparse", "auto"]
ENGINES = ("dense", "sparse", "auto")

PAYS = 1.05
"""So many times as fast must the sparse form be, in a measurement, to be used by "auto"."""


def engine_of(name: str) -> EngineName:
    """The name of an engine, or an error that tells the choices."""
    if name not in ENGINES:
        raise ValueError(f"engine must be {', '.join(ENGINES)}, got {name!r}")
    return cast(EngineName, name)


class Engine:
    """The network and the optimiser that train at the moment.

    The ordinary ones stay what the pruner, schedulers and checkpoints know: `sync` brings them up to date.
    """

    def __init__(self, name: EngineName, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        engine_of(name)
        device = next(model.parameters()).device
        if name == "sparse" and device.type != "cpu":
            raise ValueError(f"the sparse engine runs on the CPU, but the model is on {device}: use the dense engine")
        self.name: EngineName = "dense" if device.type != "cpu" else name
        self.model, self.optimizer = model, optimizer
        self.used = "dense"
        """The engine of the last steps with a mask."""
        self.speedup: float | None = None
        """How many times as fast as dense a step was, if it was measured."""
        self._dense, self._dense_optimizer, self._loss = model, optimizer, loss
        self._decided = False

    @property
    def is_sparse(self) -> bool:
        """Whether the sparse form trains at the moment."""
        return self.model is not self._dense

    def begin(self, mask: Mapping[str, Tensor], batch: Any) -> None:
        """Go over to the sparse form, if it is wanted and, for "auto", if a measurement with this batch says so."""
        if self.name == "dense" or self._decided:
            return
        self._decided = True
        if not isinstance(batch, list | tuple) or not isinstance(batch[0], Tensor):
            if self.name == "sparse":
                raise ValueError(
                    f"the sparse engine needs batches (x, y) with a tensor x, got {type(batch).__name__}"
                )
            return
        with warnings.catch_warnings():
            if self.name == "auto":  # which goes back to the ordinary network, if little of it is sparse
                warnings.simplefilter("ignore", SparseWarning)
            net, optimizer = sparsify(self._dense, mask, batch[0][:2], self._dense_optimizer, layers="sparse")
        if self.name == "auto":
            self.speedup = from_first(lambda: self._measured(net, batch))
            if self.speedup < PAYS:
                self.used = "dense"
                return
        self.model, self.optimizer, self.used = net, optimizer, "sparse"

    def follow(self) -> None:
        """Take over the learning rates, which schedulers set in the ordinary optimiser."""
        if self.is_sparse:
            groups = zip(self.optimizer.param_groups, self._dense_optimizer.param_groups, strict=True)
            for group, leading in groups:
                group.update({key: value for key, value in leading.items() if key != "params"})
            self._dense_optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks for that

    def sync(self) -> None:
        """Write what the sparse form has learnt into the ordinary network and its optimiser."""
        if self.is_sparse:
            successors = write_back(self.model, self._dense)
            self._dense_optimizer.state.clear()
            self._dense_optimizer.state.update(carried(self.optimizer, successors).state)

    def end(self) -> None:
        """Go back to the ordinary network."""
        self.sync()
        self.model, self.optimizer, self._decided = self._dense, self._dense_optimizer, False

    def _measured(self, net: nn.Module, batch: Any) -> float:
        """How many times as fast a sparse network goes forward and back, with the loss of the training."""

        def step(twin: nn.Module) -> None:
            twin.zero_grad(set_to_none=True)
            self._loss(twin, batch).backward()  # type: ignore[no-untyped-call]

        with undisturbed():
            dense, sparse = copy.deepcopy(self._dense), copy.deepcopy(net)
            seconds = timed({"dense": partial(step, dense), "sparse": partial(step, sparse)})
        return seconds["dense"] / seconds["sparse"]
