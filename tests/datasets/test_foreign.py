"""Data that somebody else has put together: nothing of it is waited for, run, or unpacked without end."""

import gzip
import io
import json
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from driveprune import datasets
from driveprune.datasets import _cache, _idx, _pictures, imagenet32
from tests.datasets.test_folder import folder_of
from tests.datasets.written import cifar10

pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@pipes
@pytest.mark.parametrize("kind", ["pipe", "device", "circle", "nothing"])
def test_an_image_that_is_no_file_is_named_and_not_waited_for(tmp_path, kind):
    folder_of(tmp_path, {"a": 5, "b": 5}, size=(8, 8))
    path = tmp_path / "a" / "x.png"
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "circle": lambda: path.symlink_to(path),
        "nothing": lambda: path.symlink_to(tmp_path / "gone"),
    }[kind]()
    with pytest.raises((ValueError, OSError), match=r"x\.png"):
        datasets.load(str(tmp_path))
    assert not list(tmp_path.glob(".driveprune-cache*"))


@pipes
def test_a_batch_that_is_a_pipe(tmp_path):
    cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"data_batch_2\.bin is no regular file"):
        datasets.load("cifar10", tmp_path)


@pipes
def test_a_cache_that_is_a_pipe_is_told_of(tmp_path):
    folder_of(tmp_path, {"a": 5, "b": 5}, size=(8, 8))
    os.mkfifo(tmp_path / ".driveprune-cache-own.bin")
    with pytest.warns(UserWarning, match="is no regular file: the images are decoded again"):
        assert len(datasets.load(str(tmp_path)).train) == 8


def png(width, height):
    """A picture of one colour: a line of zeros is nothing when it is packed."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pack, data = zlib.compressobj(9), b""
    for _ in range(height if width * height < 1e7 else 10):
        data += pack.compress(bytes(1 + 3 * width))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data + pack.flush()) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_picture_that_unpacks_to_gigabytes_is_refused(tmp_path, side):
    folder_of(tmp_path, {"a": 5, "b": 5}, size=(8, 8))
    (tmp_path / "a" / "x.png").write_bytes(png(side, side))
    with pytest.raises(ValueError, match=r"cannot decode .*x\.png: Image size .* exceeds limit"):
        datasets.load(str(tmp_path))


@pytest.mark.parametrize("decoded", [_pictures._size, lambda path: _pictures.decode(path, 16, resize=True)])
def test_a_picture_that_claims_more_pixels_than_its_bytes_can_hold_is_refused(tmp_path, decoded):
    """Fewer than Pillow thinks too many: a TIFF whose pixels were not there was taken as black, in 250 MB."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(file, "TIFF")
    content = bytearray(file.getvalue())
    height = content.index(struct.pack("<HHII", 257, 4, 1, 16))  # the tag, its kind and its count
    content[height : height + 12] = struct.pack("<HHII", 257, 4, 1, 1 << 22)
    (tmp_path / "x.tif").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot decode .*x\.tif: a file of .* cannot hold the 67,108,864 pixels"):
        decoded(tmp_path / "x.tif")
    Image.fromarray(np.zeros((4096, 4096), np.uint8)).save(tmp_path / "black.png")
    assert _pictures._size(tmp_path / "black.png") == (4096, 4096)


def test_only_pictures_are_decoded_whatever_their_names(tmp_path):
    """Pillow gives EPS to Ghostscript, and knows forty kinds more."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    ico = io.BytesIO()
    Image.new("RGB", (8, 8)).save(ico, "ICO", sizes=[(8, 8)])
    for content in (eps, ico.getvalue()):
        (tmp_path / "x.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot decode .*x\.png: cannot identify"):
            _pictures.decode(tmp_path / "x.png", 8)
    for kind in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"):
        Image.new("RGB", (8, 8), (200, 200, 200)).save(tmp_path / "x.png", kind)
        assert abs(int(_pictures.decode(tmp_path / "x.png", 8)[0, 0, 0]) - 200) < 3


def test_a_packed_file_of_images_that_unpacks_to_far_more(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    count = 60_000_000 // 784
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">III", count, 28, 28) + bytes(784 * count)))
    with pytest.raises(ValueError, match="ubyte.gz would unpack to far more"):
        _idx._bytes(path)
    for shape in ((0xFFFFFFFF,) * 3, (1, 60_000, 60_000)):
        with pytest.raises(ValueError, match="says that it holds"):
            _idx.parse(bytes([0, 0, 8, 3]) + struct.pack(">III", *shape) + bytes(784), path)


def test_an_array_that_unpacks_to_far_more(tmp_path):
    path = tmp_path / "train_data_batch_1.npz"
    np.savez_compressed(path, data=np.zeros((20_000, 3072), np.uint8), labels=np.ones(20_000, np.int64))
    with pytest.raises(ValueError, match="data would unpack to far more"):
        imagenet32._labels(path)


CHANGES = [
    {"train": [8, 3, 8]}, {"train": [-8, -3, 8, 8]}, {"train": [8.0, 3, 8, 8]}, {"train": [1 << 40, 3, 1 << 30, 1]},
    {"train": [0, 3, 8, 8]}, {"train": [8, 8, 3, 8]}, {"classes": 3}, {"classes": [1, 2]}, {"classes": ["a"]},
    {"mean": []}, {"mean": 0.5}, {"mean": ["a", "b", "c"]}, {"deviation": [0, 0, 0]}, {"official": "yes"},
    {"note": None}, {"name": ["x"]}, {"fingerprint": 5}, {"key": None}, "[]", "[" * 100_000, "{}", "NaN",
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change)[:30])
def test_a_cache_that_describes_what_it_is_not(tmp_path, change):
    """The checksum of its description is right: whoever can write a file can write that, too."""
    folder_of(tmp_path, {"a": 5, "b": 5}, size=(8, 8))
    honest = datasets.load(str(tmp_path))
    path = next(tmp_path.glob(".driveprune-cache*"))
    data = path.read_bytes()
    length, _ = _cache._FOOTER.unpack(data[-_cache._FOOTER.size :])
    pixels, text = data[: -_cache._FOOTER.size - length], data[-_cache._FOOTER.size - length : -_cache._FOOTER.size]
    odd = change if isinstance(change, str) else json.dumps({**json.loads(text), **change})
    footer = _cache._FOOTER.pack(len(odd), _cache.hashlib.sha256(odd.encode()).digest())
    path.write_bytes(pixels + odd.encode() + footer)
    with pytest.warns(UserWarning, match=r"\.bin is damaged: .*: the images are decoded again"):
        assert datasets.load(str(tmp_path)).fingerprint == honest.fingerprint
