"""Carrying out one run: from its spec to a trained sparse network and a result."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import torch
from filelock import FileLock, Timeout
from torch import nn

from driveprune import collectives, models
from driveprune.batches import Data
from driveprune.engine import EngineName
from driveprune.export import Pixels
from driveprune.files import write_json
from driveprune.fit import fit, has_convolutions, sources
from driveprune.mask import Mask
from driveprune.netfile import save
from driveprune.runs.spec import DENSE, Spec
from driveprune.runs.store import (
    FolderCheckpoints,
    SharedBeginning,
    acquire,
    forget_parts,
    lock_of,
    open_run,
    reserve_room,
    result_of,
    write_error,
    write_status,
)
from driveprune.runs.trust import check_trusted
from driveprune.seeds import seed_for
from driveprune.summary import Summary, summary
from driveprune.train import Beginning, Moment, Stop, Stopped, Trained, never

Watch = Callable[[Moment], None]


def carry_out(
    root: Path,
    spec: Spec,
    data: Data,
    *,
    share: bool = False,
    wait: bool = False,
    every: float = 60.0,
    engine: EngineName = "dense",
    trust: bool = False,
    watch: Watch = lambda _: None,
    stop: Stop = never,
) -> dict[str, Any]:
    """Do a run, or go on with it, or do nothing if it is done; what came of it is returned.

    If the spec says so, several ranks call this together; the first one reads and writes the run's folder.

    Args:
        root: the folder of all runs.
        spec: what the run is.
        data: the data that the spec names.
        wait: if another process is working on this run, wait for it instead of raising.
        share: keep the dense beginning, or take it over from another run.
        every: seconds between checkpoints.
        engine: what computes after a cut; it is no part of what the run is, and another one may go on with it.
        trust: import what the spec names though it is not of this package and no checksum in the spec proves it.
        watch: called after each step.
        stop: whether to stop; then a checkpoint is written first, and `Stopped` is raised.

    """
    check_trusted(spec, trust, has_data=True)
    if data.fingerprint != spec.fingerprint:
        raise ValueError(f"the data {data.label} are not those of the run {spec.id}: they have changed")
    if spec.ranks != collectives.size():
        raise ValueError(
            f"the run {spec.id} is for {spec.ranks} processes, got {collectives.size()}: "
            f"use torchrun --nproc-per-node {spec.ranks}"
        )
    folder = root / spec.id
    locks: list[FileLock] = []
    try:
        done = collectives.from_first(lambda: _opened(root, spec, locks, wait, stop))
        return _carried_out(root, folder, spec, data, share, every, engine, watch, stop) if done is None else done
    finally:
        for lock in locks:
            lock.release()


def _opened(root: Path, spec: Spec, locks: list[FileLock], wait: bool, stop: Stop) -> dict[str, Any] | None:
    """Take the lock of a run; what came of it if it is done, which a store that cannot be written tells, too."""
    folder = open_run(root, spec)
    try:
        locks.append(lock := lock_of(folder))
        if wait:
            acquire(lock, lambda: _check_not(stop))
        else:
            lock.acquire(timeout=3)  # who only looks at the store holds it for a moment
    except Timeout:
        raise BlockingIOError(f"another process is working on {folder}") from None
    except OSError:
        if (done := result_of(folder)) is not None:
            return done
        raise
    if (done := result_of(folder)) is not None:
        with suppress(OSError):  # what a process has left that was killed between its result and its end
            FolderCheckpoints(folder).clear()
        return done
    forget_parts(folder)
    reserve_room(folder)
    return None


def _check_not(stop: Stop) -> None:
    if stop():
        raise Stopped


def _carried_out(
    root: Path,
    folder: Path,
    spec: Spec,
    data: Data,
    share: bool,
    every: float,
    engine: EngineName,
    watch: Watch,
    stop: Stop,
) -> dict[str, Any]:
    collectives.from_first(lambda: (folder / "error.txt").unlink(missing_ok=True))
    checkpoints = FolderCheckpoints(folder)
    told = _Status(folder, watch, stop)
    beginning = SharedBeginning(root / "beginnings" / spec.beginning, wait=told.wait) if share else None
    try:
        with _threads(spec.threads):
            model = build_model(spec, data)
            trained = _train(model, spec, data, checkpoints, every, beginning, engine, told, stop)
            result = collectives.from_first(lambda: _result(folder, spec, data, model, trained))
    except Exception as error:
        if isinstance(error, MemoryError) and not error.args:  # as Python raises it
            error.args = ("there is no memory left",)
        if str(error) == "could not create a primitive":  # as oneDNN says it
            error.args = ("could not create a primitive: there may be no memory left",)
        if not (folder / "error.txt").exists():  # the rank that failed first tells why
            write_error(folder, traceback.format_exc())
        raise
    finally:
        if beginning is not None:
            beginning.release()
    if collectives.is_first():
        checkpoints.clear()
    return result


def build_model(spec: Spec, data: Data) -> nn.Module:
    """The network of a run with its initial weights, which depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(spec.seed, "init"))
        model = models.build(**network_of(spec, data))
    return model.to(spec.device)


