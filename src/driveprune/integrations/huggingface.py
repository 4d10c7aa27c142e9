"""Hugging Face's Trainer: a callback that prunes while it trains. Needs `pip install 'driveprune[transformers]'`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from driveprune import methods
from driveprune.cut import Budget
from driveprune.files import read_state, write_state
from driveprune.integrations._guest import Guest, Length, Order, called_as
from driveprune.mask import Loss, Mask
from driveprune.pruner import Pruner

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise ImportError("this callback needs transformers: pip install 'driveprune[transformers]'") from error

FILE = "driveprune.safetensors"


class PruneCallback(TrainerCallback):
    """Follows the plan of a method while a Trainer trains: cuts, holds and rewinds when the plan says so.

    The plan is as long as the training. The sparsity is added to the Trainer's logs, for callbacks that come after
    this one, and to its `log_history`. Each checkpoint folder gets a file `driveprune.safetensors` with the state of
    the plan, from which `train(resume_from_checkpoint=...)` goes on. A rewind (IMP) takes the learning rates back,
    too; give the Trainer a scheduler as long as one cycle. The best checkpoint is sought anew after a cut, so that
    `load_best_model_at_end` does not bring back a dense one.

    A plan of your own as `method` says the sparsity itself.

    Args:
        sparsity, method, knobs, include, exclude, frozen, min_kept, budget, seed: as for `driveprune.Pruner`.
        batches: batches to score with; by default the training data.
        loss: (model, batch) -> scalar; by default `model(**batch).loss`.
        steps_per_epoch: steps of the optimiser in one epoch, if the data do not say how long they are.
        resume: the checkpoint folder to go on from, if it is not in the Trainer's `output_dir`; False begins the plan
            at the moment where a checkpoint without one is resumed.

    """

    def __init__(
        self,
        *,
        sparsity: float | None = None,
        method: methods.Method = "drive",
        knobs: Mapping[str, Any] | None = None,
        batches: Iterable[Any] | None = None,
        loss: Loss | None = None,
        steps_per_epoch: int | None = None,
        resume: str | os.PathLike[str] | bool = True,
        include: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        frozen: bool = False,
        min_kept: int = 0,
        budget: Budget = "weights",
        seed: int = 0,
    ) -> None:
        order = Order(
            sparsity, method, knobs, include, exclude, frozen, min_kept, budget, seed, batches, loss, steps_per_epoch
        )
        self._guest = Guest(order)
        self._loss, self._steps_per_epoch, self._resume = loss, steps_per_epoch, resume

    @property
    def pruner(self) -> Pruner:
        """What follows the plan; there from the start of the training on."""
        return self._guest.pruner

    @property
    def mask(self) -> Mask:
        """What is kept at the moment."""
        return self._guest.mask

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the pruner, and do what the plan has before any training; or go on from a checkpoint."""
        self._guest.end(early=True)
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        plain = getattr(loader, "base_dataloader", loader)  # without accelerate's bookkeeping
        optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
        with _full_precision(model):
            self._guest.begin(
                model, [getattr(optimizer, "optimizer", optimizer)], [getattr(scheduler, "scheduler", scheduler)],
                plain, loss=self._loss_on_device(),
                length=self._length(args, state, loader), state=self._saved(args, state),
            )  # fmt: skip

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the pruner of a step of the optimiser."""
        cuts = self.pruner.cuts_left
        with _full_precision(kwargs["model"]):
            self._guest.step()
        if self.pruner.cuts_left != cuts:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the sparsity."""
        kwargs["logs"]["sparsity"] = self._guest.sparsity
        state.log_history[-1]["sparsity"] = self._guest.sparsity

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add the state of the plan to a checkpoint."""
        if state.is_world_process_zero:
            write_state(_checkpoint(args, state) / FILE, self._guest.state_dict())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let go."""
        self._guest.end()

    def _length(self, args: TrainingArguments, state: TrainerState, loader: Any) -> Length:
        """How long the rest of the training is."""
        if self._steps_per_epoch is None and not has_length(loader):
            raise ValueError("the training data do not say how long an epoch is: pass steps_per_epoch")
        per_epoch = self._steps_per_epoch or ceil(len(loader) / args.gradient_accumulation_steps)
        return Length(state.max_steps - state.global_step, per_epoch)

    def _saved(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
        """The state to go on from, or None at the beginning."""
        if state.global_step == 0 or self._resume is False:
            return None
        folder = _checkpoint(args, state) if self._resume is True else Path(self._resume)
        if not (folder / FILE).exists():
            raise ValueError(
                f"the training goes on from step {state.global_step}, but there is no {folder / FILE}: pass resume=, "
                "the folder of the checkpoint, or resume=False to begin the plan now"
            )
        found: dict[str, Any] = read_state(folder / FILE)
        return found

    def _loss_on_device(self) -> Loss:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            device = next(model.parameters()).device
            if isinstance(batch, Mapping):
                batch = {
                    name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()
                }
            return _own_loss(model, batch) if self._loss is None else self._loss(model, batch)

        return called_as(self._loss, loss)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of transformers computes by itself."""
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(loss, Tensor):
        raise ValueError("the model returned no loss (have the batches labels?): pass loss=, of (model, batch)")
    return loss


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """The model's own forward for a while, without the autocast that accelerate puts around it."""
    own = vars(model)
    if "_original_forward" not in own:
        yield
        return
    cast, own["forward"] = own["forward"], own["_original_forward"]
    try:
        yield
    finally:
        own["forward"] = cast
