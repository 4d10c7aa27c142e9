"""The one visible training loop. It drives a Pruner; all that it needs to go on after a kill is in one state."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from driveprune import collectives
from driveprune.cut import Progress, Seconds
from driveprune.engine import Engine, EngineName
from driveprune.finite import Losses, first_not_finite, origin, trained
from driveprune.gradients import batch_size, cross_entropy, evaluating
from driveprune.mask import Loss, Mask, buffers, group_of, parameters, restore, sparsity, unwrap
from driveprune.plan import Prune, Rewind, Train, total_steps
from driveprune.pruner import Pruner
from driveprune.seeds import seed_for

State = dict[str, Any]
"""All that a training needs to go on: nested dicts, lists, tensors, numbers and strings."""

Row = dict[str, Any]
"""What is known after an epoch: cycle, epoch, rate, loss, sparsity, and a value for each set of test data."""

Measure = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> a value for each example of the batch, such as right (1) or wrong (0)."""

MakePruner = Callable[[Mapping[str, Any] | None, Progress], Pruner]
Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = ("fp32", "bf16", "fp16")
PATIENCE = 10
"""With a scaler of losses so many in a row may not be finite: it leaves such a step out and scales down."""
LOOK = 50
"""Steps between looks at losses on a GPU, which has to be waited for; those on the CPU are looked at at once."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


Stop = Callable[[], bool]
"""Whether a training shall stop: asked after each step."""


def never() -> bool:
    """Do not stop.

    >>> never()
    False
    """
    return False


class Stopped(KeyboardInterrupt):
    """A training has stopped because it was asked to; its last checkpoint has all that it had done."""


class Source(Protocol):
    """Batches to train on or to test with."""

    def __len__(self) -> int:
        """How many batches there are in an epoch."""

    def __iter__(self) -> Iterator[Any]:
        """Batches to score with."""

    def epoch(self, cycle: int, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from batch `start` on, the same ones every time."""


class Checkpoints(Protocol):
    """Where states are kept while a training runs."""

    def load(self) -> State | None:
        """The last state, if there is one."""

    def save(self, state: State) -> None:
        """Keep a state."""


class Beginning(Protocol):
    """Where the dense first steps are kept that several trainings have in common."""

    def load(self, steps: int, usable: Callable[[int], bool], *, making: bool) -> State | None:
        """The state after at most so many steps. Who is going to make it waits while another one does."""

    def save(self, steps: int, state: State) -> None:
        """Keep the state after so many steps."""


@dataclass(frozen=True)
class Moment:
    """Where a training is, for whoever watches it."""

    step: int
    steps: int
    work: str
    rows: list[Row]


@dataclass(frozen=True)
class Trained:
    """What came of a training."""

    mask: Mask
    rows: list[Row]
    """A row an epoch: of the first cycle, and of the last one, which ends with the sparse network."""
    seconds: dict[str, float]
    """Where the time went: early training, scoring, selection, training, evaluation, loading, saving.

    `pruning` is what it took to obtain the sparse network that was then trained: the loading, early training,
    scoring and selection before and during the last cut.
    """

    engine: str = "dense"
    """What trained the network after its last cut: the dense or the sparse engine."""
    speedup: float | None = None
    """How many times as fast as dense a step of the sparse engine was, if that was measured."""

    def last(self, of: str = "test") -> float | None:
        """The value after the last epoch."""
        values = [row[of] for row in self.rows if of in row]
        return values[-1] if values else None

    def best(self, of: str = "test") -> float | None:
        """The value of the best epoch of the sparse network: best on held-out data, if there are any."""
        by = "holdout" if any("holdout" in row for row in self.rows) else of
        rows = [row for row in self.rows if of in row and row["sparsity"] == self.rows[-1]["sparsity"]]
        return max(rows, key=lambda row: row[by])[of] if rows else None


def right(model: nn.Module, batch: Any) -> Tensor:
    """1 for each example whose largest output is the target, else 0."""
    device = next(model.parameters()).device
    x, y = (part.to(device, non_blocking=True) for part in batch)
    classes: Tensor = model(x).argmax(1)
    return classes.eq(y)


