import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from driveprune.files import read_json, write_json, write_tensors
from driveprune.runs import store
from driveprune.runs.store import (
    DamagedWarning,
    FolderCheckpoints,
    SharedBeginning,
    open_run,
    read_run,
    read_runs,
    read_wanted,
    write_wanted,
)
from tests.report.stores import result
from tests.runs.kills import small_spec


def test_a_folder_belongs_to_one_spec(tmp_path):
    spec = small_spec()
    folder = open_run(tmp_path, spec)
    assert folder == tmp_path / spec.id
    assert read_json(folder / "spec.json") == spec.to_json()
    assert open_run(tmp_path, spec) == folder
    write_json(folder / "spec.json", small_spec(seed=1).to_json())
    with pytest.raises(ValueError, match="holds a run with another spec"):
        open_run(tmp_path, spec)
    (folder / "spec.json").write_text("{")
    with pytest.warns(DamagedWarning, match="written anew"):
        open_run(tmp_path, spec)
    assert read_json(folder / "spec.json") == spec.to_json()


def test_how_runs_stand(tmp_path):
    folders = {name: open_run(tmp_path, small_spec(seed=seed)) for seed, name in enumerate("abcde")}
    write_json(folders["a"] / "result.json", result(0.5))
    (folders["b"] / "error.txt").write_text("Traceback\nValueError: no\n")
    (folders["d"] / "result.json").write_text('{"last": 0.9}')
    lock = store.lock_of(folders["e"])
    with lock:
        found = {run.path: run for run in read_runs([tmp_path])}
    standings = {name: found[folder].standing for name, folder in folders.items()}
    assert standings == {"a": "done", "b": "failed", "c": "unfinished", "d": "damaged", "e": "running"}
    assert found[folders["b"]].error.endswith("ValueError: no")
    assert read_run(folders["e"]).standing == "unfinished"
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        read_runs([tmp_path / "nothing"])


def _with_checksum(content):
    """As a file of somebody else may be: NaN, which is never written here, and a checksum over it."""
    text = json.dumps(content, sort_keys=True)
    return json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def test_a_result_that_makes_no_sense_is_a_damaged_one(tmp_path):
    folder = open_run(tmp_path, small_spec())
    whole = result(0.5)
    odd = [
        {key: value for key, value in whole.items() if key != "last"}, {**whole, "last": "<b>"}, {**whole, "rows": 5},
        {**whole, "rows": ["x"]}, {**whole, "seconds": [1]},
        {**whole, "layers": [{"name": 1, "weights": 1, "kept": 1}]},
        {**whole, "macs": float("nan")}, {**whole, "net_bytes": float("inf")}, {**whole, "last": float("nan")},
        {**whole, "seconds": {"training": None}}, {**whole, "rows": [{"test": 0.5}]}, {**whole, "last": 10**400},
        {**whole, "environment": {}}, {**whole, "collapsed": "no"}, {**whole, "data": None}, {},
    ]  # fmt: skip
    for content in odd:
        (folder / "result.json").write_text(_with_checksum(content))
        assert read_run(folder).standing == "damaged", content
    write_json(folder / "result.json", whole)
    assert read_run(folder).standing == "done"


def test_runs_that_a_sweep_wants_and_nobody_began_are_missing(tmp_path):
    begun, wanted = small_spec(), small_spec(seed=1)
    open_run(tmp_path, begun)
    write_wanted(tmp_path, [begun, wanted], {begun.id: 30, wanted.id: 40})
    assert read_wanted(tmp_path)[wanted.id] == (wanted.to_json(), 40)
    assert {run.path.name: run.standing for run in read_runs([tmp_path])} == {
        begun.id: "unfinished",
        wanted.id: "missing",
    }
    open_run(tmp_path, wanted)
    assert [run.standing for run in read_runs([tmp_path])] == ["unfinished"] * 2
    (path,) = (tmp_path / "sweeps").iterdir()
    path.write_text("{}")
    assert [run.standing for run in read_runs([tmp_path])] == ["unfinished", "unfinished", "damaged"]
    assert read_wanted(tmp_path) == {}


def test_a_damaged_run_keeps_the_spec_that_its_sweep_knows(tmp_path):
    spec = small_spec()
    folder = open_run(tmp_path, spec)
    write_wanted(tmp_path, [spec], {spec.id: 30})
    (folder / "spec.json").write_text("{")
    (run,) = read_runs([tmp_path])
    assert run.standing == "damaged"
    assert run.spec == spec.to_json()


@pytest.mark.parametrize("name", ["spec.json", "result.json", "error.txt", "status.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe{", b"[" * 100_000, b"{}", b"null", None])
def test_no_odd_file_keeps_the_others_from_being_read(name, content, tmp_path):
    whole = open_run(tmp_path, small_spec())
    write_json(whole / "result.json", result(0.5))
    folder = open_run(tmp_path, small_spec(seed=1))
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
    standings = {run.path.name: run.standing for run in read_runs([tmp_path])}
    assert standings[whole.name] == "done"
    assert standings[folder.name] in {"damaged", "failed", "unfinished"}


@pytest.mark.parametrize(
    "change",
    [{"method": ["a"]}, {"method": 5}, {"method_code": None}, {"fingerprint": 5}, {"device": None}, {"official": 1},
     {"recipe": []}, {"recipe": None}],
)  # fmt: skip
def test_a_spec_that_makes_no_sense_is_a_damaged_run(change, tmp_path):
    folder = open_run(tmp_path, small_spec())
    write_json(folder / "spec.json", {**small_spec().to_json(), **change})
    assert read_run(folder).standing == "damaged"


