"""A foreign store: whatever its files say, its runs are read and shown; nothing of it raises, runs or is written."""

from __future__ import annotations

import io
import json
import os
import shutil
from functools import cache
from pathlib import Path
from random import Random

from driveprune.cli.printed import print_report
from driveprune.report.groups import groups
from driveprune.report.live import screen
from driveprune.report.page import page
from driveprune.runs.spec import Spec
from driveprune.runs.store import read_runs, read_status, read_wanted, write_wanted
from driveprune.screen import Screen
from tests.fuzz.mutations import mutated_bytes, mutated_json, sealed_json
from tests.report import stores

STATUS = {"step": 3, "steps": 9, "work": "training", "values": [0.5, 0.6], "time": 1e9, "began": 9e8, "began_step": 1}
MARK = b"\0\0"
"""Between the name of a file and its content."""


def honest(folder: Path) -> list[bytes]:
    """Each file of a store; the others stay as they are."""
    root = _whole(folder)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return [str(path.relative_to(root)).encode() + MARK + path.read_bytes() for path in files]


@cache
def _whole(folder: Path) -> Path:
    root = folder / "whole"
    runs = [stores.run("snip", 0.9, 0.9), stores.run("imp", 0.9, 0.8), stores.unfinished("drive", 0.9, "unfinished")]
    stores.write(root, [*runs, stores.unfinished("dense", 0.0, "failed", error="Traceback\nno luck")])
    (root / runs[2].path.name / "status.json").write_text(json.dumps(STATUS))
    specs = [Spec.from_json(each.spec) for each in runs]
    write_wanted(root, specs, {spec.id: 9 for spec in specs})
    return root


def mutated(data: bytes, chance: Random) -> bytes:
    name, _, content = data.partition(MARK)
    if chance.random() < 0.3 or not name.endswith(b".json"):
        return name + MARK + mutated_bytes(content, chance)
    odd = mutated_json(json.loads(content), chance)
    return name + MARK + (json.dumps(odd).encode() if name.endswith(b"status.json") else sealed_json(odd))


def target(data: bytes, folder: Path) -> None:
    name, _, content = data.partition(MARK)
    root = folder / "store"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(_whole(folder.parent / "honest" / folder.name), root)
    (root / os.fsdecode(name)).write_bytes(content)
    before = _state(root)
    runs = read_runs([root])
    assert {run.standing for run in runs} <= {"done", "running", "unfinished", "failed", "damaged", "missing"}
    made = groups(runs)
    said = io.StringIO()
    console = Screen(file=said, width=100)
    print_report(runs, console)
    console.print(screen(runs, {name: steps for name, (_, steps) in read_wanted(root).items()}, now=1e9 + 5))
    if data[-1] % 8 == 0:  # a page takes most of the time
        assert "<img" not in page(made)
    for run in runs:
        read_status(run.path)
    assert not set("\x1b\x07\x9b\u202e\u2066") & set(said.getvalue())
    assert _state(root) == before
    if any(run.standing == "damaged" for run in runs):
        raise ValueError("damaged")


def _state(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}
