"""What does it cost to score, to select and to hold? Ratios against plain torch, in interleaved runs.

python benchmarks/core.py            # all, about 20 minutes on 2 cores
python benchmarks/core.py selection  # one of: cut, selection, hold
"""

from __future__ import annotations

import copy
import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import measure
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.utils import prune as torch_prune

import driveprune as dp
from driveprune.schedule import exponential

WEIGHTS = 25_000_000
Row = dict[str, object]


def row(question: str, value: float, limit: float, seconds: dict[str, float], at_most: bool = True) -> Row:
    holds = value <= limit if at_most else value >= limit
    sign = "<=" if at_most else ">="
    return {"question": question, "ratio": round(value, 3), "limit": f"{sign} {limit}", "holds": holds, **seconds}


# One cut of DRIVE against one forward and backward pass on the same batch.

CUTS = 5


def cut_rows(rounds: int = 5) -> list[Row]:
    """A whole phase of cuts, as `prune` runs it: with its copies, selection and check for paths."""
    torch.manual_seed(0)
    net = dp.models.resnet18()
    data = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    dense = copy.deepcopy(net.state_dict())

    def plain() -> None:
        for _ in range(CUTS):
            F.cross_entropy(net(data[0]), data[1]).backward()
            net.zero_grad(set_to_none=True)

    def cut() -> None:
        net.load_state_dict(dense)
        dp.prune(net, [data], method="drive", sparsity=0.98, knobs={"cuts": CUTS})

    def literal() -> None:
        mask = {name: torch.ones_like(weight) for name, weight in dp.prunable(net).items()}
        for reached in exponential(0.98, CUTS):
            mask = two_gradients(net, mask, data, reached)

    seconds = measure.interleaved({"plain": plain, "cut": cut, "literal": literal}, rounds)
    each = {name: round(value / CUTS, 4) for name, value in measure.each(seconds).items()}
    return [
        row("DRIVE cut / forward+backward, ResNet-18, batch 128", measure.ratio(seconds, "cut", "plain"), 1.05, each),
        {
            "question": "literal two-gradient cut / forward+backward, ResNet-18, batch 128",
            "ratio": round(measure.ratio(seconds, "literal", "plain"), 3),
        },
    ]


def two_gradients(
    net: torch.nn.Module, mask: dict[str, torch.Tensor], data: tuple[torch.Tensor, torch.Tensor], reached: float
) -> dict[str, torch.Tensor]:
    """The paper's equations as they stand: mask parameters, two gradients, a threshold over all scores."""
    theta = {name: weight.detach().clone().requires_grad_() for name, weight in dp.prunable(net).items()}
    m = {name: kept.requires_grad_() for name, kept in mask.items()}
    output = functional_call(net, {name: theta[name] * m[name] for name in mask}, (data[0],))
    found = torch.autograd.grad(F.cross_entropy(output, data[1]), [*m.values(), *theta.values()])
    with torch.no_grad():
        metric = {
            name: (theta[name] * by_mask * by_theta).abs()
            for name, by_mask, by_theta in zip(mask, found[: len(m)], found[len(m) :], strict=True)
        }
        flat = torch.cat([score.reshape(-1) for score in metric.values()])
        threshold = flat.kthvalue(round(reached * flat.numel())).values
        return {name: (score > threshold).float() for name, score in metric.items()}


