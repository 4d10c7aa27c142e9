"""Lightning: a callback that prunes while a Trainer trains. Needs `pip install 'driveprune[lightning]'`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil, isinf
from typing import Any

from torch import Tensor, compiler, nn

from driveprune import methods
from driveprune.cut import Budget
from driveprune.integrations._guest import Guest, Length, Order, called_as
from driveprune.mask import Loss, Mask
from driveprune.pruner import Pruner

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError("this callback needs Lightning: pip install 'driveprune[lightning]'") from error


class PruneCallback(Callback):
    """Follows the plan of a method while a Trainer trains: cuts, holds and rewinds when the plan says so.

    The plan is as long as the training, by `max_epochs`, `max_steps` and accumulation. The sparsity is logged as
    "sparsity". The Trainer's checkpoints hold the plan's state, and `fit(ckpt_path=...)` goes on from it; with a
    larger `max_epochs` the finished network trains on, held. A rewind (IMP) takes the schedulers back, too. A
    checkpoint that ModelCheckpoint chooses by a metric may be of the network before its cut. Nothing is pruned under
    `fast_dev_run`, which has no time for a plan.

    A plan of your own as `method` says the sparsity itself.

    Args:
        sparsity, method, knobs, include, exclude, frozen, min_kept, budget, seed: as for `driveprune.Pruner`.
        part: the name of the submodule to prune, such as "net"; parameters then have the names that they have there.
            Needed for what looks at inputs and outputs (SynFlow, GraSP, the warning of a cut network) if your
            training_step calls that one and not your module itself.
        batches: batches to score with; by default the training data.
        loss: (model or part, batch) -> scalar; by default what your training_step returns, which is run without
            logging. With manual optimisation a loss must be given.
        steps_per_epoch: steps of the optimiser in one epoch, if the data do not say how long they are.

    """

    def __init__(
        self,
        *,
        sparsity: float | None = None,
        method: methods.Method = "drive",
        knobs: Mapping[str, Any] | None = None,
        part: str = "",
        batches: Iterable[Any] | None = None,
        loss: Loss | None = None,
        steps_per_epoch: int | None = None,
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
        self._part, self._loss, self._steps_per_epoch = part, loss, steps_per_epoch
        self._state: dict[str, Any] | None = None
        self._step = 0
        self._idle = False

    @property
    def pruner(self) -> Pruner:
        """What follows the plan; there from the start of the training on."""
        return self._guest.pruner

    @property
    def mask(self) -> Mask:
        """What is kept at the moment."""
        return self._guest.mask

    @property
    def state_key(self) -> str:
        """Its name in checkpoints."""
        return self._generate_state_key(part=self._part)

    def state_dict(self) -> dict[str, Any]:
        """Where the plan is, for the Trainer's checkpoints."""
        return self._guest.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there when the training starts."""
        self._state = state_dict or None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the pruner, and do what the plan has before any training; or go on."""
        self._step = trainer.global_step
        self._idle = bool(getattr(trainer, "fast_dev_run", False))
        if self._idle:
            return
        self._guest.begin(
            pl_module.get_submodule(self._part), trainer.optimizers,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            _training_batches(trainer),
            loss=self._loss_of(trainer, pl_module), length=self._length(trainer),
            state=self._state if self._step else None,
        )  # fmt: skip

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Tell the pruner of a step of the optimiser, if there was one, and log the sparsity."""
        if self._idle:
            return
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._guest.step()
        name = f"sparsity/{self._part}" if self._part else "sparsity"
        pl_module.log(name, self._guest.sparsity, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go; another fit of the same Trainer goes on from here."""
        self._state = self._guest.state_dict() or None
        self._guest.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go."""
        self._guest.end(early=True)

    def _length(self, trainer: Trainer) -> Length:
        """How long the rest of the training is."""
        steps = trainer.estimated_stepping_batches - trainer.global_step
        if isinf(steps):
            raise ValueError("a plan needs an end: give the Trainer max_epochs or max_steps")
        if self._steps_per_epoch is None and isinf(trainer.num_training_batches):
            raise ValueError("the training data do not say how long an epoch is: pass steps_per_epoch")
        per_epoch = self._steps_per_epoch or ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        return Length(int(steps), per_epoch)

    def _loss_of(self, trainer: Trainer, module: LightningModule) -> Loss:
        if self._loss is None and not module.automatic_optimization:
            raise ValueError(
                "with manual optimisation your training_step moves weights, so it cannot be run to score them: "
                "pass loss=, a function of (model, batch)"
            )

        def loss(model: nn.Module, batch: Any) -> Tensor:
            batch = _on_device(trainer, module, batch)
            return _of_training_step(module, batch) if self._loss is None else self._loss(model, batch)

        return called_as(self._loss, loss)


def _training_batches(trainer: Trainer) -> Iterable[Any]:
    """The training data; several loaders side by side."""
    loader: Any = trainer.train_dataloader
    return _Combined(loader) if isinstance(loader, dict | list | tuple) else loader


class _Combined:
    """The batches of several loaders, together."""

    def __init__(self, loaders: Any) -> None:
        self._loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in CombinedLoader(self._loaders, "max_size_cycle"):
            yield batch


def _on_device(trainer: Trainer, module: LightningModule, batch: Any) -> Any:
    """A batch as the Trainer gives it to a training_step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _of_training_step(module: LightningModule, batch: Any) -> Tensor:
    """What the training_step makes of a batch, without logs and other traces."""
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    with _silent(module), _same_attributes(module), _same_metrics(module), compiler.set_stance("force_eager"):
        output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"your training_step returned no loss to score with, but {type(output).__name__}: "
            "pass loss=, a function of (model, batch)"
        )
    return loss


@contextmanager
def _silent(module: LightningModule) -> Iterator[None]:
    """`self.log` and `self.log_dict` do nothing for a while."""
    names = ("log", "log_dict")
    before = {name: module.__dict__[name] for name in names if name in module.__dict__}
    module.__dict__.update(dict.fromkeys(names, _nothing))
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]
        module.__dict__.update(before)


def _nothing(*_: Any, **__: Any) -> None:
    """Logs nothing."""


@contextmanager
def _same_attributes(module: LightningModule) -> Iterator[None]:
    """Counters, and lists of losses for the end of the epoch, are put back."""
    before = {name: value for name, value in module.__dict__.items() if not name.startswith("_")}
    module.__dict__.update(
        {name: copy.copy(value) for name, value in before.items() if isinstance(value, list | dict | set)}
    )
    try:
        yield
    finally:
        module.__dict__.update(before)


@contextmanager
def _same_metrics(module: LightningModule) -> Iterator[None]:
    """Metrics of torchmetrics are put back."""
    before = [(metric, dict(metric.__dict__)) for metric in module.modules() if isinstance(metric, Metric)]
    for metric, _ in before:
        metric.__dict__.update({name: copy.deepcopy(getattr(metric, name)) for name in metric._defaults})
    try:
        yield
    finally:
        for metric, attributes in before:
            metric.__dict__.update(attributes)
