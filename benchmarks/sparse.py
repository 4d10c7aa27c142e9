"""How much faster do sparse networks train and run? Against the best dense engine, and against the bound.

python benchmarks/sparse.py [DATA_DIR]                     # all, about 25 minutes on 2 idle cores
python benchmarks/sparse.py --models vgg16 --threads 2     # a part; its rows replace those in results/sparse.json
python benchmarks/sparse.py --models alexnet --threads 2 --quick    # does it work? Nothing is written

Speed follows the multiply-adds that are left: a sparse one needs a load, so the bound is (0.81/0.95) / MAC density.
Masks are those of DRIVE and SynFlow (benchmarks/masks.py, which needs CIFAR-10 in DATA_DIR the first time). Training
is against torch eager, inference against the fastest of torch eager, torch.compile, ONNX Runtime and OpenVINO: all of
them are measured first, the two fastest ones again in turn with the sparse networks. OMP_WAIT_POLICY is passive: the
threads of one engine do not spin while another one is measured.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import engines
import masks
import measure
import numpy as np
import torch
import torch.nn.functional as F
from engines import Job
from torch import Tensor, nn

import driveprune as dp
from driveprune.engine import Engine

Row = dict[str, object]
EXAMPLE = torch.zeros(1, 3, 32, 32)
TITLES = {"vgg16": "VGG-16", "resnet18": "ResNet-18", "alexnet": "AlexNet"}

STEP, BATCH, SINGLE = "training step, batch 128", "inference, batch 32", "inference, batch 1"
SIZES = {STEP: 128, BATCH: 32, SINGLE: 1}
ROUNDS = {STEP: 9, BATCH: 12, SINGLE: 30}
CALLS = {STEP: 1, BATCH: 1, SINGLE: 10}
"""Calls that are measured as one, as many as make a clock's tick and a cold cache small."""
LIMITS = {
    STEP: {0.95: 0.75, 0.98: 0.70, 0.993: 0.55},
    BATCH: {0.95: 0.75, 0.98: 0.70, 0.993: 0.55},
    SINGLE: {0.95: 0.55, 0.98: 0.45, 0.993: 0.40},
}
"""Shares of the bound that must be reached, by sparsity."""
MEMORY_LIMIT = 1.2
NEVER_SLOWER = 0.95
"""Dense time / time with `auto`: as fast, within noise."""
EASY = (0.0, 0.5)
"""Sparsities of random masks with which there is little or nothing to gain."""


@dataclass
class Case:
    """A network with a mask, and its sparse ones."""

    name: str
    sparsity: float
    net: nn.Module
    mask: dp.Mask
    limited: bool = True
    mac_density: float = 1.0
    compacted: dict[bool, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts = dp.summary(self.mask, self.net, EXAMPLE)
        assert facts.macs is not None
        assert facts.dense_macs
        self.mac_density = facts.macs / facts.dense_macs

    @property
    def bound(self) -> float:
        """How many times faster it can be."""
        return (0.81 / 0.95) / self.mac_density

    def sparse(self, train: bool) -> nn.Module:
        """The sparse network to train, or to run, for the number of threads that torch has now."""
        if not self.limited:  # no channel is dead in it
            return dp.sparsify(copy.deepcopy(self.net).train(train), self.mask, EXAMPLE)
        if train not in self.compacted:
            net = copy.deepcopy(self.net).train(train)
            self.compacted[train] = dp.compact(net, self.mask, EXAMPLE, keep="trainable" if train else "function")
        small: Any = self.compacted[train]
        return dp.sparsify(small, small.mask, EXAMPLE).train(train)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)


def training(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Job:
    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return run


def repeated(job: Job, calls: int) -> Job:
    def run() -> None:
        for _ in range(calls):
            job()

    return run


def timed(jobs: dict[str, Job], work: str, quick: bool, rounds: int | None = None) -> dict[str, list[float]]:
    """Seconds of a call of each job, taken in turn."""
    count = 2 if quick else rounds or ROUNDS[work]
    found = measure.interleaved({name: repeated(job, CALLS[work]) for name, job in jobs.items()}, count)
    return {name: [value / CALLS[work] for value in values] for name, values in found.items()}


# The works.


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 32, 32, generator=generator), torch.randint(10, (size,), generator=generator)


