"""Does sparsity pay on this machine? The network with zeros in it against the sparse one, measured in turn."""

from __future__ import annotations

import copy
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from driveprune.compact import compact
from driveprune.graph import Inputs, inputs_of
from driveprune.mask import apply, check_fits, sparsity, unwrap
from driveprune.screen import Screen
from driveprune.sparse import SparseWarning, explain, sparsify
from driveprune.summary import summary

SECONDS = 2.0
"""Time for one comparison, if the rounds are not given."""
ROUNDS = 6, 600
"""At least, and at most so many of them."""
NOISE = 0.05
"""Times that differ by less are the same: rounds differ by so much even on a quiet machine."""

INFERENCE, STEP = "inference", "training step"
Job = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds that a batch takes, dense and sparse."""

    work: str
    """Inference or a training step."""
    batch: int
    dense: float
    sparse: float

    @property
    def speedup(self) -> float:
        """How many times faster the sparse network is; below 1 it is slower."""
        return self.dense / self.sparse

    @property
    def verdict(self) -> str:
        """What is gained, in words.

        >>> Timing("inference", 1, 0.030, 0.010).verdict, Timing("inference", 1, 0.010, 0.013).verdict
        ('3.0× faster', 'dense is faster here: 1.3×')
        """
        if abs(self.speedup - 1) < NOISE:
            return "nothing gained"
        return f"{self.speedup:.1f}× faster" if self.speedup > 1 else f"dense is faster here: {_slower(self)}×"


def _slower(timing: Timing) -> str:
    factor = timing.sparse / timing.dense
    return f"{factor:.1f}" if factor >= 1.1 else f"{factor:.2f}"


@dataclass(frozen=True)
class Bench:
    """What was measured; printed, a table."""

    timings: tuple[Timing, ...]
    sparsity: float
    mac_density: float | None
    """The multiply-adds that are left, as a share of the dense network's; None if they cannot be counted."""
    threads: int
    load: float | None
    """How many processes wanted to run before it began; None where the system does not tell."""
    left_out: tuple[str, ...] = ()
    """What could not be measured, and why."""
    sparse_share: float = 1.0
    """How many of the masked weights are in layers that the sparse kernels know."""

    @property
    def title(self) -> str:
        """What was compared, in one line."""
        macs = "" if self.mac_density is None else f", {self.mac_density:.1%} of the multiply-adds left"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"sparsity {self.sparsity:.2%}{macs}, {threads}"

    @property
    def notes(self) -> list[str]:
        """What a reader should know before believing the table."""
        lost = [f"{each.work}, batch {each.batch}" for each in self.timings if each.speedup < 1 + NOISE]
        found = [f"left out: {line}" for line in self.left_out]
        if lost and len(lost) == len(self.timings):
            found.append("nothing is gained on this machine: stay with the dense network")
        elif lost:
            found.append(f"nothing is gained in {'; '.join(lost)}: stay with the dense network there")
        if self.sparse_share < 0.5:
            found.append(
                f"only {self.sparse_share:.0%} of the masked weights are in layers that the sparse kernels know: "
                "print(dp.explain(dp.sparsify(model, mask, example)))"
            )
        cores = os.cpu_count() or 1
        if self.load is not None and self.load > 0.5 * cores:
            found.append(f"the machine was busy (load {self.load:.1f} on {cores} cores): these times are rough")
        return found

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        timings = [{**vars(each), "speedup": each.speedup, "verdict": each.verdict} for each in self.timings]
        return {**vars(self), "timings": timings, "notes": self.notes}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for title in ("batch", "dense, ms", "sparse, ms"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("")
        works = list(dict.fromkeys(each.work for each in self.timings))
        for work in works:
            rows = [each for each in self.timings if each.work == work]
            for row in rows:
                name = work if row is rows[0] else ""
                table.add_row(name, str(row.batch), milliseconds(row.dense), milliseconds(row.sparse), _marked(row),
                              end_section=row is rows[-1])  # fmt: skip
        yield self.title
        yield table
        yield from self.notes

    def __str__(self) -> str:
        console = Screen(width=100, force_terminal=False)
        with console.capture() as captured:
            console.print(self, highlight=False)
        return captured.get()


def _marked(timing: Timing) -> str:
    style = "green" if timing.speedup >= 1 + NOISE else "yellow"
    return f"[{style}]{timing.verdict}[/]"


def milliseconds(seconds: float) -> str:
    """Three digits of a time, in milliseconds.

    >>> milliseconds(1.23456), milliseconds(0.0123456), milliseconds(0.000123456)
    ('1,235', '12.3', '0.123')
    """
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bench(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    example: Any,
    *,
    batches: Iterable[int] = (1, 32, 128),
    threads: int | None = None,
    rounds: int | None = None,
    watch: Callable[[str], None] | None = None,
) -> Bench:
    """How long inference and a training step take with the zeros in the network, and without them.

    Dense is torch with the channels last, sparse the compacted network on the kernels of `sparsify`; both run in
    turn, so that whatever else runs on the machine disturbs them alike. A training step is a forward and a backward
    pass and a step of SGD with momentum. The network that is given stays as it is.

    Args:
        model: a network in float32 on the CPU.
        mask: name -> True where the weight is kept.
        example: an input of the network, such as `x[:1]`; of floating tensors only the shape counts.
        batches: the sizes of the batches.
        threads: as many threads; by default those that torch uses.
        rounds: how often everything is measured; by default for two seconds each.
        watch: is told what is being measured.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> mask = {"0.weight": torch.eye(8) > 0}
    >>> [(each.work, each.batch) for each in bench(net, mask, torch.ones(1, 8), batches=[4], rounds=1).timings]
    [('inference', 4), ('training step', 4)]

    """
    sizes = _sizes(batches)
    _check_counts(threads=threads, rounds=rounds)
    check_fits(model, mask)
    inputs, tell, load = inputs_of(example), watch or (lambda _: None), _load()
    with _threads(threads) as used:
        plain = copy.deepcopy(unwrap(model))
        apply(plain, mask)
        facts = summary(mask, plain, inputs)
        timings, left_out = [], []
        for work, train in ((INFERENCE, False), (STEP, True)):
            tell(f"preparing {work}")
            dense, sparse = _pair(plain, mask, inputs, train=train)
            share = explain(sparse).sparse_share
            for size in sizes:
                tell(f"{work}, batch {size}")
                try:
                    seconds = _measured(dense, sparse, _batch(inputs, size), train=train, rounds=rounds)
                except ValueError as error:  # such as a normalisation over one value
                    left_out.append(f"{work}, batch {size}: {str(error).partition(chr(10))[0]}")
                    continue
                timings.append(Timing(work, size, **seconds))
    density = None if facts.macs is None or not facts.dense_macs else facts.macs / facts.dense_macs
    return Bench(tuple(timings), sparsity(mask), density, used, load, tuple(left_out), share)


def _sizes(batches: Iterable[int]) -> list[int]:
    sizes = list(dict.fromkeys(batches))
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"batches must be sizes of at least 1, got {sizes}")
    return sizes


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """With so many threads; afterwards as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield count or before
    finally:
        torch.set_num_threads(before)


def _pair(
    plain: nn.Module, mask: Mapping[str, Tensor], inputs: Inputs, *, train: bool
) -> tuple[nn.Module, nn.Module]:
    """The network with its zeros, and the sparse one."""
    source = copy.deepcopy(plain).train(train)
    small, small_mask = source, mask
    try:
        small = compact(source, mask, inputs, keep="trainable" if train else "function")
        small_mask = getattr(small, "mask", mask)
    except ValueError:  # a network that cannot be traced runs without its dead channels removed
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseWarning)  # the notes say it
        sparse = sparsify(small, small_mask, inputs).train(train)
    return source.to(memory_format=torch.channels_last), sparse  # type: ignore[call-overload]


def _measured(
    dense: nn.Module, sparse: nn.Module, batch: Inputs, *, train: bool, rounds: int | None
) -> dict[str, float]:
    last = tree_map_only(Tensor, _channels_last, batch.args), tree_map_only(Tensor, _channels_last, batch.kwargs)
    make = _step if train else _inference
    jobs = {"dense": make(dense, Inputs(*last)), "sparse": make(sparse, batch)}
    seconds = _for_a_while(jobs) if rounds is None else interleaved(jobs, rounds)
    return {name: fastest(values) for name, values in seconds.items()}


def _for_a_while(jobs: Mapping[str, Job]) -> dict[str, list[float]]:
    """As many rounds as there is time for."""
    found = interleaved(jobs, 2, warmup=2)  # compiles kernels, makes tables
    start, count = time.perf_counter(), 2
    while count < ROUNDS[0] or (count < ROUNDS[1] and time.perf_counter() - start < SECONDS):
        for name, values in interleaved(jobs, 2, warmup=0).items():
            found[name] += values
        count += 2
    return found


def _inference(net: nn.Module, batch: Inputs) -> Job:
    def run() -> None:
        with torch.inference_mode():
            net(*batch.args, **batch.kwargs)

    return run


def _step(net: nn.Module, batch: Inputs) -> Job:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs = tree_leaves(net(*batch.args, **batch.kwargs))
        losses = [each.square().mean() for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return run


def _batch(inputs: Inputs, size: int) -> Inputs:
    """So many examples of the kind of an example: random numbers, or the same integers."""
    generator = torch.Generator().manual_seed(0)

    def like(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        if tensor.is_floating_point():
            return torch.randn(size, *tensor.shape[1:], generator=generator, dtype=tensor.dtype)
        return tensor[:1].expand(size, *tensor.shape[1:]).contiguous()

    return Inputs(tree_map_only(Tensor, like, inputs.args), tree_map_only(Tensor, like, inputs.kwargs))


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def interleaved(jobs: Mapping[str, Job], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each job, run in turn, round after round, so that a busy machine disturbs all alike.

    The order turns around from one round to the next, so that no job always follows the same other one.
    """
    for _ in range(warmup):
        for job in jobs.values():
            job()
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds):
        order = list(jobs.items())
        for name, job in order if number % 2 == 0 else reversed(order):
            start = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def fastest(values: list[float]) -> float:
    """The mean of the fastest third.

    What else runs on the machine only ever makes a round slower; the fastest rounds are those that were disturbed
    least.

    >>> fastest([3.0, 1.0, 2.0])
    1.0
    """
    return statistics.mean(sorted(values)[: max(1, len(values) // 3)])
