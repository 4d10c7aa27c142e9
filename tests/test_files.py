import errno
import json
import math
import os

import pytest
import torch

from driveprune import files
from driveprune.files import (
    read_json,
    read_state,
    read_tensors,
    write_atomically,
    write_json,
    write_state,
    write_tensors,
)

TENSORS = {"a": torch.randn(3, 4), "b": torch.arange(5), "empty": torch.zeros(0, 2), "c": torch.tensor(2.0)}


def test_round_trip(tmp_path):
    write_tensors(tmp_path / "x", TENSORS, {"hello": "world"})
    tensors, metadata = read_tensors(tmp_path / "x")
    assert metadata == {"hello": "world"}
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "x", b"")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_every_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "x"
    write_tensors(path, {"a": torch.randn(5), "m": torch.tensor([1], dtype=torch.uint8)}, {"hello": "world"})
    data = path.read_bytes()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="x (is damaged|was not written)"):
            read_tensors(path)


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "x"
    write_tensors(path, {"a": torch.randn(5)}, {"hello": "world"})
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="x is damaged"):
            read_tensors(path)


def test_what_was_verified_is_what_is_used(tmp_path):
    """No map of the file is made: what was read stays as it was, whatever becomes of the file."""
    path = tmp_path / "x"
    write_tensors(path, TENSORS, {"hello": "world"})
    tensors, _ = read_tensors(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
        file.flush()
        assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
        file.truncate(0)
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())


@pytest.mark.parametrize("change", ["flip", "cut off", "empty"])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch, change, after):
    """The change comes between two reads; a map that became shorter would end the process with a SIGBUS."""
    path = tmp_path / "x"
    write_tensors(path, {f"{number}": torch.randn(1000) for number in range(8)}, {"hello": "world"})
    filled, count = files._filled, 0

    def changing(file, room):
        nonlocal count
        count += 1
        if count == after:
            size = path.stat().st_size
            with path.open("r+b") as other:
                other.seek(size - 2000)
                other.write(b"changed")
                other.truncate({"flip": size, "cut off": size - 2000, "empty": 0}[change])
        return filled(file, room)

    monkeypatch.setattr(files, "_filled", changing)
    with pytest.raises(ValueError, match="x is damaged"):
        files.read_file(path, lambda name: name == "7")


def test_only_what_is_wanted_is_in_memory(tmp_path):
    path = tmp_path / "x"
    write_tensors(path, TENSORS, {"hello": "world"})
    found = files.read_file(path, lambda name: name in {"a", "empty"})
    assert found.tensors.keys() == {"a", "empty"}
    assert torch.equal(found.tensors["a"], TENSORS["a"])
    assert found.kinds["b"] == files.Kind(torch.int64, (5,))
    assert found.bytes == path.stat().st_size
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1  # in a tensor that is not wanted
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="its checksum does not match"):
        files.read_file(path, lambda _: False)


def test_a_flag_that_is_neither_true_nor_false(tmp_path):
    write_tensors(tmp_path / "x", {"flag": torch.tensor([True, False])}, {})
    data = (tmp_path / "x").read_bytes()
    assert data.endswith(b"\x01\x00")
    (tmp_path / "x").write_bytes(data[:-2] + b"\x07\x00")
    with pytest.raises(ValueError, match="flag has values that are neither true nor false"):
        read_tensors(tmp_path / "x")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_tensors_of_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(ValueError, match="is no regular file"):
            read_tensors(tmp_path / name)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_tensors(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="no safetensors file"):
        read_tensors(tmp_path / "text")


def test_states_come_back_bit_for_bit(tmp_path):
    state = {
        "a": [1, 2.5, None, True, "x", (3, [4])],
        7: {"t": torch.randn(3, 2).bfloat16(), "empty": torch.zeros(0), "scalar": torch.tensor(float("nan"))},
        "inf": float("inf"),
        "tiny": 5e-324,
    }
    write_state(tmp_path / "s", state)
    again = read_state(tmp_path / "s")
    assert again.keys() == state.keys()
    assert again["a"] == state["a"]
    assert (again["inf"], again["tiny"]) == (state["inf"], state["tiny"])
    for name, tensor in state[7].items():
        assert again[7][name].dtype == tensor.dtype
        assert again[7][name].shape == tensor.shape
        assert torch.equal(again[7][name].isnan(), tensor.isnan())
        assert torch.equal(again[7][name].nan_to_num(), tensor.nan_to_num())