def training_rows(model: str, cases: list[Case], threads: int, quick: bool) -> list[Row]:
    x, y = batch_of(SIZES[STEP])
    last = x.contiguous(memory_format=torch.channels_last)
    dense = dense_net(cases[0])
    nets = {case.name: case.sparse(train=True) for case in cases if case.limited}
    autos = {case.name: chosen(case, last, y) for case in cases if not case.limited}
    jobs = {"torch eager": training(dense, sgd(dense), last, y)}
    jobs |= {name: training(net, sgd(net), x, y) for name, net in nets.items()}
    for case in cases:
        if case.name in autos:
            same, auto = dense_net(case), autos[case.name]
            jobs[f"torch eager, {case.name}"] = training(same, sgd(same), last, y)
            jobs[case.name] = training(auto.model, auto.optimizer, last, y)
    seconds = timed(jobs, STEP, quick)
    rows = [speed_row(model, case, STEP, threads, seconds, ["torch eager"]) for case in cases]
    for row, case in zip(rows, cases, strict=True):
        if case.name in autos:
            row["auto_chose"] = autos[case.name].used
    memory = [memory_row(model, case, nets[case.name]) for case in cases if case.limited]
    return [*rows, *(memory if threads > 1 else [])]


def dense_net(case: Case) -> nn.Module:
    return copy.deepcopy(case.net).train().to(memory_format=torch.channels_last)


def chosen(case: Case, x: Tensor, y: Tensor) -> Engine:
    """The engine "auto", as `fit` and `driveprune run` use it, after its choice."""
    net = dense_net(case)
    engine = Engine("auto", net, sgd(net), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    engine.begin(case.mask, (x, y))
    return engine


def inference_rows(
    model: str, cases: list[Case], content: bytes, work: str, nets: dict[str, nn.Module], threads: int, quick: bool
) -> list[Row]:
    x, _ = batch_of(SIZES[work])
    peers = engines.engines(copy.deepcopy(cases[0].net).eval(), content, x, threads)
    first = timed(peers, work, quick, rounds=6)
    best = sorted(peers, key=lambda name: measure.fastest(first[name]))[:2]
    jobs = {name: peers[name] for name in best}
    for case in cases:
        if not case.limited:
            jobs[f"torch eager, {case.name}"] = engines.eager(copy.deepcopy(case.net).eval(), x)
        jobs[case.name] = engines.in_inference(nets[case.name], x)
        wanted = engines.in_inference(copy.deepcopy(case.net).eval(), x)()
        engines.check_same(f"{model}, {case.name}", jobs[case.name](), wanted)
    seconds = timed(jobs, work, quick)
    rows = [speed_row(model, case, work, threads, seconds, best) for case in cases]
    return [peer_row(model, work, threads, first), *rows]


# The rows.


def speed_row(
    model: str, case: Case, work: str, threads: int, seconds: dict[str, list[float]], peers: list[str]
) -> Row:
    """How many times faster a sparse network is, and which share of its bound that is."""
    about = f"{TITLES[model]}, {case.name}, {work}, {counted(threads)}"
    if not case.limited:
        same = f"torch eager, {case.name}"  # the same weights: torch's time depends on how many are zero
        speedup = measure.ratio(seconds, same, case.name)
        return {
            "question": f"{about}: times faster than torch eager, auto",
            "ratio": round(speedup, 3),
            "limit": f">= {NEVER_SLOWER}",
            "holds": speedup >= NEVER_SLOWER,
            **spread(seconds, same, case.name),
        }
    dense = min(peers, key=lambda name: measure.fastest(seconds[name]))
    speedup = measure.ratio(seconds, dense, case.name)
    share, limit = speedup / case.bound, LIMITS[work].get(case.sparsity)
    row: Row = {
        "question": f"{about}: times faster than the best dense engine",
        "ratio": round(speedup, 2),
        "mac_density": round(case.mac_density, 4),
        "bound": round(case.bound, 2),
        "share_of_bound": round(share, 3),
    }
    if limit is not None:
        row |= {"limit": f"share_of_bound >= {limit}", "holds": share >= limit}
    return {**row, "dense": dense, **spread(seconds, dense, case.name)}


def spread(seconds: dict[str, list[float]], dense: str, sparse: str) -> Row:
    return {
        "dense_ms": milliseconds(measure.fastest(seconds[dense])),
        "sparse_ms": milliseconds(measure.fastest(seconds[sparse])),
        "dense_median_ms": milliseconds(statistics.median(seconds[dense])),
        "sparse_median_ms": milliseconds(statistics.median(seconds[sparse])),
    }


def peer_row(model: str, work: str, threads: int, seconds: dict[str, list[float]]) -> Row:
    question = f"{TITLES[model]}, dense, {work}, {counted(threads)}: milliseconds of each engine"
    return {"question": question, **{name: milliseconds(measure.fastest(each)) for name, each in seconds.items()}}


def memory_row(model: str, case: Case, net: nn.Module) -> Row:
    """Bytes of weights, gradients and Adam's state against the kept weights' share of the dense network's."""
    held, dense = adam_bytes(net), adam_bytes(copy.deepcopy(case.net))
    mask: Any = net.mask
    kept = sum(int(each.count_nonzero()) for each in mask.values())
    share = kept / sum(each.numel() for each in case.mask.values())
    return {
        "question": f"{TITLES[model]}, {case.name}: weights, gradients and Adam's state / the kept share of dense",
        "ratio": round(held / (share * dense), 3),
        "limit": f"<= {MEMORY_LIMIT}",
        "holds": held <= MEMORY_LIMIT * share * dense,
        "bytes": held,
        "bytes_dense": dense,
        "kept_share": round(share, 5),
        "bytes_tables": table_bytes(net),
        "bytes_tables_are": "indices of the kernels, forward and backward, for this size of batch and image",
    }


def adam_bytes(net: nn.Module) -> int:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0)
    for weight in net.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    state = [each for values in optimizer.state.values() for each in values.values() if isinstance(each, Tensor)]
    found = [*net.parameters(), *(weight.grad for weight in net.parameters()), *state]
    return sum(each.numel() * each.element_size() for each in found if each is not None)


