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
