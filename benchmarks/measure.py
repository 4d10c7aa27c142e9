"""Ratios of interleaved runs, and results that say where they come from."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from driveprune.bench import fastest, interleaved
from driveprune.runs.job import processor
from driveprune.sparse.code import LANES

__all__ = ["RESULTS", "each", "fastest", "interleaved", "machine", "ratio", "write"]

RESULTS = Path(__file__).parent.parent / "results"


def ratio(seconds: dict[str, list[float]], job: str, to: str) -> float:
    """A job's time as a multiple of another's: of each, the mean of the fastest third of the rounds.

    What else runs on the machine only ever makes a round slower, and on a shared one by more than what is measured
    here; the fastest rounds are those that were disturbed least.
    """
    return fastest(seconds[job]) / fastest(seconds[to])


def each(seconds: dict[str, list[float]]) -> dict[str, float]:
    """What the ratios are made of, and the medians."""
    found = {f"{name}_s": round(fastest(values), 4) for name, values in seconds.items()}
    return found | {f"{name}_median_s": round(statistics.median(values), 4) for name, values in seconds.items()}


def machine() -> dict[str, object]:
    packages = ("driveprune", "torch", "numpy", "numba", "onnxruntime", "openvino")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "vector_bits": 32 * LANES,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages if find_spec(name)},
    }


def write(name: str, rows: list[dict[str, object]], arguments: str | None = None) -> None:
    """Write results/NAME.json, and print the rows; exit code 1 if a limit is missed."""
    arguments = " ".join(sys.argv[1:]) if arguments is None else arguments
    command = f"python benchmarks/{Path(sys.argv[0]).name} {arguments}".strip()
    RESULTS.mkdir(exist_ok=True)
    content = {"command": command, "machine": machine(), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    for row in rows:
        print(row)
    missed = [row for row in rows if row.get("holds") is False]
    if missed:
        raise SystemExit(f"{len(missed)} limits missed")
