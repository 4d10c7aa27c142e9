"""What the tests that kill runs share: small runs, a server that does them, and comparing what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from driveprune import datasets, netfile, recipes
from driveprune.files import read_json
from driveprune.runs.spec import Spec, make_spec

SMALL = recipes.scaled(recipes.get("demo-digits"), epochs=3, width=0.25, images=400, test_images=100)
KNOBS = {
    "drive": {"early_epochs": 1.5, "cuts": 6},
    "driveflow": {"early_epochs": 1.5, "cuts": 6},
    "imp": {"cycles": 3, "cycle_epochs": 1.0},
    "synflow": {"cuts": 6},
    "force": {"cuts": 6},
    "gmp": {"cuts": 4},
}


def small_spec(method: str = "drive", sparsity: float = 0.9, **options) -> Spec:
    sparsity = 0.0 if method == "dense" else sparsity
    return make_spec(
        SMALL, datasets.load("digits"), method=method, sparsity=sparsity, knobs=KNOBS.get(method), **options
    )


class Server:
    """The forking process of server.py."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )  # fmt: skip

    def run(
        self, root: Path, spec: Spec, *, place: str = "", at: int = 1, every: float = 0.0, share: bool = False,
        after: float | None = None, act: str = "signal", number: int = signal.SIGKILL, pause: float = 0.0,
        faults: dict | None = None,
    ) -> dict:  # fmt: skip
        """Do a run in a process of its own.

        Args:
            place: where `act` is done, as soon as it is reached for the `at`-th time: "signal" sends the signal
                `number`, "fill" fills the disk, "memory" grants no more memory, "clock" sets the clock back.
            after: kill it after so many seconds.
            pause: seconds to wait at each step.
            faults: which call of the system fails, see `faults.Faults`; the run is done as by a sweep's process.

        """
        order = {
            "root": str(root), "spec": spec.to_json(), "place": place, "at": at, "every": every, "share": share,
            "after": after, "act": act, "signal": number, "pause": pause, "faults": faults,
        }  # fmt: skip
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Weights, and the result without times."""
    result = read_json(folder / "result.json")
    for key in ("seconds", "environment"):
        del result[key]
    return netfile.read(folder / "net.safetensors")[0], result


def assert_same(first: Path, second: Path) -> None:
    weights, result = outcome(first)
    others, other = outcome(second)
    assert result == other
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == others[name].dtype
        assert weight.numpy().tobytes() == others[name].numpy().tobytes(), name


def newest(folder: Path) -> Path:
    """The last checkpoint of a run."""
    return max(folder.glob("checkpoint-*.safetensors"), key=lambda path: int(path.stem.rpartition("-")[2]))
