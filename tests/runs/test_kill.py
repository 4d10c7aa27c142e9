"""Runs that are killed, with SIGKILL, at known places and at random moments, end with the same bits."""

import json
import random
import time
from pathlib import Path

import pytest

from driveprune import methods
from driveprune.files import read_state
from driveprune.runs.store import DamagedWarning, FolderCheckpoints, read_run
from tests.runs.kills import Server, assert_same, newest, small_spec

PLACES = [
    ("drive", "early training", 5),
    ("drive", "cut", 3),
    ("drive", "training", 4),
    ("drive", "writing", 7),
    ("drive", "inside evaluation", 2),
    ("imp", "cut", 2),
    ("imp", "rewound", 1),
    ("imp", "rewound", 3),
    ("imp", "writing", 20),
    ("synflow", "cut", 4),
    ("force", "cut", 3),
    ("gmp", "early training", 10),
]


@pytest.mark.parametrize(("method", "place", "at"), PLACES)
def test_a_run_killed_at_a_place_ends_with_the_same_bits(server, whole, tmp_path, method, place, at):
    spec = small_spec(method)
    killed = server.run(tmp_path, spec, place=place, at=at)
    assert killed["code"] == -9
    assert killed["said"] == place  # this is where it died
    folder = tmp_path / spec.id
    assert read_run(folder).standing == "unfinished"
    parts = list(folder.glob(".checkpoint-*.part"))
    assert bool(parts) == (place == "writing")
    if method == "drive" and place in {"cut", "early training"}:
        assert read_state(newest(folder))["pruner"]["held"] is False  # dense still: the whole phase starts again
    assert server.run(tmp_path, spec)["code"] == 0
    assert_same(folder, whole(spec))
    assert not list(folder.glob("checkpoint-*"))
    assert not list(folder.glob(".checkpoint-*"))


def test_a_killed_run_does_not_start_again(server, tmp_path):
    spec = small_spec("imp")
    server.run(tmp_path, spec, place="rewound", at=3)
    state = read_state(newest(tmp_path / spec.id))
    assert state["pruner"]["cycle"] == 2
    again = server.run(tmp_path, spec, place="early training", at=10**6)  # far fewer early steps than that are left
    assert again["code"] == 0


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_used(server, whole, tmp_path, damage):
    spec = small_spec("drive")
    server.run(tmp_path, spec, place="training", at=6)
    folder = tmp_path / spec.id
    path = newest(folder)
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.write_bytes({"truncated": content[:middle], "flipped": flipped, "empty": b""}[damage])
    with pytest.warns(DamagedWarning, match="the state before it is used"):
        state = FolderCheckpoints(folder).load()
    assert state["steps_done"] == int(path.stem.rpartition("-")[2]) - 1
    assert server.run(tmp_path, spec)["code"] == 0
    assert_same(folder, whole(spec))


def test_with_all_checkpoints_damaged_a_run_starts_anew(server, whole, tmp_path):
    spec = small_spec("drive")
    server.run(tmp_path, spec, place="training", at=6)
    for path in (tmp_path / spec.id).glob("checkpoint-*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert server.run(tmp_path, spec)["code"] == 0
    assert_same(tmp_path / spec.id, whole(spec))


def test_a_run_with_a_common_beginning_ends_with_the_same_bits(server, whole, tmp_path):
    """DRIVE makes 1.5 epochs, IMP does not go on from there (its cycle is shorter), dense does."""
    for method in ("drive", "imp", "dense", "magnitude"):
        spec = small_spec(method)
        assert server.run(tmp_path, spec, share=True)["code"] == 0
        assert_same(tmp_path / spec.id, whole(spec))
    folder = tmp_path / "beginnings" / small_spec("drive").beginning
    assert {path.stem for path in folder.glob("*.safetensors")} == {"steps-7", "steps-10"}


def test_a_run_killed_while_it_makes_the_common_beginning(server, whole, tmp_path):
    spec = small_spec("drive")
    assert server.run(tmp_path, spec, place="early training", at=5, share=True)["code"] == -9
    other = small_spec("drive", sparsity=0.95)
    assert server.run(tmp_path, other, share=True)["code"] == 0  # not locked out
    assert server.run(tmp_path, spec, share=True)["code"] == 0
    assert_same(tmp_path / spec.id, whole(spec))
    assert_same(tmp_path / other.id, whole(other))


CAMPAIGN = 22
"""Kills for each method."""


@pytest.mark.slow
def test_200_kills_at_random_moments(server, whole, tmp_path):
    """Over all methods; the count goes to results/kills.json."""
    start, chance = time.time(), random.Random(0)
    kills: dict[str, int] = {}
    for method in (*methods.names(), "dense"):
        spec = small_spec(method)
        reference = whole(spec)
        kills[method] = kill_often(server, tmp_path, spec, reference, chance)
    assert sum(kills.values()) >= 200
    content = {
        "command": "make test-all",
        "what": "runs killed with SIGKILL at random moments that ended with the same bits as runs never killed",
        "kills": kills,
        "sum": sum(kills.values()),
        "different": 0,
        "seconds": round(time.time() - start),
    }
    results = Path(__file__).parents[2] / "results"
    (results / "kills.json").write_text(json.dumps(content, indent=2) + "\n")


def kill_often(server: Server, root: Path, spec, reference: Path, chance: random.Random) -> int:
    """Do a run again and again, each time killed at random until it is through, until there were enough kills."""
    kills = number = 0
    while kills < CAMPAIGN:
        number += 1
        while True:
            every = chance.choice([0.0, 0.02, 0.1])
            end = server.run(root / str(number), spec, every=every, after=chance.uniform(0.05, 1.2))
            if end["code"] == 0:
                break
            assert end["code"] == -9
            kills += 1
        assert_same(root / str(number) / spec.id, reference)
    return kills
