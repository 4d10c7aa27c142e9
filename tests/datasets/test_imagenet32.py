import hashlib
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from driveprune import datasets
from driveprune.batches import split
from driveprune.datasets import imagenet32 as module
from tests.datasets.written import imagenet32, noise, npz

TRAIN, VAL = "Imagenet32_train_npz", "Imagenet32_val_npz"


def test_it_is_mapped_and_a_choice_of_it_too(tmp_path):
    (x, _), _ = imagenet32(tmp_path)
    data = datasets.load("imagenet32", tmp_path)
    assert data.train.mapped
    training, held = split(data.train, 20)
    assert training.x.data_ptr() == held.x.data_ptr() == data.train.x.data_ptr()
    assert np.array_equal(held.pixels(slice(None)).numpy(), x[held.rows.numpy()])


def test_batches_follow_each_other_by_number(tmp_path):
    """Batch 10 is the last, not the second."""
    (_, y), _ = imagenet32(tmp_path)
    assert datasets.load("imagenet32", tmp_path).train.y.tolist() == y.tolist()


def test_every_layout_is_found(tmp_path):
    imagenet32(tmp_path)
    expected = datasets.load("imagenet32", tmp_path).fingerprint
    (tmp_path / "one" / "imagenet32").mkdir(parents=True)
    for path in [*(tmp_path / TRAIN).glob("*.npz"), *(tmp_path / VAL).glob("*.npz")]:
        shutil.copy(path, tmp_path / "one" / "imagenet32")
    assert datasets.load("imagenet32", tmp_path / "one").fingerprint == expected
    assert datasets.load("imagenet32", tmp_path / "one" / "imagenet32").fingerprint == expected
    (tmp_path / "two").mkdir()
    for name, top in ((TRAIN, ""), (VAL, f"{VAL}/")):  # with a folder at the top or without
        with zipfile.ZipFile(tmp_path / "two" / f"{name}.zip", "w") as archive:
            for path in (tmp_path / name).glob("*.npz"):
                archive.write(path, f"{top}{path.name}")
    assert datasets.load("imagenet32", tmp_path / "two").fingerprint == expected


def test_it_is_official_by_checksums(tmp_path, monkeypatch):
    imagenet32(tmp_path)
    for known, folder in (("TRAIN", TRAIN), ("TEST", VAL)):
        found = {name: (tmp_path / folder / name).read_bytes() for name in getattr(module, known)}
        sums = {name: hashlib.md5(content).hexdigest() for name, content in found.items()}
        monkeypatch.setattr(module, known, sums)
    assert datasets.load("imagenet32", tmp_path).label == "imagenet32"
    npz(tmp_path / TRAIN / "train_data_batch_4.npz", 5, 99)
    assert "train_data_batch_4.npz differs" in datasets.load("imagenet32", tmp_path).note
    (tmp_path / TRAIN / "train_data_batch_4.npz").unlink()
    note = "not the official files: train_data_batch_4.npz is missing; 132 training images instead of 1,281,167"
    assert datasets.load("imagenet32", tmp_path).note.startswith(note)


MALFORMED = {
    "key": ({"labels": None}, "has no array 'labels'"),
    "objects": (
        {"labels": np.array([1, "x"] * 5, dtype=object)},
        "labels holds Python objects, which are never read",
    ),
    "float": ({"labels": np.ones(10)}, r"labels must be integers \(10,\), got float64"),
    "count": ({"labels": np.ones(9, int)}, r"labels must be integers \(10,\), got int64 \(9,\)"),
    "zero": ({"labels": np.zeros(10, int)}, "has the label 0, but labels are from 1 to 1000"),
    "too high": ({"labels": np.full(10, 1001)}, "has the label 1001"),
    "shape": ({"data": noise(10, 3071)}, r"data must be uint8 \(N, 3072\), got uint8 \(10, 3071\)"),
    "type": ({"data": np.zeros((10, 3072))}, r"data must be uint8 \(N, 3072\), got float64"),
    "columns": ({"data": np.asfortranarray(noise(10, 3072))}, "data is stored by columns"),
    "empty": ({"data": noise(0, 3072), "labels": np.ones(0, int)}, "data must be uint8"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_arrays_are_named(tmp_path, case):
    arrays, message = MALFORMED[case]
    imagenet32(tmp_path)
    npz(tmp_path / VAL / "val_data.npz", 10)
    with np.load(tmp_path / VAL / "val_data.npz") as old:
        changed = {key: value for key, value in {**old, **arrays}.items() if value is not None}
    np.savez(tmp_path / VAL / "val_data.npz", **changed)
    with pytest.raises(ValueError, match=f"val_data.npz.*{message}"):
        datasets.load("imagenet32", tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 15_000, -1])
def test_files_that_are_cut_off_are_named(tmp_path, keep):
    imagenet32(tmp_path)
    path = tmp_path / TRAIN / "train_data_batch_2.npz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="train_data_batch_2.npz is damaged or no npz file"):
        datasets.load("imagenet32", tmp_path)
    assert not [name for name in os.listdir(tmp_path / TRAIN) if name.startswith(".")]


def test_flipped_bytes_are_noticed(tmp_path):
    imagenet32(tmp_path)
    path = tmp_path / TRAIN / "train_data_batch_2.npz"
    content = bytearray(path.read_bytes())
    content[5000] ^= 255
    path.write_bytes(content)
    with pytest.raises(ValueError, match="train_data_batch_2.npz is damaged"):
        datasets.load("imagenet32", tmp_path)


def test_it_cannot_be_downloaded_without_an_account(tmp_path):
    for ask in (lambda: datasets.get("imagenet32", tmp_path), lambda: datasets.load("imagenet32", download=True)):
        with pytest.raises(ValueError, match=r"register at https://image-net.org.*Imagenet32_train_npz.zip"):
            ask()


BOUNDED = """
import re, resource, sys
from pathlib import Path
import numpy as np, torch
from driveprune import datasets
from driveprune.batches import Batches, Images, split

torch.set_num_threads(1)
list(Batches(Images(torch.zeros(99, 3, 32, 32, dtype=torch.uint8), torch.zeros(99).long()), padding=4, flip=True))
used = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
extra = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (used + extra, used + extra))
try:
    np.ones(2 * extra, np.uint8)
    print("no limit here")
except MemoryError:
    data = datasets.load("imagenet32", sys.argv[1])
    training, held = split(data.train, 100)
    print(sum(len(y) for _, y in Batches(training, padding=4, flip=True)), data.fingerprint[:4] != "")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
def test_it_is_never_wholly_in_memory(tmp_path):
    """Converting 120 MB and an epoch over them, in a process that may allocate 48 MB."""
    count = 20_000
    x = noise(count, 3072)
    for number in (1, 2):
        folder = tmp_path / TRAIN
        folder.mkdir(exist_ok=True)
        np.savez(folder / f"train_data_batch_{number}.npz", data=x, labels=np.full(count, number))
    npz(tmp_path / VAL / "val_data.npz", 10)
    command = [sys.executable, "-c", BOUNDED, str(tmp_path), str(48 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(tmp_path / TRAIN)
    if "no limit here" in done.stdout:
        pytest.skip("this system does not limit memory")
    assert done.stdout == f"{2 * count - 100} True\n", done.stderr
