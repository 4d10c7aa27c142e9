"""Every call that changes a store fails once: one clear error or none, nothing lost, and the same bits after."""

import errno
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from driveprune import datasets, netfile, recipes
from driveprune.files import read_json, read_state
from driveprune.runs.spec import make_spec
from driveprune.runs.store import read_run
from tests.runs.kills import assert_same

if not Path("/proc/self/fd").is_dir():
    pytest.skip("files are known by their descriptors as Linux does it", allow_module_level=True)

TINY = recipes.scaled(recipes.get("demo-digits"), epochs=2, width=0.25, images=150, test_images=50)
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)


@pytest.fixture(scope="module")
def spec():
    knobs = {"early_epochs": 1.0, "cuts": 2}
    return make_spec(TINY, datasets.load("digits"), method="drive", sparsity=0.9, knobs=knobs)


@pytest.fixture(scope="module")
def undisturbed(server, spec, tmp_path_factory):
    """The folder of a run in which nothing has failed, and the calls that it has made."""
    root = tmp_path_factory.mktemp("undisturbed")
    done = server.run(root, spec, faults={"at": None})
    assert done["error"] is None
    return root / spec.id, done["calls"]


def fail(server, spec, undisturbed, root, at, number, stays):
    """Have a call fail, look at what is left, and do the run again: what became of it."""
    reference, _ = undisturbed
    found = server.run(root, spec, faults={"at": at, "number": number, "stays": stays})
    folder, error = root / spec.id, found["error"]
    if error is None:
        assert_same(folder, reference)
    else:
        assert os.strerror(number) in error
        assert str(root) in error, error  # which file it was
        assert "\n" not in error
    check_whole(folder, reference, found["saved"])
    again = server.run(root, spec, faults={"at": None})
    assert again["error"] is None
    assert_same(folder, reference)
    left = {path.name for path in folder.iterdir()}
    assert not [name for name in left if name.endswith(".part") or name.startswith(("checkpoint-", "error"))]
    return "went on" if error is None else "failed"


def check_whole(folder: Path, reference: Path, saved: int) -> None:
    """What has a name is whole, and no checkpoint is lost that was kept."""
    if not (folder / "spec.json").exists():
        return
    read_json(folder / "spec.json")
    steps = [read_state(path)["steps_done"] for path in folder.glob("checkpoint-*.safetensors")]
    if (folder / "net.safetensors").exists():
        netfile.read(folder / "net.safetensors")
    for path in folder.parent.glob("beginnings/*/*.safetensors"):
        read_state(path)
    for path in folder.parent.glob("sweeps/*.json"):
        read_json(path)
    if (folder / "result.json").exists():
        assert_same(folder, reference)
    else:
        assert max(steps, default=0) >= saved
        assert read_run(folder).standing in {"failed", "unfinished"}


def test_what_a_run_calls(undisturbed):
    """The shim sees the files that a run leaves, and those that it removes."""
    folder, calls = undisturbed
    seen = {call.split(" ", 1)[1].rpartition("/")[2] for call in calls}
    seen |= {name[1:].rsplit(".", 2)[0] for name in seen if name.endswith(".part")}
    left = {path.name for path in folder.parent.rglob("*") if path.is_file()}
    assert left <= seen
    kinds = Counter(call.partition(" ")[0] for call in calls)
    assert kinds["replace"] > 10
    assert min(kinds["open"], kinds["write"], kinds["fsync"]) > kinds["replace"] / 2
    assert kinds["unlink"] > 5


SAMPLE = 10
"""Places in `make test`; all of them in `make test-all`."""


@pytest.mark.parametrize("place", range(SAMPLE))
def test_a_call_that_fails(server, spec, undisturbed, tmp_path, place):
    calls = len(undisturbed[1])
    at = 1 + (2 * place + 1) * calls // (2 * SAMPLE)
    fail(server, spec, undisturbed, tmp_path, at, ERRORS[place % 3], stays=place % 2 == 0)


@pytest.mark.slow
def test_every_call_fails_once(server, spec, undisturbed, tmp_path):
    """The counts go to results/faults.json."""
    start, calls = time.monotonic(), undisturbed[1]
    became = Counter()
    for at in range(1, len(calls) + 1):
        for stays in (False, True):
            root = tmp_path / f"{at}-{stays}"
            became[fail(server, spec, undisturbed, root, at, ERRORS[at % 3], stays)] += 1
    content = {
        "command": "make test-all",
        "what": "calls that change a store (open, write, fsync, replace, unlink, mkdir, ...) made to fail, each once "
        "alone and once with all after it; then the run is done again",
        "calls": dict(Counter(call.partition(" ")[0] for call in calls)),
        "failed with one error that names the file": became["failed"],
        "went on": became["went on"],
        "lost or different": 0,
        "seconds": round(time.monotonic() - start),
    }
    results = Path(__file__).parents[2] / "results"
    (results / "faults.json").write_text(json.dumps(content, indent=2) + "\n")