def network_of(spec: Spec, data: Data) -> dict[str, Any]:
    """What `models.build` needs to make the network of a run again."""
    shape = data.train.x.shape
    return {
        "name": spec.recipe.model, "classes": len(data.classes), "width": spec.recipe.width, "inputs": shape[1],
        "size": shape[2],
    }  # fmt: skip


def steps_per_epoch(spec: Spec, data: Data) -> int:
    """How many steps of the optimiser an epoch of a run has."""
    return len(sources(data, spec.recipe, holdout=spec.holdout, seed=spec.seed, device="cpu")[0])


def _train(
    model: nn.Module,
    spec: Spec,
    data: Data,
    checkpoints: FolderCheckpoints,
    every: float,
    beginning: Beginning | None,
    engine: EngineName,
    watch: Watch,
    stop: Stop,
) -> Trained:
    return fit(
        model, data, method=spec.plan(steps_per_epoch(spec, data)), sparsity=spec.sparsity, recipe=spec.recipe,
        budget=spec.budget, holdout=spec.holdout, precision=spec.precision,
        engine=engine if spec.method != DENSE else "dense",  # which a sweep may name for its other runs
        channels_last=spec.channels_last and has_convolutions(model),  # which is what a command says of all networks
        seed=spec.seed, checkpoints=checkpoints, every=every, beginning=beginning, watch=watch,
        stop=stop,
    )  # fmt: skip


def _result(folder: Path, spec: Spec, data: Data, model: nn.Module, trained: Trained) -> dict[str, Any]:
    """Write the network, then the result: a run with a result is done."""
    table = _summary(model, trained.mask, data, spec)
    effective = table.effective_sparsity
    about = {key: value for key, value in spec.to_json().items() if key != "recipe"}
    about |= {"run": spec.id, "network": network_of(spec, data), "effective_sparsity": effective, **environment()}
    about["images"] = Pixels(data.mean, data.deviation, data.classes).to_json()
    save(folder / "net.safetensors", model, trained.mask, provenance=about, follow=False)
    result = {
        "id": spec.id,
        "data": data.label,
        "last": trained.last("test"),
        "best": trained.best("test"),
        "best_by": "holdout" if spec.holdout else "test",
        "holdout": trained.last("holdout"),
        "rows": trained.rows,
        "seconds": trained.seconds,
        "engine": trained.engine,
        "speedup": trained.speedup,
        "sparsity": table.sparsity,
        "effective_sparsity": effective,
        "collapsed": effective == 1.0,
        "macs": table.macs,
        "dense_macs": table.dense_macs,
        "macs_examples": 1,
        "net_bytes": (folder / "net.safetensors").stat().st_size,
        "layers": [
            {"name": layer.name, "shape": list(layer.shape), "weights": layer.weights, "kept": layer.kept}
            for layer in table.layers
        ],
        "environment": environment(),
    }
    write_json(folder / "result.json", result, follow=False)
    return result


def _summary(model: nn.Module, mask: Mask, data: Data, spec: Spec) -> Summary:
    """The layers; with paths and multiply-adds if the network can be followed."""
    batches, _ = sources(data, spec.recipe, holdout=spec.holdout, seed=spec.seed, device=spec.device)
    example = next(iter(batches))[0][:1]
    try:
        return summary(mask, model, example)
    except Exception:  # a network that cannot be followed is a network all the same
        return summary(mask)


def environment() -> dict[str, Any]:
    """Where a result comes from: versions and machine."""
    packages = ("driveprune", "torch", "numpy", "numba")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "model": processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def processor_here() -> str:
    """The processor and its instructions, as they stand beside what was computed or measured."""
    return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"


def processor() -> str:
    """The processor's name as the system has it: results are the same to the last bit only on the same kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(found, platform.processor() or "unknown")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run on a number of threads: the results depend on it to the last bit."""
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, before[1]))
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])


class _Status:
    """Passes each moment on, keeps status.json not older than a second, and says in it at once where work began.

    How long that is ago does not depend on the clock, which may be set meanwhile.
    """

    def __init__(self, folder: Path, watch: Watch, stop: Stop) -> None:
        self._folder, self._watch, self._stop, self._written = folder, watch, stop, float("-inf")
        self._began: tuple[float, int] | None = None

    def __call__(self, moment: Moment) -> None:
        now = time.monotonic()
        begins = bool(moment.steps) and self._began is None
        if begins:
            self._began = now, moment.step
        if begins or now - self._written > 1:
            write_status(self._folder, self._known(moment, now))
            self._written = now
        self._watch(moment)

    def _known(self, moment: Moment, now: float) -> dict[str, Any]:
        values = [row["test"] for row in moment.rows if "test" in row]
        known = {"step": moment.step, "steps": moment.steps, "work": moment.work, "values": values}
        clock = time.time()
        if self._began is None:
            return {**known, "time": clock}
        began, step = self._began
        return {**known, "time": clock, "began": clock - (now - began), "began_step": step}

    def wait(self) -> None:
        """Say that the run waits for a beginning that another one is making."""
        _check_not(self._stop)
        self(Moment(0, 0, "waiting for the common beginning", []))
