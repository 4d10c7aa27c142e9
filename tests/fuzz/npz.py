"""Arrays of ImageNet32: read in pieces, and the same as numpy's own reader finds."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from random import Random

import numpy as np

from driveprune.datasets import imagenet32
from tests.datasets.written import noise
from tests.fuzz.mutations import NUMBERS, mutated_bytes


def honest(folder: Path) -> list[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, data=noise(5, 3072), labels=np.arange(1, 6))
        found.append(file.getvalue())
    return found


def mutated(data: bytes, chance: Random) -> bytes:
    if chance.random() < 0.3:
        return mutated_bytes(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        arrays = {name: archive.read(name) for name in archive.namelist()}
    name = chance.choice(sorted(arrays))
    head, body = arrays[name][:128], arrays[name][128:]
    if chance.random() < 0.5:
        number = str(chance.choice(NUMBERS)).encode()
        words = (b"5,", b"3072", b"'|u1'", b"'<i8'", b"False", b"shape", b"'descr'")
        odd = (number + b",", b"(" * 50, b"'|O'", b"'<f4'", b"True", b"'<M8'", b"[('a','<i4')]", b"-5,", b"'(9,)u1'")
        head = head.replace(chance.choice(words), chance.choice(odd))
        head = head[:8] + max(0, len(head) - 10).to_bytes(2, "little") + head[10:]
    else:
        head = mutated_bytes(head, chance)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for each, content in {**arrays, name: head + body}.items():
            archive.writestr(each, content)
    return file.getvalue()


def target(data: bytes, folder: Path) -> None:
    path = folder / "train_data_batch_1.npz"
    path.write_bytes(data)
    y = imagenet32._labels(path)
    pixels = np.concatenate(list(imagenet32._pieces([path], "images")))
    with np.load(path, allow_pickle=False) as literal:
        assert np.array_equal(literal["labels"].astype(np.int64) - 1, y)
        assert np.array_equal(literal["data"].reshape(-1, 3, 32, 32), pixels)
