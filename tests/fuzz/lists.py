"""The lists of Tiny ImageNet: each image is in the folder, and has the one label that the lists say."""

from __future__ import annotations

from pathlib import Path
from random import Random

from driveprune.datasets import tiny_imagenet
from tests.fuzz.mutations import TEXTS, mutated_bytes

WNIDS = ("n01", "n02", "n03")
LISTS = {
    "wnids.txt": "n01\nn02\nn03\n",
    "words.txt": "n01\tgoldfish, Carassius auratus\nn03\tbullfrog\nn99\tnothing\n",
    "val/val_annotations.txt": "val_0.JPEG\tn02\t0\t0\t62\t57\nval_1.JPEG\tn01\t4\t0\t9\t9\nval_2.JPEG\tn01\t1\t1\n",
}
MARK = b"\0\0"
"""Between the name of a list and its content."""


def honest(folder: Path) -> list[bytes]:
    return [name.encode() + MARK + content.encode() for name, content in LISTS.items()]


def mutated(data: bytes, chance: Random) -> bytes:
    name, _, content = data.partition(MARK)
    if chance.random() < 0.4:
        return name + MARK + mutated_bytes(content, chance)
    lines = [line.split("\t") for line in content.decode().splitlines()]
    for _ in range(chance.choice((1, 1, 2, 3))):
        line = chance.choice(lines)
        odd = (*TEXTS, *WNIDS, "../n01", "n01/", "val_0.JPEG", "../images/val_1.JPEG", "x/../val_1.JPEG")
        line[chance.randrange(len(line))] = chance.choice(odd)
        if chance.random() < 0.2:
            lines.insert(chance.randrange(len(lines)), list(chance.choice(lines)))
    return name + MARK + "\n".join("\t".join(line) for line in lines).encode("utf-8", "surrogatepass")


def _made(folder: Path) -> Path:
    root = folder / "tiny-imagenet-200"
    images = [f"train/{wnid}/images/{wnid}_{n}.JPEG" for wnid in WNIDS for n in range(2)]
    for name in (*images, *(f"val/images/val_{n}.JPEG" for n in range(3))):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def target(data: bytes, folder: Path) -> None:
    root = _made(folder)
    odd, _, content = data.partition(MARK)
    for name, whole in LISTS.items():
        (root / name).write_bytes(content if name.encode() == odd else whole.encode())
    wnids = tiny_imagenet._classes(root)
    train, test = tiny_imagenet._training_files(root, wnids), tiny_imagenet._test_files(root, wnids)
    assert len({path for path, _ in train}) == len(train), "an image with two labels"
    assert all(path == root / "train" / wnids[label] / "images" / path.name for path, label in train)
    assert all(path == root / "val" / "images" / path.name for path, _ in test)
    literal = [line.split("\t") for line in (root / "val/val_annotations.txt").read_bytes().decode().splitlines()]
    assert [(path.name, wnids[label]) for path, label in test] == [(line[0], line[1]) for line in literal]
    assert len(tiny_imagenet._class_names(root, wnids)) == len(set(wnids)) == len(wnids)
