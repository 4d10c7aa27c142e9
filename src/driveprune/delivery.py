"""What pruning gained for whoever ships the network: bytes, multiply-adds, time a call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from driveprune.compact import CompactWarning, compact
from driveprune.export._state import masked_copy
from driveprune.export.onnx import latencies, to_onnx


def gained(model: nn.Module, mask: Mapping[str, Tensor], example: Any, file: Path) -> dict[str, tuple[float, float]]:
    """Numbers of the dense network and of what is left of it.

    Multiply-adds and activations are those of the compacted network; the time of a call is measured in ONNX Runtime,
    if it is installed, dense and compacted in turn.
    """
    dense = masked_copy(model, mask)
    state = {id(value): value for value in dense.state_dict(keep_vars=True).values()}
    found: dict[str, tuple[float, float]] = {
        "bytes of the file": (sum(v.numel() * v.element_size() for v in state.values()), file.stat().st_size),
        "weights": (sum(k.numel() for k in mask.values()), sum(int(k.count_nonzero()) for k in mask.values())),
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CompactWarning)
            small = compact(dense, mask, example)
    except (ValueError, CompactWarning):  # a network that cannot be followed
        return found
    gains: Any = small.gains
    if gains.macs[0] is not None and gains.macs[1] is not None:
        found["multiply-adds of the compacted network"] = gains.macs
    found["bytes of activations"] = gains.activations
    if find_spec("onnxruntime") and find_spec("onnxscript"):
        with contextlib.suppress(ValueError):  # a network that ONNX cannot take has no time there
            seconds = latencies({"dense": to_onnx(dense, example), "small": to_onnx(small, example)}, example)
            found["milliseconds a call, ONNX Runtime, batch 1"] = (1e3 * seconds["dense"], 1e3 * seconds["small"])
    return found