# Selection of the best of 25 million.


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {str(i): torch.randn(WEIGHTS // 10, generator=generator).abs_() for i in range(10)}


def selection_rows(rounds: int = 7) -> list[Row]:
    scores = tensors()
    mask = {name: torch.ones(score.shape, dtype=torch.bool) for name, score in scores.items()}
    layers = [torch.nn.Linear(2500, 1000, bias=False) for _ in range(10)]

    def kthvalue() -> None:
        flat = torch.cat(list(scores.values()))
        threshold = flat.kthvalue(WEIGHTS - WEIGHTS // 50).values
        [score > threshold for score in scores.values()]

    def global_unstructured() -> None:
        torch_prune.global_unstructured(
            [(layer, "weight") for layer in layers], torch_prune.L1Unstructured, amount=0.98
        )
        for layer in layers:
            del layer.weight_mask
            layer.weight = layer._parameters.pop("weight_orig")
            layer._forward_pre_hooks.clear()

    jobs = {
        "keep_top": lambda: dp.keep_top(scores, mask, 0.98),
        "kthvalue": kthvalue,
        "global_unstructured": global_unstructured,
    }
    seconds = measure.interleaved(jobs, rounds)
    each = measure.each(seconds)
    faster = {name: measure.ratio(seconds, name, "keep_top") for name in ("kthvalue", "global_unstructured")}
    return [
        row("concatenate+kthvalue / keep_top, 25M scores", faster["kthvalue"], 4, each, at_most=False),
        row("prune.global_unstructured / keep_top, 25M", faster["global_unstructured"], 4, each, at_most=False),
        row("extra peak memory of keep_top / scores, 25M", memory(), 0.1, {}),
    ]


def memory() -> float:
    """Peak memory of a fresh process during keep_top, less what was there before and the returned mask."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    return float(done.stdout)


def measure_memory() -> None:
    scores = tensors()
    mask = {name: torch.ones(score.shape, dtype=torch.bool) for name, score in scores.items()}
    small = {"a": torch.rand(3 << 20)}
    dp.keep_top(small, {"a": torch.ones(3 << 20, dtype=torch.bool)}, 0.98)  # compiled, threads started
    ctypes.CDLL(None).malloc_trim(0)  # nothing freed before may hide what is allocated from now on
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from now
    before = status("VmRSS")
    kept = dp.keep_top(scores, mask, 0.98)
    returned = sum(k.numel() for k in kept.values())
    print((status("VmHWM") - before - returned) / (4 * WEIGHTS))


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


# A training step under a hold.


def hold_rows() -> list[Row]:
    rows = []
    for name, build, batch, optimizer, limit, rounds in (
        ("ResNet-18, SGD momentum, batch 128", dp.models.resnet18, 128, sgd, 1.03, 12),
        ("AlexNet, Adam (fused, as in the recipes), batch 256", dp.models.alexnet, 256, fused_adam, 1.06, 30),
        ("AlexNet, Adam (torch's default), batch 256", dp.models.alexnet, 256, adam, None, 30),
    ):
        torch.manual_seed(0)
        dense = build()
        held, pruned = copy.deepcopy(dense), copy.deepcopy(dense)
        mask = dp.prune(copy.deepcopy(dense), method="erk", sparsity=0.98)
        optimizers = {"dense": optimizer(dense), "held": optimizer(held)}
        dp.hold(held, optimizers["held"], mask)
        for path, module in pruned.named_modules():
            if f"{path}.weight" in mask:
                torch_prune.custom_from_mask(module, "weight", mask[f"{path}.weight"])
        optimizers["torch_prune"] = optimizer(pruned)
        data = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
        nets = {"dense": dense, "held": held, "torch_prune": pruned}
        jobs = {key: step(net, optimizers[key], data) for key, net in nets.items()}
        seconds = measure.interleaved(jobs, rounds)
        each = measure.each(seconds)
        held_step, question = measure.ratio(seconds, "held", "dense"), f"held step / dense step, {name}"
        rows.append(
            {"question": question, "ratio": round(held_step, 3), **each}
            if limit is None
            else row(question, held_step, limit, each)
        )
        rows.append(
            {
                "question": f"torch.nn.utils.prune step / dense step, {name}",
                "ratio": round(measure.ratio(seconds, "torch_prune", "dense"), 3),
            }
        )
    return [*rows, sqrt_row()]


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-4)


def fused_adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)


def sqrt_row(rounds: int = 15) -> Row:
    """Why torch's default Adam is slower where its state is zero: it takes square roots by MKL."""
    some, zeros, out = torch.rand(WEIGHTS), torch.zeros(WEIGHTS), torch.empty(WEIGHTS)
    jobs = {"sqrt_some": lambda: torch.sqrt(some, out=out), "sqrt_zeros": lambda: torch.sqrt(zeros, out=out)}
    seconds = measure.interleaved(jobs, rounds)
    slower = measure.ratio(seconds, "sqrt_zeros", "sqrt_some")
    return {"question": "torch.sqrt of zeros / of other numbers, 25M", "ratio": round(slower, 3)} | measure.each(
        seconds
    )


def step(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(data[0]), data[1]).backward()
        optimizer.step()

    return run


PARTS = {"cut": cut_rows, "selection": selection_rows, "hold": hold_rows}


if __name__ == "__main__":
    if sys.argv[1:] == ["--memory"]:
        measure_memory()
    else:
        chosen = sys.argv[1:] or list(PARTS)
        measure.write(
            "core" if len(chosen) == len(PARTS) else f"core-{'-'.join(chosen)}",
            [r for part in chosen for r in PARTS[part]()],
        )