@torch.no_grad()
def measured(model: nn.Module, data: Source, measure: Measure = right) -> float:
    """The mean of a measure over the data of all ranks, in evaluation mode."""
    total, count = 0.0, 0
    with evaluating(model):
        for batch in data.epoch(0, 0):
            if batch_size(batch):  # a rank's share may be empty
                values = measure(model, batch)
                total += float(values.double().sum())
                count += values.numel()
    total, all_values = collectives.total(total, count)
    return total / all_values


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: Source,
    make_pruner: MakePruner,
    *,
    loss: Loss = cross_entropy,
    scheduler: LRScheduler | None = None,
    tests: Mapping[str, Source] | None = None,
    measure: Measure = right,
    precision: Precision = "fp32",
    engine: EngineName = "dense",
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    every: float = 60.0,
    beginning: Beginning | None = None,
    watch: Callable[[Moment], None] = lambda _: None,
    stop: Stop = never,
) -> Trained:
    """Train a network by the plan of a pruner, from its start or from a checkpoint, to the same bits.

    Args:
        model, optimizer, scheduler: as they are at the start, also when there is a checkpoint to go on from.
        data: the training batches.
        make_pruner: makes the pruner, which also steps the scheduler, from its `state_dict()` or None, and from a
            function that it calls with the number of each cut and of all cuts: its `progress`.
        loss: (model, batch) -> scalar.
        tests: what is measured after each epoch, by name: "test", "holdout".
        measure: (model, batch) -> values, whose mean is reported.
        precision: of forward and backward passes in training; scores are made in full precision.
        engine: what trains between the first cut and the end: "dense", the network with zeros in it; "sparse", its
            kept weights alone; "auto", what a measurement says is faster. Checkpoints are the same.
        seed: for randomness in the model, such as dropout; each step has its own.
        checkpoints: where states are kept, one every `every` seconds at most.
        beginning: where the dense first steps are kept that other trainings have in common with this one.
        watch: called after each step, and before anything that takes longer.
        stop: asked after each step whether to stop; then a checkpoint is written and `Stopped` is raised.

    A loss that is not finite is an error (a FloatingPointError) that says at which step it came up and where it
    began; with "fp16" ten in a row are, for its scaler leaves out a step now and then. Checkpoints, and what comes
    out, have finite weights.

    With several ranks, `data` and `tests` are this rank's share of each batch. Gradients, losses and buffers are
    averaged over all examples at every step, so that all ranks stay the same; the first one keeps the checkpoints and
    is watched.

    """
    if collectives.size() > 1:
        _check_plain(model, beginning)
        checkpoints = None if checkpoints is None else _OfFirst(checkpoints)
        watch = watch if collectives.is_first() else lambda _: None
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be {', '.join(_DTYPES)}, got {precision!r}")
    if engine == "sparse" and precision != "fp32":
        raise ValueError(f"the sparse engine computes in fp32, got precision {precision!r}: use the dense engine")
    chosen = Engine(engine if precision == "fp32" else "dense", model, optimizer, loss)
    cudnn = torch.backends.cudnn
    exact = cudnn.flags(enabled=cudnn.enabled, deterministic=True, benchmark=False, allow_tf32=cudnn.allow_tf32)
    training = _Training(
        model, optimizer, scheduler, data, loss, tests or {}, measure, precision, seed, watch, chosen, stop
    )
    try:
        with torch.random.fork_rng(devices=devices), exact:
            training.start(make_pruner, checkpoints, beginning)
            training.run(checkpoints, every, beginning)
    finally:
        training.release()
    return Trained(training.pruner.mask, training.rows, dict(training.seconds), chosen.used, chosen.speedup)


def _check_plain(model: nn.Module, beginning: Beginning | None) -> None:
    """An error for what several ranks cannot train here."""
    if group_of(model) is not None:
        raise ValueError("gradients are averaged over ranks here: pass the module inside the DDP")
    if any(collectives.is_sharded(parameter) for parameter in model.parameters()):
        raise ValueError("a sharded model needs a loop of its own: use driveprune.Pruner there")
    if beginning is not None:
        raise ValueError("a beginning that trainings have in common is for one process")


@dataclass
class _OfFirst:
    """States that the first of several ranks keeps, and tells the others of."""

    checkpoints: Checkpoints

    def load(self) -> State | None:
        return collectives.from_first(self.checkpoints.load)

    def save(self, state: State) -> None:
        if collectives.is_first():
            self.checkpoints.save(state)


