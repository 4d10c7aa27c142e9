import dataclasses
import hashlib
import struct

import pytest

from driveprune import datasets
from driveprune.datasets import _idx
from driveprune.datasets import mnist as module
from tests.datasets.written import idx, idx_files, mnist, noise

PLACES = ["mnist", "MNIST/raw", "."]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ending", ["-ubyte", "-ubyte.gz"])
@pytest.mark.parametrize("dot", ["-", "."])
def test_every_layout_is_found(tmp_path, place, ending, dot):
    (x, y), _ = idx_files(tmp_path / place, ending, dot)
    data = datasets.load("mnist", tmp_path)
    assert data.train.x.numpy().tobytes() == x.tobytes()
    assert data.train.y.tolist() == y.tolist()


def test_the_content_is_what_is_official_not_its_compression(tmp_path, monkeypatch):
    idx_files(tmp_path / "raw")
    idx_files(tmp_path / "gz", "-ubyte.gz")
    content = {
        part: hashlib.md5((tmp_path / "raw" / f"{part}-ubyte").read_bytes()).hexdigest() for part in _idx.PARTS
    }
    monkeypatch.setattr(module, "LAYOUT", dataclasses.replace(module.LAYOUT, content=content))
    assert datasets.load("mnist", tmp_path / "raw").official
    assert datasets.load("mnist", tmp_path / "gz").label == "mnist"
    idx(tmp_path / "gz" / "t10k-labels-idx1-ubyte.gz", noise(12, high=5))
    assert "not the official files: t10k-labels-idx1-ubyte.gz differs" in datasets.load("mnist", tmp_path / "gz").note


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
GOOD = bytes([0, 0, 8, 3]) + struct.pack(">3I", 1, 28, 28)
MALFORMED = {
    "empty": (IMAGES, b"", "is no IDX file of bytes: it begins with nothing"),
    "magic": (IMAGES, b"\0\0\x0d\3" + GOOD[4:] + bytes(784), "is no IDX file of bytes: it begins with 00 00 0d 03"),
    "header": (IMAGES, GOOD[:10], "is no IDX file"),
    "cut off": (IMAGES, GOOD + bytes(783), r"holds 784 bytes \(1, 28, 28\), but has 783"),
    "too long": (IMAGES, GOOD + bytes(785), r"holds 784 bytes \(1, 28, 28\), but has 785"),
    "gzip": (IMAGES, b"\x1f\x8b" + bytes(20), "is damaged"),
    "shape": (IMAGES, bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 1]), r"must hold images of 28×28, but has the shape \(2,\)"),
    "none": (IMAGES, bytes([0, 0, 8, 3]) + struct.pack(">3I", 0, 28, 28), "must hold images of 28×28"),
    "count": (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 1]), r"must hold 40 labels, but has the shape \(2,\)"),
    "label": (
        LABELS,
        bytes([0, 0, 8, 1, 0, 0, 0, 40]) + bytes([10] * 40),
        "has the label 10, but there are 10 classes",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_named(tmp_path, case):
    name, content, message = MALFORMED[case]
    mnist(tmp_path)
    (tmp_path / "mnist" / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} .*{message}"):
        datasets.load("mnist", tmp_path)


def test_missing_files_are_named(tmp_path):
    mnist(tmp_path)
    (tmp_path / "mnist" / LABELS).unlink()
    with pytest.raises(FileNotFoundError, match="mnist has no train-labels-idx1-ubyte, raw or .gz"):
        datasets.load("mnist", tmp_path)


def test_getting_downloads_the_four_files(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(_idx, "fetch", lambda *args: asked.append(args))
    assert datasets.get("mnist", tmp_path) == tmp_path / "mnist"
    assert [url for url, _, _ in asked] == [f"{module.LAYOUT.url}{part}-ubyte.gz" for part in _idx.PARTS]
    assert {known for _, known, _ in asked} == set(module.LAYOUT.compressed.values())
