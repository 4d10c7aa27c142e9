"""Sweeps on a Ray cluster: each run is a task, and what a lost worker had begun goes on elsewhere.

All nodes must see the folder of all runs under the same path, and its file system must know locks (`flock`).
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from driveprune.files import open_log
from driveprune.runs import worker
from driveprune.runs.spec import Spec
from driveprune.runs.store import is_locked, read_wanted
from driveprune.runs.sweep import Hire

LOCAL = "local"
"""The address of a cluster that is started for the sweep, on this machine."""

PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_gcs_rpc_server_connect_timeout_s": "120",
    "RAY_gcs_server_request_timeout_seconds": "120",
    "RAY_worker_niceness": "0",
}
"""How long Ray waits for its own processes, of which it expects an idle machine: 30, 5 and 60 seconds. And its
workers are as important as other processes: with their niceness of 15, a busy one would leave them 3% of a core.
"""


def cluster(
    address: str = LOCAL, *, cpus_per_run: float | None = None, gpus_per_run: float | None = None, retries: int = 3
) -> Hire:
    """Those who do the runs of a sweep on a Ray cluster: `sweep(..., hire=cluster())`.

    Args:
        address: of a running cluster, as HOST:PORT, or "auto" on one of its nodes; "local" starts one here.
        cpus_per_run: CPUs that Ray sets aside for a run; by default its threads. It does not change the threads.
        gpus_per_run: GPUs, by default 1 for runs on CUDA; 0.25 puts four runs on each.
        retries: how often a run goes on after its worker was lost, before it has failed.

    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise ImportError("ray is needed for a sweep on a cluster: pip install 'driveprune[ray]'") from None
    if retries < 0:
        raise ValueError(f"retries must be at least 0, got {retries}")
    for name, value in (("cpus_per_run", cpus_per_run), ("gpus_per_run", gpus_per_run)):
        if value is not None and value < 0:
            raise ValueError(f"{name} must be at least 0, got {value:g}")
    if gpus_per_run is not None and gpus_per_run > 1 and gpus_per_run != int(gpus_per_run):
        raise ValueError(f"gpus_per_run must be a part of one or a whole number, got {gpus_per_run:g}")

    terms = _Terms(address, cpus_per_run, gpus_per_run, retries)
    return lambda root, specs, order: _Cluster(ray, terms, root.resolve(), specs, order)


@dataclass(frozen=True)
class _Terms:
    """Where the runs are done, and what each is given."""

    address: str
    cpus_per_run: float | None
    gpus_per_run: float | None
    retries: int

    def cpus(self, specs: Sequence[Spec]) -> float:
        return max(spec.threads for spec in specs) if self.cpus_per_run is None else self.cpus_per_run

    def gpus(self, specs: Sequence[Spec]) -> float:
        on_gpu = any(spec.device.startswith("cuda") for spec in specs)
        return float(on_gpu) if self.gpus_per_run is None else self.gpus_per_run


class _Cluster:
    """The tasks of a sweep. Ray starts one wherever there is room, and again if its worker or node is lost."""

    def __init__(self, ray: Any, terms: _Terms, root: Path, specs: Sequence[Spec], order: Mapping[str, Any]) -> None:
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.active: set[str] = set()
        self._ray, self._terms, self._root, self._specs = ray, terms, root, specs
        folder = order["data_dir"]
        self._order = {**order, "data_dir": None if folder is None else str(Path(folder).resolve())}
        self._runs: dict[Any, str] = {}
        self._log = open_log(root / "workers.log")
        self._stdout: TextIO | None = None
        self._ours = False
        self._temporary: Path | None = None

    def start(self) -> None:
        if not self._specs:
            return
        self._stdout, sys.stdout = sys.stdout, self._log  # where Ray prints that a worker was lost
        cpus, gpus = self._terms.cpus(self._specs), self._terms.gpus(self._specs)
        self._connect()
        self._check_room(cpus, gpus)
        task = self._ray.remote(_do).options(num_cpus=cpus, num_gpus=gpus, max_retries=self._terms.retries)
        here = os.getcwd()
        for spec in self._specs:
            reference = task.remote(str(self._root), {"spec": spec.to_json(), **self._order}, here)
            self._runs[reference] = spec.id

    def is_working(self) -> bool:
        """Take down what has ended, and see who is working."""
        if not self._runs:
            return False
        ended, _ = self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0)
        for reference in ended:
            self._end(self._runs.pop(reference), reference)
        begun = {path.name for path in self._root.iterdir()}
        self.active = {name for name in self._runs.values() if name in begun and is_locked(self._root / name)}
        return bool(self._runs)

    def _end(self, name: str, reference: Any) -> None:
        try:
            error = self._ray.get(reference)["error"]
        except self._ray.exceptions.RayTaskError as failed:
            error = f"{type(failed.cause).__name__}: {failed.cause}"
        except self._ray.exceptions.RayError as lost:
            why = str(lost).strip().partition("\n")[0]
            error = f"its worker was lost, and so were those of {self._terms.retries} retries: {why}"
        if error is None:
            self.done.append(name)
        else:
            self.failed[name] = error

    def stop(self) -> None:
        """End all tasks; their runs go on from the last checkpoint next time."""
        for reference in self._runs:
            self._ray.cancel(reference, force=True)
        if self._runs:
            self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=10)

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()
        if self._stdout is not None and sys.stdout is self._log:
            sys.stdout = self._stdout
        self._log.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _connect(self) -> None:
        """Join the cluster, or start one that writes only to a folder of its own and tells nobody about itself."""
        if self._ray.is_initialized():
            return
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        if self._terms.address == LOCAL:
            environment |= PATIENT
            short = "/tmp" if Path("/tmp").is_dir() else None  # the path of a socket has about 100 letters at most
            self._temporary = Path(tempfile.mkdtemp(prefix="ray-", dir=short))
            options |= {"include_dashboard": False, "_temp_dir": str(self._temporary)}
            options["object_store_memory"] = 100 << 20  # results are small
        else:
            _check_reachable(self._terms.address)
        self._ours = True
        with _environment(**environment):
            self._ray.init(self._terms.address, **options)

    def _check_room(self, cpus: float, gpus: float) -> None:
        """Say so if no node has room for a run: it would wait forever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            return
        found = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        said = f"no node has {cpus:g} CPUs and {gpus:g} GPUs for a run: there are {found}"
        if self._temporary is not None:
            raise ValueError(said)
        warnings.warn(f"{said}; the runs wait for one", stacklevel=2)


def _check_reachable(address: str) -> None:
    """An error at once if nobody answers at HOST:PORT: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ConnectionError(f"there is no Ray cluster at {address}: {error}") from None


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Variables for the processes that are started meanwhile; those that are set already stay as they are."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def _do(root: str, order: dict[str, Any], here: str) -> dict[str, Any]:
    """Do a run, in a worker of Ray on any node."""
    name = Spec.from_json(order["spec"]).id
    if name not in read_wanted(Path(root)):
        return {"id": name, "error": f"the node {platform.node()} does not see {root}: all nodes must share it"}
    with suppress(OSError):
        os.chdir(here)  # for data and code that are named from there
    with warnings.catch_warnings():
        # A lock that the system does not release when its holder is killed would never be free again.
        warnings.filterwarnings("error", message="flock not supported")
        return worker.do(Path(root), order)
