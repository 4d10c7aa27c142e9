"""What a cut of a sharded network costs with 2 and 4 processes: bytes on the wire, memory a rank, passes.

python benchmarks/distributed.py    # about 5 minutes on 2 cores

A stack of linear layers, sharded with `fully_shard`, never whole on any rank; gloo over the loopback device, whose
counter is what is compared with the formulas of docs/large-models.md. Nothing else should use it meanwhile.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import measure
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import driveprune as dp
from driveprune.collectives import full, local

LAYERS, WIDTH = 24, 2048
WEIGHTS = LAYERS * WIDTH * WIDTH
CUTS = {"magnitude": 1, "random": 1, "snip": 1, "drive": 3, "grasp": 1}
SENT = {"magnitude": 0, "random": 0, "snip": 2 + 2, "drive": 2 + 2, "grasp": 1 + 2 + 2}
"""How often a cut sends all weights: two gathers and one scatter for a gradient; for GraSP one gather, and
sums for the gradient and the Hessian product. gloo scatters by a sum on all ranks, and a sum is sent twice."""
HISTOGRAMS = 2 * 65536 * 8
"""Bytes of the counts that a cut of float32 scores sums."""
OWN_BYTES = 14
"""For each weight of a rank: its value from before 4, its gradient 4, its score 4, its masks 2."""
GRASP_BYTES = (5, 16)
"""For each weight of a rank: its value from before 4, its mask 1. For each weight of all ranks: its value 4, its
gradient 4, the Hessian product of a batch 4 and that of all batches 4. Scores come when these are gone."""


def expected_wire(method: str, ranks: int) -> float:
    """Bytes that a rank sends for a cut: weights, gradients and products, and the counts."""
    share = (ranks - 1) / ranks
    return share * (SENT[method] * 4 * WEIGHTS + 2 * HISTOGRAMS)


def expected_peak(method: str, own: int) -> float:
    """Bytes that a rank needs beside its part of the weights."""
    return GRASP_BYTES[0] * own + GRASP_BYTES[1] * WEIGHTS if method == "grasp" else OWN_BYTES * own


def network() -> nn.Module:
    """Sharded before it has any values; each rank fills its own part."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    for weight in model.parameters():
        local(weight.data).normal_(std=WIDTH**-0.5)
    return model


def on_a_rank(method: str) -> None:
    dist.init_process_group("gloo")
    model, passes = network(), Counter()
    model.register_forward_hook(lambda *_: passes.update(["forward"]))
    batches = [(torch.randn(4, WIDTH), torch.randint(WIDTH, (4,)))]
    knobs = {"cuts": CUTS[method]} if CUTS[method] > 1 else {}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    dist.barrier()
    sent, start = _loopback(), time.perf_counter()
    mask = dp.prune(model, batches, method=method, sparsity=0.9, knobs=knobs, progress=False)
    seconds = time.perf_counter() - start
    dist.barrier()
    sent = _loopback() - sent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
    kept = dp.mask.kept_weights(mask)
    last = full(mask[next(reversed(mask))])
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    if dist.get_rank() == 0:
        print(json.dumps({
            "sent": sent, "seconds": seconds, "peak": max(peaks), "kept": kept, "forward": passes["forward"],
            "last": int(last.count_nonzero()), "own": sum(local(w).numel() for w in model.parameters()),
        }))  # fmt: skip
    dist.destroy_process_group()


def _loopback() -> int:
    """Bytes that were sent over the loopback device so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def measured(method: str, ranks: int) -> dict[str, object]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, __file__, method], capture_output=True, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},  # freed memory is given back
    )  # fmt: skip
    found = json.loads(done.stdout)
    cuts = CUTS[method]
    sent, expected = found["sent"] / ranks / cuts, expected_wire(method, ranks)
    assert found["kept"] == dp.mask.kept_count(WEIGHTS, 0.9)
    return {
        "method": method,
        "ranks": ranks,
        "weights": WEIGHTS,
        "cuts": cuts,
        "forward_passes_a_cut": found["forward"] / cuts,
        "sent_megabytes_a_rank_a_cut": round(sent / 1e6, 1),
        "expected_megabytes": round(expected / 1e6, 1),
        "peak_megabytes_a_rank": round(found["peak"] / 1e6),
        "expected_peak_megabytes": round(expected_peak(method, found["own"]) / 1e6),
        "peak_bytes_an_own_weight": round(found["peak"] / found["own"], 1),
        "seconds_a_cut": round(found["seconds"] / cuts, 2),
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        on_a_rank(sys.argv[1])
    else:
        measure.write("distributed", [measured(method, ranks) for method in CUTS for ranks in (2, 4)])
