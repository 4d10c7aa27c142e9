import struct

import pytest

from driveprune import datasets
from tests.datasets.written import cifar100, real

FOLDER = "cifar-100-binary"


def test_the_label_is_the_fine_one(tmp_path):
    cifar100(tmp_path)
    path = tmp_path / FOLDER / "test.bin"
    path.write_bytes(bytes([3, 99]) + bytes(3072))
    data = datasets.load("cifar100", tmp_path)
    assert data.test.y.tolist() == [99]
    assert len(data.classes) == 100
    assert data.classes[99] == "worm"
    path.write_bytes(bytes([3, 100]) + bytes(3072))
    with pytest.raises(ValueError, match="test.bin has the label 100, but there are only 100 classes"):
        datasets.load("cifar100", tmp_path)


def test_the_real_one():
    folder = real(FOLDER)
    data = datasets.load("cifar100", folder)
    assert data.classes == tuple((folder / FOLDER / "fine_label_names.txt").read_text().split())
    for half, images in (("train", data.train), ("test", data.test)):
        records = list(struct.iter_unpack("BB3072s", (folder / FOLDER / f"{half}.bin").read_bytes()))
        assert images.y.tolist() == [fine for _, fine, _ in records]
        assert images.x.numpy().tobytes() == b"".join(pixels for _, _, pixels in records)
        assert images.y.unique().numel() == 100
    if len(data.train) < 50_000:
        assert data.label == "cifar100 (not the official data)"
        assert "5,000 training images instead of 50,000" in data.note