def test_a_state_with_anything_else_is_refused(tmp_path):
    with pytest.raises(TypeError, match="cannot hold a set"):
        write_state(tmp_path / "s", {"a": {1}})
    assert not (tmp_path / "s").exists()


def test_json_with_a_checksum(tmp_path):
    write_json(tmp_path / "j", {"a": [1, 0.1], "ä": None})
    assert read_json(tmp_path / "j") == {"a": [1, 0.1], "ä": None}
    text = (tmp_path / "j").read_text()
    for damaged in (text.replace("0.1", "0.2"), text[:-5], "[1]", "", '{"a": 1}'):
        (tmp_path / "j").write_text(damaged)
        with pytest.raises(ValueError, match="damaged"):
            read_json(tmp_path / "j")


def test_files_are_made_with_the_users_umask_which_is_never_changed(tmp_path, monkeypatch):
    """`umask` can only be read by setting it, for all threads: what another one writes meanwhile is open to all."""
    before = os.umask(0o077)
    try:
        monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask of the process was touched"))
        write_atomically(tmp_path / "private", b"")
        (tmp_path / "plain").write_bytes(b"")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "plain").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_an_error_of_the_system_names_the_file_and_nothing_is_left_behind(tmp_path, monkeypatch, call):
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*/x'$") as caught:
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_short_write_goes_on_with_the_rest(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(files.os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    write_atomically(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_a_link_is_written_through_or_replaced_as_it_is_asked(tmp_path):
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    elsewhere.write_bytes(b"old")
    link.symlink_to(elsewhere)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert elsewhere.read_bytes() == b"new"
    write_atomically(link, b"own", follow=False)
    assert not link.is_symlink()
    assert (link.read_bytes(), elsewhere.read_bytes()) == (b"own", b"new")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="circle"):
        write_atomically(tmp_path / "circle", b"")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "zero"):
        with pytest.raises(ValueError, match=f"{name} is no regular file"):
            files.open_regular(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} is no regular file"):
            read_json(tmp_path / name)


def test_numbers_that_json_does_not_know_are_neither_written_nor_read(tmp_path):
    path = tmp_path / "j"
    for number in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="j cannot be written: .*not JSON compliant"):
            write_json(path, {"a": [number]})
    assert not path.exists()
    for text in ('{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="j is damaged"):
            read_json(path)


def test_deep_json_is_an_error_that_names_the_file(tmp_path):
    for text in ("[" * 100_000, '{"a":' * 100_000, *('{"a": ' + "[" * n + "]" * n + "}" for n in (300, 900))):
        (tmp_path / "j").write_text(text)
        with pytest.raises(ValueError, match="j is damaged"):
            read_json(tmp_path / "j")
    write_tensors(tmp_path / "s", {}, {"state": "[" * 100_000})
    with pytest.raises(ValueError, match="s is damaged: it is nested too deeply"):
        read_state(tmp_path / "s")


def test_the_text_of_a_state_is_json_whatever_its_numbers(tmp_path):
    write_state(tmp_path / "s", {"rows": [float("nan"), float("inf"), 1.5]})
    text = read_tensors(tmp_path / "s")[1]["state"]
    assert json.loads(text, parse_constant=pytest.fail) is not None
    rows = read_state(tmp_path / "s")["rows"]
    assert math.isnan(rows[0])
    assert rows[1:] == [float("inf"), 1.5]
    for odd in ('{"tensor": 5}', '{"a": 1, "b": 2}', '{"dict": 3}', '{"float": "x"}'):
        write_tensors(tmp_path / "s", {}, {"state": odd})
        with pytest.raises(ValueError, match="s is damaged"):
            read_state(tmp_path / "s")


def test_no_memory_to_write_is_said_before_anything_is_written(tmp_path, monkeypatch):
    def nothing_left(*_, **__):
        raise MemoryError("Unable to allocate 3.00 TiB")

    files.write_tensors(tmp_path / "x", {"a": torch.ones(3)}, {})
    before = (tmp_path / "x").read_bytes()
    monkeypatch.setattr(files.np, "empty", nothing_left)
    with pytest.raises(MemoryError, match="there is no memory to write .*x: Unable to allocate 3.00 TiB"):
        files.write_tensors(tmp_path / "x", {"a": torch.zeros(3)}, {})
    assert (tmp_path / "x").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
