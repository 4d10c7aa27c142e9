"""What the tests of the report page share: stores made of numbers, and a real browser without a window."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock
from playwright.sync_api import Browser, sync_playwright

from driveprune import datasets, recipes
from driveprune.files import checked_json
from driveprune.recipes import Recipe
from driveprune.runs.spec import Spec, make_spec

SPARSITIES = (0.9, 0.95, 0.98, 0.993)
EVIL = '<img src=x onerror="alert(1)">&amp;</script><script>alert(2)</script>'
"""Shown as text, wherever it stands."""
_QUALITY = {"dense": 0.0, "imp": 0.004, "drive": 0.008, "synflow": 0.013, "snip": 0.015, "random": 0.08}
_PRUNING = {"dense": 0.0, "imp": 21000.0, "drive": 430.0, "synflow": 6.1, "snip": 2.9, "random": 0.02}
_LAYERS = [(f"features.{3 * i}.weight", 1000 * (i + 1) ** 2) for i in range(13)] + [("classifier.weight", 5120)]


def result_of(spec: Spec, *, top: float = 0.94, epochs: int = 50, collapsed: bool = False) -> dict:
    """A result as a training could have given it; the same for the same spec."""
    chance = random.Random(spec.id)
    name = spec.method if spec.method in _QUALITY else "drive"
    loss = _QUALITY[name] * (1 + 1.4 * math.log10(max(1.0, 0.1 / (1 - spec.sparsity)))) * (4 if spec.check else 1)
    last = 0.1 if collapsed else top - loss + chance.gauss(0, 0.0012)
    curve = [round(last - (0 if collapsed else 0.5 * math.exp(-6 * e / epochs)), 4) for e in range(1, epochs)] + [
        last
    ]
    pruning = _PRUNING[name] * chance.uniform(0.97, 1.03)
    early = {"imp": 1.0, "drive": 0.8}.get(name, 0.0) * pruning
    measured = {"speedup": 1 + 20 * (spec.sparsity - 0.85)} if spec.recipe.data == "digits" and spec.sparsity else {}
    return {
        **measured,
        "id": spec.id, "data": spec.recipe.data, "last": last, "best": max(curve), "best_by": "test", "holdout": None,
        "rows": [
            {"cycle": 0, "epoch": e, "rate": 0.1, "loss": 1.0, "sparsity": spec.sparsity, "test": value}
            for e, value in enumerate(curve, 1)
        ],
        "seconds": {
            "loading": 60.0, "early training": early, "scoring": (pruning - early) * 0.9,
            "selection": (pruning - early) * 0.1, "training": 7200.0, "evaluation": 310.0, "pruning": pruning,
        },
        "sparsity": spec.sparsity, "effective_sparsity": 1.0 if collapsed else 1 - (1 - spec.sparsity) * 0.93,
        "collapsed": collapsed, "macs": 1_000_000, "dense_macs": 9_000_000,
        "net_bytes": round(200_000 + 59_000_000 * (1 - spec.sparsity) * 1.1) if spec.sparsity else 59_000_000,
        "layers": [
            {"name": layer, "shape": [size], "weights": size, "kept": _kept(name, place, spec.sparsity, size)}
            for place, (layer, size) in enumerate(_LAYERS)
        ],
        "environment": {
            "versions": {"python": "3.11.7", "driveprune": "0.1.0", "torch": "2.13.0"},
            "machine": {"system": "Linux", "processor": "x86_64", "cores": 2}, "date": "2026-11-16",
        },
    }  # fmt: skip


def _kept(name: str, place: int, sparsity: float, weights: int) -> int:
    lean = {"snip": 0.28, "imp": 0.1, "synflow": 0.16, "drive": 0.12}.get(name, 0.0)
    return round(weights * min(1.0, (1 - sparsity) * 3 * math.exp(-lean * place)))


def write_run(root: Path, spec: dict, result: dict | None = None, *, name: str | None = None) -> Path:
    """A run's folder, without waiting for the disk."""
    folder = root / (name or (result or {}).get("id") or Spec.from_json(spec).id)
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(checked_json(spec, indent=1) + "\n")
    if result is not None:
        (folder / "result.json").write_text(checked_json(result))
    return folder


