import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from driveprune.datasets import _cache
from driveprune.datasets._cache import Draft, Part, cached, key_of
from tests.datasets.written import noise


class Source:
    """A data set that counts how often it is decoded."""

    def __init__(self):
        self.decoded = 0

    def __call__(self):
        self.decoded += 1
        parts = (self.part(count) for count in (6, 4))
        return Draft("some", (3, 5, 4), *parts, ("a", "b"), official=False, note="a note, näher erklärt")

    def part(self, count):
        x = noise(count, 3, 5, 4, seed=count)
        return Part(torch.arange(count) % 2, lambda: iter([x[:3], x[3:]]))


def test_images_are_decoded_once(tmp_path):
    source = Source()
    first, second = (cached(tmp_path / "c", "key", source) for _ in range(2))
    assert source.decoded == 1
    assert first.fingerprint == second.fingerprint
    assert second.train.x.numpy().tobytes() == noise(6, 3, 5, 4, seed=6).tobytes()
    assert second.test.x.numpy().tobytes() == noise(4, 3, 5, 4, seed=4).tobytes()
    assert second.test.y.tolist() == [0, 1, 0, 1]
    assert (second.name, second.classes, second.official, second.note) == ("some", ("a", "b"), False, source().note)
    assert os.listdir(tmp_path) == ["c"]


def test_it_begins_with_the_pixels_as_they_are(tmp_path):
    cached(tmp_path / "c", "key", Source())
    assert (tmp_path / "c").read_bytes().startswith(noise(6, 3, 5, 4, seed=6).tobytes())


def test_another_key_decodes_again_without_a_word(tmp_path):
    source = Source()
    for key in ("old", "new", "new"):
        cached(tmp_path / "c", key, source)
    assert source.decoded == 2


def test_large_files_are_mapped_and_small_ones_read(tmp_path, monkeypatch):
    read, mapped = (cached(tmp_path / "c", "key", Source(), mapped=mapped) for mapped in (False, True))
    assert not read.train.mapped
    assert mapped.train.mapped
    assert mapped.test.mapped
    read.train.x[0] = 0  # memory of one's own
    monkeypatch.setattr(_cache, "_MAP_FROM", 600)
    assert cached(tmp_path / "c", "key", Source()).train.mapped
    assert cached(tmp_path / "c", "key", Source()).fingerprint == mapped.fingerprint


def test_every_damage_is_noticed_and_mended(tmp_path):
    path = tmp_path / "c"
    expected = cached(path, "key", Source()).fingerprint
    whole = path.read_bytes()
    damaged = [whole[:size] for size in (0, 5, 39, 40, 41, 400, 600, len(whole) - 1)]
    damaged += [whole + b"x", b"x" + whole, bytes(len(whole))]
    for place in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        source = Source()
        with pytest.warns(UserWarning, match=r"c is damaged: .*: the images are decoded again"):
            assert cached(path, "key", source).fingerprint == expected
        assert source.decoded == 1
        assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_to_is_decoded_in_memory(tmp_path, monkeypatch):
    expected = cached(tmp_path / "c", "key", Source())
    read_only(monkeypatch)
    with pytest.warns(UserWarning, match=r"cannot write .*d \(Read-only file system\): the images are decoded again"):
        data = cached(tmp_path / "d", "key", Source())
    assert data.fingerprint == expected.fingerprint
    assert (data.mean, data.deviation) == (expected.mean, expected.deviation)
    with pytest.raises(OSError, match=r"cannot write .*d \(Read-only file system\), and the data do not belong"):
        cached(tmp_path / "d", "key", Source(), mapped=True)


def read_only(monkeypatch):
    """Root may write everywhere, so that permissions would not do."""
    plain = Path.open

    def refuse(self, mode="r", *args):
        if mode == "xb":
            raise OSError(30, "Read-only file system")
        return plain(self, mode, *args)

    monkeypatch.setattr(Path, "open", refuse)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_cache.os, "fsync", full)
    with pytest.warns(UserWarning, match=r"No space left on device"):
        data = cached(tmp_path / "c", "key", Source())
    assert len(data.train) == 6
    assert os.listdir(tmp_path) == []


def test_an_image_that_cannot_be_decoded_leaves_nothing(tmp_path):
    def broken():
        yield noise(3, 3, 5, 4)
        raise ValueError("cannot decode x.png")

    draft = Source()()
    draft = Draft("some", draft.shape, Part(draft.train.y, broken), draft.test, (), official=True, note="")
    with pytest.raises(ValueError, match="cannot decode"):
        cached(tmp_path / "c", "key", lambda: draft)
    assert os.listdir(tmp_path) == []


def test_the_key_sees_names_sizes_times_and_options(tmp_path):
    def key(root, *options):
        return key_of(root, sorted(root.iterdir()), *options)

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"1")
    os.utime(tmp_path / "a" / "x", (5, 5))
    keys = [key(tmp_path / "a"), key(tmp_path / "a", 64)]
    (tmp_path / "a").rename(tmp_path / "moved")
    assert key(tmp_path / "moved") == keys[0]
    os.utime(tmp_path / "moved" / "x", (6, 6))
    keys.append(key(tmp_path / "moved"))
    (tmp_path / "moved" / "x").write_bytes(b"12")
    os.utime(tmp_path / "moved" / "x", (6, 6))
    keys.append(key(tmp_path / "moved"))
    (tmp_path / "moved" / "x").rename(tmp_path / "moved" / "y")
    keys.append(key(tmp_path / "moved"))
    assert len(set(keys)) == 5


def test_mapping_a_file_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = cached(tmp_path / "c", "key", Source(), mapped=True)
    assert np.array_equal(data.train.pixels(torch.tensor([5])).numpy(), noise(6, 3, 5, 4, seed=6)[5:])
