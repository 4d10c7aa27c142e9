"""Small data sets in the official formats, written by the tests themselves; and where the real ones may be."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REAL = os.environ.get("DRIVEPRUNE_TEST_DATA", "")


def real(folder):
    """The folder with real data, or the test is skipped."""
    if not REAL or not (Path(REAL) / folder).exists():
        pytest.skip(f"needs {folder} in the folder that DRIVEPRUNE_TEST_DATA names")
    return Path(REAL)


def noise(*shape, seed=0, high=256):
    return np.random.default_rng(seed).integers(high, size=shape, dtype=np.uint8)


def cifar(path, count, classes, seed=0, coarse=False):
    """A binary file of CIFAR: pixels and labels, as they are written."""
    x, y = noise(count, 3, 32, 32, seed=seed), noise(count, seed=seed + 1, high=classes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for image, label in zip(x, y, strict=True):
            file.write(bytes([label % 20, label] if coarse else [label]) + image.tobytes())
    return x, y


def cifar10(data_dir):
    folder = data_dir / "cifar-10-batches-bin"
    batches = [cifar(folder / f"data_batch_{i}.bin", 10, 10, seed=i) for i in range(1, 6)]
    test = cifar(folder / "test_batch.bin", 12, 10, seed=9)
    return (np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])), test


def cifar100(data_dir):
    folder = data_dir / "cifar-100-binary"
    train = cifar(folder / "train.bin", 50, 100, seed=1, coarse=True)
    return train, cifar(folder / "test.bin", 12, 100, seed=2, coarse=True)


def idx(path, array):
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def idx_files(folder, ending="-ubyte", dot="-"):
    halves = []
    for half, count in (("train", 40), ("t10k", 12)):
        x, y = noise(count, 28, 28, seed=count), noise(count, seed=count + 1, high=10)
        idx(folder / f"{half}-images{dot}idx3{ending}", x)
        idx(folder / f"{half}-labels{dot}idx1{ending}", y)
        halves.append((x[:, None], y))
    return halves


def mnist(data_dir):
    return idx_files(data_dir / "mnist")


def fashion_mnist(data_dir):
    return idx_files(data_dir / "fashion-mnist", "-ubyte.gz")


def picture(path, size=(64, 64), mode="RGB", seed=0, **options):
    """An image file with some structure, so that it survives JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = noise(4, 4, 3, seed=seed) if mode == "RGB" else noise(4, 4, seed=seed)
    Image.fromarray(coarse).resize(size).save(path, **options)


def tiny_imagenet(data_dir):
    """Three classes, listed in an order of their own; every other JPEG is grey."""
    folder = data_dir / "tiny-imagenet-200"
    wnids, lines = ["n03", "n01", "n02"], []
    for number, wnid in enumerate(wnids):
        for i in range(4):
            name = folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG"
            picture(name, mode="L" if i % 2 else "RGB", seed=10 * number + i)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    for i, wnid in enumerate(["n01", "n02", "n03", "n01"]):
        picture(folder / "val" / "images" / f"val_{i}.JPEG", mode="L" if i % 2 else "RGB", seed=100 + i)
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "words.txt").write_text("n01\tEgyptian cat\nn02\ttree frog, tree-frog\nn77\tnothing\n")


def npz(path, count, seed=0, **arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    x = noise(count, 3072, seed=seed)
    y = np.random.default_rng(seed).integers(1, 1001, count)
    np.savez_compressed(path, **{"data": x, "labels": y, "mean": x.mean(0), **arrays})
    return x.reshape(-1, 3, 32, 32), y - 1


def imagenet32(data_dir):
    batches = [npz(data_dir / "Imagenet32_train_npz" / f"train_data_batch_{i}.npz", 9 + i, i) for i in range(1, 11)]
    test = npz(data_dir / "Imagenet32_val_npz" / "val_data.npz", 12, 77)
    return (np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])), test


def digits(data_dir):
    """They come with scikit-learn."""


WRITERS = {
    "cifar10": cifar10, "cifar100": cifar100, "digits": digits, "fashion-mnist": fashion_mnist,
    "imagenet32": imagenet32, "mnist": mnist, "tiny-imagenet": tiny_imagenet,
}  # fmt: skip