@pytest.mark.parametrize("change", [{"rate": "x"}, {"width": None}, {"images": "x"}, {"model": 3}, {"epochs": True}])
def test_a_recipe_that_makes_no_sense_is_a_damaged_run(change, tmp_path):
    folder = open_run(tmp_path, small_spec())
    spec = small_spec().to_json()
    write_json(folder / "spec.json", {**spec, "recipe": {**spec["recipe"], **change}})
    assert read_run(folder).standing == "damaged"
    without = {key: value for key, value in spec["recipe"].items() if key not in change}
    write_json(folder / "spec.json", {**spec, "recipe": without})
    assert read_run(folder).standing == "damaged"


def test_looking_at_a_store_writes_nothing(tmp_path):
    folder = open_run(tmp_path, small_spec())
    before = sorted(path.name for path in folder.iterdir())
    assert read_run(folder).standing == "unfinished"
    assert sorted(path.name for path in folder.iterdir()) == before
    with store.lock_of(folder):
        assert read_run(folder).standing == "running"


def test_a_damaged_result_is_told_of_and_done_again(tmp_path):
    folder = open_run(tmp_path, small_spec())
    assert store.result_of(folder) is None
    net, path = folder / "net.safetensors", folder / "result.json"
    write_tensors(net, {"a": torch.ones(3)}, {})
    write_json(path, {"last": 0.5})
    assert store.result_of(folder) == {"last": 0.5}
    net.write_bytes(net.read_bytes()[:-1])
    with pytest.warns(DamagedWarning, match="net.safetensors is damaged .*; the run is done again"):
        assert store.result_of(folder) is None
    net.unlink()
    with pytest.warns(DamagedWarning, match="there is no file .*net.safetensors; the run is done again"):
        assert store.result_of(folder) is None
    path.write_text(path.read_text().replace("0.5", "0.9"))
    with pytest.warns(DamagedWarning, match="checksum does not match its content; the run is done again"):
        assert store.result_of(folder) is None


def test_reading_a_store_imports_nothing_named_in_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    folder = open_run(tmp_path / "runs", small_spec())
    content = json.loads((folder / "spec.json").read_text())
    del content["sha256"]
    content |= {"method": "evil", "method_code": "x"}
    content["recipe"] |= {"model": "evil.net", "data": "evil.data"}
    write_json(folder / "spec.json", content)
    assert read_runs([tmp_path / "runs"])[0].spec["method"] == "evil"


def test_the_last_two_states_are_kept(tmp_path):
    checkpoints = FolderCheckpoints(tmp_path)
    assert checkpoints.load() is None
    for number in range(12):
        checkpoints.save({"number": number})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-11.safetensors",
        "checkpoint-12.safetensors",
    ]
    assert checkpoints.load() == {"number": 11}


def test_beginnings_the_longest_that_fits(tmp_path):
    shared = SharedBeginning(tmp_path)
    for steps in (5, 9, 100):
        shared.save(steps, {"steps": steps})

    def best(steps, usable=lambda _: True):
        found = shared.load(steps, usable, making=False)
        return None if found is None else found["steps"]

    assert [best(steps) for steps in (4, 5, 50, 100)] == [None, 5, 9, 100]
    assert best(50, usable=lambda steps: steps < 9) == 5
    (tmp_path / "steps-9.safetensors").write_bytes(b"x")
    with pytest.warns(DamagedWarning, match="made again"):
        assert best(50) == 5


def test_who_makes_a_beginning_holds_the_lock_until_it_is_there(tmp_path):
    first, second = SharedBeginning(tmp_path), SharedBeginning(tmp_path)
    assert first.load(5, lambda _: True, making=True) is None
    with pytest.raises(TimeoutError):
        second.lock.acquire(timeout=0.05)
    first.save(5, {"steps": 5})
    assert second.load(5, lambda _: True, making=True) == {"steps": 5}
    assert not second.lock.is_locked


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["spec.json", "result.json", "status.json", "error.txt", ".lock", "net.safetensors"])
def test_a_file_of_a_run_that_is_a_pipe_or_endless_is_not_waited_for(tmp_path, name):
    spec = small_spec()
    folder = open_run(tmp_path, spec)
    standing = {"spec.json": "damaged", "result.json": "damaged", "error.txt": "damaged"}.get(name, "unfinished")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        assert read_run(folder).standing == standing
        assert read_runs([tmp_path])[0].standing == standing
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


def test_texts_without_end_are_not_read(tmp_path):
    """Files with holes: a terabyte that takes no room on the disk."""
    folder = open_run(tmp_path, small_spec())
    for name in ("status.json", "error.txt"):
        with (folder / name).open("wb") as file:
            file.truncate(1 << 40)
        run = read_run(folder)
        assert run.status is None
        assert run.standing == ("damaged" if name == "error.txt" else "unfinished")
    (folder / "error.txt").unlink()
    with (folder / "spec.json").open("wb") as file:
        file.truncate(1 << 40)
    run = read_run(folder)
    assert run.standing == "damaged"
    assert "spec.json is too long" in run.error


@pytest.mark.parametrize("name", ["spec.json", "result.json", "sweeps/x.json"])
def test_deep_json_of_a_store_names_its_file(tmp_path, name):
    folder = open_run(tmp_path, small_spec())
    path = tmp_path / name if "/" in name else folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("[" * 100_000)
    runs = read_runs([tmp_path])
    assert any(run.standing == "damaged" and path.name in run.error for run in runs)
    (folder / "status.json").write_text("[" * 100_000)
    assert read_run(folder).status is None