def write_group(
    root: Path,
    recipe: Recipe,
    methods: tuple[str, ...],
    seeds: int,
    *,
    top: float = 0.94,
    epochs: int = 50,
    **options,
) -> list[Path]:
    """The runs of some methods at the paper's sparsities; snip has no path left at the highest."""
    data = datasets.load("digits")
    specs = [
        make_spec(recipe, data, method=method, sparsity=sparsity, seed=seed, **options)
        for method in methods
        for sparsity in ((0.0,) if method == "dense" else SPARSITIES)
        for seed in range(seeds)
    ]
    return [
        write_run(root, spec.to_json(), result_of(
            spec, top=top, epochs=epochs, collapsed=(spec.method, spec.sparsity) == ("snip", 0.993)
        ))
        for spec in specs
    ]  # fmt: skip


def write_store(root: Path) -> Path:
    """Three groups that are done, runs that are not, and names that try to be HTML."""
    data = datasets.load("digits")
    vgg, resnet = recipes.get("paper-vgg16-cifar10"), recipes.get("paper-resnet18-cifar100")
    digits = recipes.get("demo-digits")
    write_group(root, vgg, ("dense", "imp", "snip", "synflow", "drive"), 2)
    write_group(root, resnet, ("dense", "imp", "synflow", "drive"), 3, top=0.66)
    write_group(root, digits, ("dense", "random", "drive"), 1, top=0.99, epochs=12)
    write_group(root, digits, ("drive",), 1, top=0.98, epochs=12, knobs={"cuts": 3})
    write_group(root, digits, ("drive",), 1, top=0.99, epochs=12, check="shuffle")
    _write_odd(root, vgg, data)
    return root


def _write_odd(root: Path, recipe: Recipe, data) -> None:
    """Failed, damaged, not finished; and the evil names."""
    failed = write_run(root, make_spec(recipe, data, method="drive", sparsity=0.9, seed=7).to_json())
    (failed / "error.txt").write_text(f"Traceback\nValueError: {EVIL}")
    stopped = write_run(root, make_spec(recipe, data, method="snip", sparsity=0.9, seed=8).to_json())
    (stopped / "status.json").write_text(json.dumps({"step": 1200, "steps": 4000, "work": "training", "values": []}))
    damaged = write_run(root, make_spec(recipe, data, method="snip", sparsity=0.9, seed=9).to_json())
    (damaged / "spec.json").write_text("{")
    spec = make_spec(recipe, data, method="drive", sparsity=0.98)
    evil = spec.to_json()
    evil["method"] = f"mine{EVIL}"
    evil["recipe"]["model"] = f"net{EVIL}"
    evil["model_code"] = evil["method_code"] = "ab" * 32
    result = {**result_of(spec), "data": EVIL, "id": "x"}
    result["layers"][0]["name"] = EVIL
    write_run(root, evil, result, name="<img src=x onerror=alert(3)> 'quoted'")


def chromium() -> str:
    """Debian's browser, installed if it is missing and we may; else the test is skipped with the reason."""
    names = ("chromium", "chromium-browser", "google-chrome")
    with FileLock(Path(tempfile.gettempdir()) / "driveprune-chromium.lock"):
        if not any(map(shutil.which, names)):
            _install()
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        pytest.skip("there is no chromium, and it could not be installed with apt-get")
    return found


def _install() -> None:
    if not shutil.which("apt-get"):
        return
    before = [] if os.geteuid() == 0 else ["sudo", "-n"]
    command = [*before, "apt-get", "install", "-y", "--no-install-recommends", "chromium"]
    try:
        subprocess.run(command, check=False, capture_output=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired):
        return


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser without a GPU; as root it needs to be told that there is no sandbox."""
    path, words = chromium(), ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=words)
        yield started
        started.close()
