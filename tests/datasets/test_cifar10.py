import dataclasses
import hashlib
import os
import struct
import tarfile

import pytest

from driveprune import archives, datasets
from driveprune.datasets import _source
from driveprune.datasets import cifar10 as module
from tests.datasets.written import cifar, cifar10, real

FOLDER = "cifar-10-batches-bin"


def pack(data_dir):
    """Put the folder into its official archive."""
    with tarfile.open(data_dir / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(data_dir / FOLDER, FOLDER)
    (data_dir / FOLDER).rename(data_dir / "gone")


def test_every_layout_is_found(tmp_path):
    cifar10(tmp_path)
    unpacked = datasets.load("cifar10", tmp_path).fingerprint
    assert datasets.load("cifar10", tmp_path / FOLDER).fingerprint == unpacked
    pack(tmp_path)
    assert datasets.load("cifar10", tmp_path).fingerprint == unpacked
    assert sorted(os.listdir(tmp_path)) == [FOLDER, "cifar-10-binary.tar.gz", "gone"]


def test_files_with_the_right_checksums_are_official(tmp_path, monkeypatch):
    cifar10(tmp_path)
    known = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (tmp_path / FOLDER).iterdir()}
    halves = {half: {name: known[name] for name in getattr(module.LAYOUT, half)} for half in ("train", "test")}
    monkeypatch.setattr(module, "LAYOUT", dataclasses.replace(module.LAYOUT, **halves))
    data = datasets.load("cifar10", tmp_path)
    assert (data.official, data.label, data.note) == (True, "cifar10", "")
    cifar(tmp_path / FOLDER / "data_batch_3.bin", 10, 10, seed=42)
    note = "not the official files: data_batch_3.bin differs; 50 training images instead of 50,000"
    assert datasets.load("cifar10", tmp_path).note.startswith(note)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"data_batch_2.bin is cut off or no CIFAR file: 0 bytes are not images of 3,073 bytes"),
        (bytes(3073 * 2 - 1), r"data_batch_2.bin is cut off or no CIFAR file: 6,145 bytes"),
        (bytes([10]) + bytes(3072), "data_batch_2.bin has the label 10, but there are only 10 classes"),
    ],
)
def test_malformed_files_are_named(tmp_path, content, message):
    cifar10(tmp_path)
    (tmp_path / FOLDER / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        datasets.load("cifar10", tmp_path)


def test_missing_files_are_named(tmp_path):
    cifar10(tmp_path)
    (tmp_path / FOLDER / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-bin has no test_batch.bin"):
        datasets.load("cifar10", tmp_path)
    pack(tmp_path)
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"has no data_batch_1.bin, though cifar-10-binary.tar.gz is beside it"
    ):
        datasets.load("cifar10", tmp_path)


def test_getting_downloads_and_unpacks_once(tmp_path, monkeypatch):
    cifar10(tmp_path)
    pack(tmp_path)
    asked = []

    def fetch(url, known, folder):
        asked.append((url, known))
        return folder / "cifar-10-binary.tar.gz"

    monkeypatch.setattr(_source, "fetch", fetch)
    assert archives.fetch is not fetch
    for _ in range(2):
        assert datasets.get("cifar10", tmp_path) == tmp_path / FOLDER
    url = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    assert asked == [(url, "c32a1d4ab5d03f1284b67883e8d87530")]


def test_the_real_one():
    folder = real(FOLDER)
    data = datasets.load("cifar10", folder)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert (data.official, data.note) == (True, "")
    assert [round(value, 4) for value in data.mean] == [0.4914, 0.4822, 0.4465]
    assert [round(value, 4) for value in data.deviation] == [0.2470, 0.2435, 0.2616]
    with (folder / FOLDER / "data_batch_4.bin").open("rb") as file:
        for number, (label, pixels) in enumerate(struct.iter_unpack("B3072s", file.read())):
            assert data.train.y[30_000 + number] == label
            assert data.train.x[30_000 + number].numpy().tobytes() == pixels
    with (folder / FOLDER / "test_batch.bin").open("rb") as file:
        labels = file.read()[::3073]
    assert data.test.y.tolist() == list(labels)
