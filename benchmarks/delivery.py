"""What does a user ship? Bytes against dense, gzip and the entropy bound; the compacted network's cost and latency.

python benchmarks/delivery.py DATA_DIR    # where CIFAR-10 is; about 15 minutes on 2 cores the first time
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from pathlib import Path

import masks
import measure
import torch
from torch import nn

import driveprune as dp
from driveprune.export.onnx import latencies, to_onnx

EXAMPLE = torch.zeros(1, 3, 32, 32)


def gzipped(net: nn.Module) -> int:
    """Bytes of all weights, dense with their zeros, through gzip."""
    raw = b"".join(value.detach().numpy().tobytes() for value in net.state_dict().values())
    return len(gzip.compress(raw, 6))


def measured(
    model: str, method: str, sparsity: float, net: nn.Module, mask: dp.Mask, dense: bytes
) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        saved = dp.save(Path(folder) / "net", net, mask)
        half = dp.save(Path(folder) / "half", net, mask, values="fp16")
    net.eval()
    small = dp.compact(net, mask, EXAMPLE)
    content = to_onnx(small, EXAMPLE)
    seconds = latencies({"dense": dense, "small": content}, EXAMPLE, rounds=30)
    gains = small.gains
    return {
        "question": f"{model}, {method} at {100 * sparsity:g}%: bytes of the file / the entropy bound",
        "ratio": round(saved.bytes / saved.bound_bytes, 3),
        "limit": "<= 1.15",
        "holds": saved.bytes <= 1.15 * saved.bound_bytes,
        "bytes": saved.bytes,
        "bytes_fp16": half.bytes,
        "fp16_relative_error": round(half.error, 6),
        "bytes_bound": saved.bound_bytes,
        "bytes_dense": saved.dense_bytes,
        "bytes_gzip": gzipped(net),
        "onnx_bytes_dense": len(dense),
        "onnx_bytes_compacted": len(content),
        "channels": gains.channels,
        "weights_dense": gains.weights,
        "macs_dense": gains.macs,
        "macs_ratio": round(gains.macs[0] / max(1, gains.macs[1]), 2),
        "activation_bytes": gains.activations,
        "onnxruntime_ms_dense": round(1e3 * seconds["dense"], 3),
        "onnxruntime_ms_compacted": round(1e3 * seconds["small"], 3),
        "latency_ratio": round(seconds["dense"] / seconds["small"], 2),
    }


if __name__ == "__main__":
    rows = []
    dense: dict[str, bytes] = {}
    for model, method, sparsity, net, mask, _ in masks.networks(sys.argv[1] if len(sys.argv) > 1 else None):
        if model not in dense:
            dense[model] = to_onnx(dp.models.build(model, classes=10).eval(), EXAMPLE)
        rows.append(measured(model, method, sparsity, net, mask, dense[model]))
        print(rows[-1]["question"], rows[-1]["ratio"], rows[-1]["macs_ratio"], rows[-1]["latency_ratio"], flush=True)
    measure.write("delivery", rows, "DATA_DIR")