def table_bytes(net: nn.Module) -> int:
    """Bytes of all arrays that the kernels of a sparse network hold."""
    found: dict[int, np.ndarray[Any, Any]] = {}

    def look(thing: Any) -> None:
        if isinstance(thing, np.ndarray):
            found[id(thing)] = thing
        elif isinstance(thing, dict):
            for each in thing.values():
                look(each)
        elif isinstance(thing, list | tuple):
            for each in thing:
                look(each)
        elif type(thing).__module__.startswith("driveprune.sparse"):
            look(vars(thing))

    for module in net.modules():
        look(getattr(module, "kernel", None))
    return sum(each.nbytes for each in found.values())


def counted(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def milliseconds(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


# All of it.


def cases_of(data_dir: str | None, models: list[str], quick: bool) -> Iterator[tuple[str, list[Case]]]:
    """For each model the networks with DRIVE's and SynFlow's masks, and with masks that leave much."""
    for model, group in itertools.groupby(masks.networks(data_dir), key=lambda each: each[0]):
        if model not in models:
            continue
        cases = [
            Case(f"{method} at {100 * sparsity:g}%", sparsity, net, mask)
            for _, method, sparsity, net, mask, _ in group
            if not quick or (method, sparsity) == ("synflow", 0.98)
        ]
        for sparsity in EASY:
            torch.manual_seed(0)
            net = dp.models.build(model, classes=10)
            mask = dp.prune(net, method="random", sparsity=sparsity)
            cases.append(Case(f"random at {100 * sparsity:g}%", sparsity, net, mask, limited=False))
        yield model, cases


def measured(model: str, cases: list[Case], threads: int, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(threads)
    found = cases if threads > 1 else [case for case in cases if case.limited]
    content = engines.onnx_of(copy.deepcopy(cases[0].net), EXAMPLE)
    yield from training_rows(model, found, threads, quick)
    gc.collect()
    nets = {case.name: case.sparse(train=False) for case in found}
    for work in (BATCH, SINGLE):
        yield from inference_rows(model, found, content, work, nets, threads, quick)


def told(row: Row, start: float) -> Row:
    question, *facts = row.items()
    shown = [f"{name} {value}" for name, value in facts if "bytes" not in name and "median" not in name]
    print(f"{time.perf_counter() - start:5.0f} s  {question[1]}:", ", ".join(shown), flush=True)
    return row


def others(rows: list[Row]) -> list[Row]:
    """Rows of earlier parts."""
    file = measure.RESULTS / "sparse.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    new = {row["question"] for row in rows}
    return [row for row in before if row["question"] not in new]


def passive() -> None:
    """Begin again with threads that sleep while they wait; OpenMP reads that only once, when it is loaded."""
    if os.environ.get("OMP_WAIT_POLICY") is None:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "passive"})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data_dir", nargs="?", help="where CIFAR-10 is, if the masks have to be made")
    parser.add_argument("--models", nargs="+", choices=masks.MODELS, default=list(masks.MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--quick", action="store_true", help="one mask and two rounds; nothing is written")
    return parser.parse_args()


if __name__ == "__main__":
    passive()
    given = arguments()
    engines.check_installed()
    warnings.simplefilter("ignore", dp.CollapseWarning)
    start, load, rows = time.perf_counter(), os.getloadavg()[0], []
    for model, cases in cases_of(given.data_dir, given.models, given.quick):
        for threads in given.threads:
            rows += [told(row, start) for row in measured(model, cases, threads, given.quick)]
    rows.append({"question": "load of the machine before it began", "load": round(load, 2)})
    is_part = len(given.models) < len(masks.MODELS) or sorted(given.threads) != [1, 2]
    if not given.quick:
        words = " ".join(given.models), " ".join(map(str, given.threads))
        words = f"--models {words[0]} --threads {words[1]} (and other parts)" if is_part else "DATA_DIR"
        torch.set_num_threads(max(given.threads))
        measure.write("sparse", [*(others(rows) if is_part else []), *rows], words)
