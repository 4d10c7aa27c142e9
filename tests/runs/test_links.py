"""Nothing is written through links inside a store, whatever file it is."""

import errno
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest

from driveprune import datasets
from driveprune.files import open_log, overwrite, own_folder
from driveprune.runs import worker
from driveprune.runs.job import carry_out
from driveprune.runs.store import DamagedWarning, reserve_room, write_error, write_status, write_wanted
from tests.runs.kills import assert_same, small_spec

CONTENT = b"what somebody else has written\n"


@pytest.fixture(scope="module")
def names(server, tmp_path_factory):
    """All files that a run makes on its way and leaves, and those of its store; found by doing one."""
    root, spec = tmp_path_factory.mktemp("names"), small_spec()
    found: set[Path] = set()
    for place, number in (("training", signal.SIGKILL), ("", 0)):
        server.run(root, spec, place=place, at=4, number=number, share=True)
        found |= {path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != ".part"}
    found |= {Path("workers.log"), Path(spec.id, "log.txt"), Path(spec.id, "error.txt"), Path(spec.id, ".error.txt")}
    found |= {Path(spec.id, ".status.json.part")}  # of older versions
    assert len(found) > 12
    return sorted(found)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "hard link"])
def test_files_that_links_lead_to_stay_as_they_are(server, whole, names, tmp_path, kind):
    spec, elsewhere, root = small_spec(), tmp_path / "elsewhere", tmp_path / "runs"
    targets = {}
    for number, name in enumerate(names):
        target = targets[name] = elsewhere / str(number)
        for path in (target, root / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        if kind != "link to nothing":
            target.write_bytes(CONTENT)
        os.link(target, root / name) if kind == "hard link" else (root / name).symlink_to(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedWarning)
        write_wanted(root, [spec], {spec.id: 10})
        stopped = server.run(root, spec, place="training", at=4, number=signal.SIGTERM, share=True)
        assert stopped["code"] == 143
        order = {"spec": spec.to_json(), "data_dir": None, "share": True, "every": 0.0, "engine": "dense"}
        assert worker.do(root, order)["error"] is None
    open_log(root / "workers.log").close()
    assert_same(root / spec.id, whole(spec))
    for target in targets.values():
        assert (target.read_bytes() if target.exists() else None) == (None if "nothing" in kind else CONTENT)
    for name in ("spec.json", "result.json", "net.safetensors", "status.json", "log.txt", ".lock"):
        assert not (root / spec.id / name).is_symlink()


def write_and_carry_out(root, spec):
    write_wanted(root, [spec], {spec.id: 10})
    carry_out(root, spec, datasets.load("digits"), share=True)


@pytest.mark.parametrize("name", ["ID", "sweeps", "beginnings", "beginnings/KEY"])
def test_a_folder_of_a_store_that_is_a_link_is_an_error(tmp_path, name):
    spec, elsewhere, root = small_spec(), tmp_path / "elsewhere", tmp_path / "runs"
    elsewhere.mkdir()
    path = root / name.replace("ID", spec.id).replace("KEY", spec.beginning)
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    said = f"{path} is a link to {elsewhere}, and nothing is written there"
    with pytest.raises(ValueError, match=said):
        write_and_carry_out(root, spec)
    assert list(elsewhere.iterdir()) == []


def test_the_store_itself_may_be_a_link(server, whole, tmp_path):
    """The user has named it."""
    spec = small_spec("snip")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "elsewhere")
    assert server.run(tmp_path / "runs", spec, share=True)["code"] == 0
    assert_same(tmp_path / "elsewhere" / spec.id, whole(spec))


def harmed(folder: Path, kind: str) -> Path:
    """A file x in a folder that is something else than a file of its own; where it leads to."""
    path, target = folder / "x", folder / "target"
    target.write_bytes(CONTENT)
    match kind:
        case "link":
            path.symlink_to(target)
        case "hard link":
            os.link(target, path)
        case "pipe":
            os.mkfifo(path)
    return target


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_log_is_a_file_of_its_own(tmp_path, kind):
    target = harmed(tmp_path, kind)
    for line in ("a\n", "b\n"):
        with open_log(tmp_path / "x") as log:
            log.write(line)
    assert target.read_bytes() == CONTENT
    assert (tmp_path / "x").read_text() == "a\nb\n"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        open_log(tmp_path / "folder")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_nothing_else_is_overwritten(tmp_path, kind):
    target = harmed(tmp_path, kind)
    with pytest.raises((OSError, ValueError), match=r"/x"):
        overwrite(tmp_path / "x", b"1")
    assert target.read_bytes() == CONTENT


def test_overwriting_keeps_the_end(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b" " * 8)
    overwrite(path, b"0123456789")
    assert path.read_bytes() == b"23456789"
    overwrite(path, b"abc")
    assert path.read_bytes() == b"abc"


@pytest.mark.parametrize("kind", ["link", "hard link"])
def test_status_and_error_take_the_place_of_a_link(tmp_path, kind):
    target = harmed(tmp_path, kind)
    for name in ("status.json", "error.txt", ".error.txt", ".status.json.part"):
        shutil.copy2(tmp_path / "x", tmp_path / name, follow_symlinks=False) if kind == "link" else os.link(
            target, tmp_path / name
        )
    reserve_room(tmp_path)
    write_status(tmp_path, {"step": 1, "values": [float("nan")]})
    write_error(tmp_path, "Traceback\nOSError: no\n")
    assert target.read_bytes() == CONTENT
    assert (tmp_path / "status.json").read_text() == '{"step": 1, "values": [null]}'
    assert (tmp_path / "error.txt").read_text() == "Traceback\nOSError: no\n"


def test_the_folders_of_a_store(tmp_path):
    assert own_folder(tmp_path / "a", "b", "c").is_dir()
    (tmp_path / "a" / "b" / "file").write_text("")
    with pytest.raises(OSError, match="file") as caught:
        own_folder(tmp_path / "a", "b", "file")
    assert caught.value.errno == errno.EEXIST