class _Training:
    """One training under way."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        data: Source,
        loss: Loss,
        tests: Mapping[str, Source],
        measure: Measure,
        precision: Precision,
        seed: int,
        watch: Callable[[Moment], None],
        engine: Engine,
        stop: Stop,
    ) -> None:
        self._engine, self._stop, self._is_asked = engine, stop, False
        self._model, self._optimizer, self._scheduler, self._data = model, optimizer, scheduler, data
        self._loss, self._tests, self._measure, self._seed, self._watch = loss, tests, measure, seed, watch
        self._device = next(model.parameters()).device
        self._dtype = _DTYPES[precision]
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=precision == "fp16")
        self._pruner: Pruner | None = None
        self.rows: list[Row] = []
        self.seconds: Seconds = defaultdict(float)
        self._steps = self._steps_done = 0
        self._losses = Losses(self._device, PATIENCE if precision == "fp16" else 1)
        self._batches_done = 0
        self._rate = optimizer.param_groups[0]["lr"]

    @property
    def pruner(self) -> Pruner:
        """There from `start` on."""
        assert self._pruner is not None
        return self._pruner

    def release(self) -> None:
        """Leave an ordinary model behind, whatever has happened."""
        self._engine.end()
        if self._pruner is not None and self._pruner.held is not None:
            self._pruner.held.release()

    # Beginning, and going on.

    def start(
        self,
        make_pruner: MakePruner,
        checkpoints: Checkpoints | None,
        beginning: Beginning | None,
    ) -> None:
        """Make the pruner, which does what comes before any training, or go on from what is kept."""
        collectives.copy_first([*parameters(self._model).values(), *buffers(self._model).values()])
        state = None if checkpoints is None else checkpoints.load()
        self._watch(Moment(0, 0, "starting" if state is None else "resuming", self.rows))
        self._pruner = make_pruner(None if state is None else state["pruner"], self._tell_cut)
        self._charge_cuts(before={})
        self._steps = total_steps(self.pruner.plan)
        self._prunes = any(isinstance(phase, Prune) for phase in self.pruner.plan)
        self._shared_steps = _dense_steps(self.pruner) if beginning is not None else 0
        if state is not None:
            self._load(state)
            self._tell_pruner(self.pruner.advance)  # it may have been stopped while it cut
        elif beginning is not None and self._shared_steps:
            shared = beginning.load(self._shared_steps, self._usable, making=self._prunes)
            if shared is not None:
                self._load_beginning(shared)

    def _usable(self, steps: int) -> bool:
        """Whether a beginning of so many steps has not passed by a step that the plan rewinds to."""
        return all(phase.to == 0 or phase.to >= steps for phase in self.pruner.plan if isinstance(phase, Rewind))

    def _load_beginning(self, state: State) -> None:
        """Take over the state after the optimiser's step number n, of which the pruner has not been told yet."""
        self.pruner.load_state_dict({**self.pruner.state_dict(), "cycle_step": state["steps_done"] - 1})
        self._load(state)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # the scheduler asks whether it has stepped
        if not self._prunes:
            self.seconds["training"] += self.seconds.pop("early training", 0.0)
            self.seconds.pop("pruning", None)
        self._tell_pruner(self.pruner.step)

    def _load(self, state: State) -> None:
        self._model.load_state_dict(state["model"])
        restore(buffers(self._model), state["buffers"])
        self._optimizer.load_state_dict(state["optimizer"])
        _match_layouts(self._optimizer)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._scaler.load_state_dict(state["scaler"])
        self.rows[:] = state["rows"]
        self.seconds = defaultdict(float, state["seconds"])
        self._steps_done, self._batches_done, self._rate = state["steps_done"], state["batches_done"], state["rate"]
        self._losses.load(state)

    def _state(self) -> State:
        self._engine.sync()
        return {
            "model": dict(self._model.state_dict()),
            "buffers": buffers(self._model),  # those that are in no state_dict, too
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": self._scaler.state_dict(),
            "pruner": self.pruner.state_dict(),
            "rows": self.rows,
            "seconds": dict(self.seconds),
            "steps_done": self._steps_done,
            "batches_done": self._batches_done,
            "rate": self._rate,
            **self._losses.state(),
        }

    # The loop.

    def run(self, checkpoints: Checkpoints | None, every: float, beginning: Beginning | None) -> None:
        """Train until the plan has come to its end."""
        self._saved, self._saved_step = time.perf_counter(), -1
        try:
            while not self._is_through():
                for batch in self._rest_of_epoch():
                    self._step(batch)
                    if beginning is not None and self._is_shared_end():
                        beginning.save(self._steps_done, self._whole_state())
                    self._tell_pruner(self.pruner.step)
                    if checkpoints is not None and time.perf_counter() - self._saved >= every:
                        self._save(checkpoints)
                    self._stop_if_asked()
        except Stopped:
            collectives.from_first(lambda: self._keep_last(checkpoints))  # for which all ranks wait before they end
            raise

    def _is_through(self) -> bool:
        """Whether the plan has come to its end; an epoch that has ended is measured first."""
        if self._is_epoch_due():
            self._check_losses()
            self._end_epoch()
        if not self.pruner.done:
            self._stop_if_asked()
        return self.pruner.done

    def _stop_if_asked(self) -> None:
        """Stop, if this process was asked to; several ranks agree on it at each step."""
        if self._is_asked or (collectives.size() == 1 and self._stop()):
            raise Stopped

    def _keep_last(self, checkpoints: Checkpoints | None) -> None:
        if checkpoints is not None and self._steps_done not in {0, self._saved_step}:
            self._save(checkpoints)

    def _save(self, checkpoints: Checkpoints) -> None:
        with self._timed("saving"):
            self._say("saving")
            checkpoints.save(self._whole_state())
        self._saved, self._saved_step = time.perf_counter(), self._steps_done

    def _whole_state(self) -> State:
        """The state, which somebody can go on from."""
        state = self._state()
        self._check_losses()
        self._check_weights()
        return state

    def _check_losses(self, batch: Any = None) -> None:
        """An error if a loss was not finite; with the batch, if it is the last one, it says where that began."""
        step = self._losses.broken()
        if step is None:
            return
        is_last = batch is not None and step == self._steps_done + 1
        with collectives.together():  # on one rank it began
            if is_last and (began := self._origin(batch)) is not None:
                raise FloatingPointError(f"{self._broken(step)}: {began}")
        raise FloatingPointError(self._broken(step))

    def _broken(self, step: int) -> str:
        """When it was that the loss ceased to be finite."""
        at = step - 1 - self._steps_done + self.pruner.cycle_step  # of the cycle
        epoch, batch = divmod(max(at, 0), len(self._data))
        cycle = f"cycle {self.pruner.cycle + 1}, " if self.pruner.cycle else ""
        row = f" and at the {PATIENCE - 1} after it" if self._scaler.is_enabled() else ""
        return f"the loss is not finite at step {step} ({cycle}epoch {epoch + 1}, batch {batch + 1}){row}"

    def _origin(self, batch: Any) -> str | None:
        """Where it began in the ordinary network, whatever has trained."""
        if not batch_size(batch):
            return None
        self._engine.end()
        model = unwrap(self._model)

        def again() -> Tensor:
            self._seed_step()
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
                return self._loss(model, batch)

        return origin(model, batch, again)

    def _check_weights(self) -> None:
        if (name := first_not_finite(trained(self._model))) is not None:
            raise FloatingPointError(
                f"the weights {name} are not finite after step {self._steps_done}: its loss was, but not its gradient"
            )

    def _rest_of_epoch(self) -> Iterator[Any]:
        """The batches of this epoch that are not done yet; none after a rewind."""
        cycle, (number, start) = self.pruner.cycle, divmod(self.pruner.cycle_step, len(self._data))
        if start == 0:
            self._begin_epoch()
        self._rate = self._optimizer.param_groups[0]["lr"]
        self._engine.model.train()
        batches = self._data.epoch(cycle, number, start)
        while self.pruner.cycle == cycle and not self.pruner.done:
            with self._timed("loading"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _begin_epoch(self) -> None:
        self._losses.begin()
        self._batches_done = 0

    def _step(self, batch: Any) -> None:
        """One step of the optimiser."""
        with self._timed("early training" if self.pruner.cuts_left else "training"):
            self._seed_step()
            if self.pruner.held is not None:
                self._engine.begin(self.pruner.mask, batch)
            self._engine.follow()
            self._engine.optimizer.zero_grad(set_to_none=True)
            loss = self._backward(batch) if collectives.size() == 1 else self._backward_over_ranks(batch)
            self._losses.add(loss, self._steps_done + 1)
            if loss.device.type == "cpu" or self._steps_done % LOOK == 0:
                self._check_losses(batch)
            self._scaler.step(self._engine.optimizer)
            self._scaler.update()
            self._batches_done += 1
            self._steps_done += 1
        self._say("early training" if self.pruner.cuts_left else "training")

    def _seed_step(self) -> None:
        counter = (self.pruner.cycle, self.pruner.cycle_step, *((rank,) if (rank := collectives.rank()) else ()))
        torch.manual_seed(seed_for(self._seed, "step", *counter))

    def _backward(self, batch: Any) -> Tensor:
        """The loss of a batch, and its gradients."""
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            loss = self._loss(self._engine.model, batch)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _backward_over_ranks(self, batch: Any) -> Tensor:
        """The same for a batch of which each rank has a share, which may be empty: means over all its examples."""
        examples = batch_size(batch)
        loss = examples * float(self._backward(batch)) if examples else 0.0
        weights = list(self._engine.model.parameters())
        asked, all_examples, all_loss, *used = collectives.total(
            self._stop(), examples, loss, *(w.grad is not None for w in weights)
        )
        self._is_asked = asked > 0
        share = examples / all_examples
        known = buffers(self._engine.model)
        restore(known, dict(zip(known, _averaged(list(known.values()), share), strict=True)))
        trained = [weight for weight, times in zip(weights, used, strict=True) if times]
        found = _averaged([torch.zeros_like(w) if w.grad is None else w.grad for w in trained], share)
        for weight, gradient in zip(trained, found, strict=True):
            weight.grad = torch.empty_like(weight).copy_(gradient)
        return torch.tensor(all_loss / all_examples)

    def _tell_pruner(self, go_on: Callable[[], None]) -> None:
        """Let the pruner do what the plan has for this moment, and charge the time of a cut."""
        before = dict(self.pruner.seconds)
        cycle = self.pruner.cycle
        if self.pruner.steps_left == 1:  # the plan goes on to something else: with the ordinary network
            self._engine.end()
            self._check_losses()
            self._check_weights()
        go_on()
        if self.pruner.cycle != cycle:
            self._begin_epoch()
        self._charge_cuts(before)

    def _charge_cuts(self, before: Mapping[str, float]) -> None:
        for work, seconds in self.pruner.seconds.items():
            self.seconds[work] += seconds - before.get(work, 0.0)
            self.seconds["pruning"] += seconds - before.get(work, 0.0)

    def _is_shared_end(self) -> bool:
        """Whether this step, of which the pruner is told next, is the last before the first cut."""
        return self._prunes and self.pruner.cycle == 0 and self.pruner.cycle_step + 1 == self._shared_steps

    def _is_epoch_due(self) -> bool:
        """Whether an epoch has ended whose results are not known yet; the cycles between are not measured."""
        if self._batches_done == 0:  # nothing yet, or just rewound
            return False
        cycle, step = self.pruner.cycle, self.pruner.cycle_step
        rewinds = any(isinstance(phase, Rewind) for phase in self.pruner.plan[self.pruner.cursor :])
        known = any(row["cycle"] == cycle and row["epoch"] == step // len(self._data) for row in self.rows)
        return step % len(self._data) == 0 and (cycle == 0 or not rewinds) and not known

    def _end_epoch(self) -> None:
        """Measure, and add a row."""
        self._say("evaluation")
        with self._timed("evaluation"):
            values = {name: measured(self._engine.model, data, self._measure) for name, data in self._tests.items()}
        self.rows.append(
            {
                "cycle": self.pruner.cycle,
                "epoch": self.pruner.cycle_step // len(self._data),
                "rate": self._rate,
                "loss": self._losses.mean(self._batches_done),
                "sparsity": sparsity(self.pruner.mask),
                **values,
            }
        )
        self._say("evaluation")

    def _tell_cut(self, number: int, cuts: int) -> None:
        if collectives.size() == 1 and self._stop():  # several ranks stop after their cut
            raise Stopped
        self._say("pruning" if cuts == 1 else f"pruning, cut {number} of {cuts}")

    def _say(self, work: str) -> None:
        self._watch(Moment(self._steps_done, self._steps, work, self.rows))

    @contextmanager
    def _timed(self, work: str) -> Iterator[None]:
        start, pruning = time.perf_counter(), self.pruner.cuts_left > 0
        yield
        self.seconds[work] += time.perf_counter() - start
        if pruning and work in {"loading", "early training"}:
            self.seconds["pruning"] += time.perf_counter() - start


def _averaged(tensors: list[Tensor], share: float) -> list[Tensor]:
    """The mean of each tensor over ranks, in which this one has a share; in one sum. Whole numbers are rounded."""
    if not tensors:
        return []
    dtype = torch.float32 if all(t.dtype == torch.float32 for t in tensors) else torch.float64
    row = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])
    mean = collectives.summed(row * share)
    parts = mean.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [
        (part if tensor.is_floating_point() else part.round()).view(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _match_layouts(optimizer: Optimizer) -> None:
    """Give the optimiser's state the memory format of its weights: a fused step pairs them by place in memory."""
    for weight, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                values[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _dense_steps(pruner: Pruner) -> int:
    """How many steps a plan trains before its first cut; all of them if there is none."""
    first = pruner.plan[0]
    return first.until if isinstance(first, Train) else 0
