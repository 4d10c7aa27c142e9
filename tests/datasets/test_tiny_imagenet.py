import dataclasses
import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from driveprune import datasets
from driveprune.datasets import tiny_imagenet as module
from tests.datasets.written import picture, real, tiny_imagenet

FOLDER = "tiny-imagenet-200"


def compare(data, folder):
    """With the images as Pillow alone reads them."""
    wnids = (folder / "wnids.txt").read_text().splitlines()
    number = 0
    for label, wnid in enumerate(wnids):
        for path in sorted((folder / "train" / wnid / "images").iterdir()):
            assert data.train.y[number] == label
            assert same(data.train.x[number], path)
            number += 1
    assert number == len(data.train)
    lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
    for number, line in enumerate(lines):
        name, wnid = line.split()[:2]
        assert wnids[data.test.y[number]] == wnid
        assert same(data.test.x[number], folder / "val" / "images" / name)
    assert len(lines) == len(data.test)


def same(x, path):
    with Image.open(path) as image:
        bands = image.split() if image.mode == "RGB" else image.split() * 3
        return all(np.array_equal(plane, band) for plane, band in zip(x.numpy(), bands, strict=True))


def test_images_are_those_that_pillow_reads(tmp_path):
    tiny_imagenet(tmp_path)
    data = datasets.load("tiny-imagenet", tmp_path)
    compare(data, tmp_path / FOLDER)
    assert data.train.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.test.y.tolist() == [1, 2, 0, 1]
    assert data.classes == ("n03", "Egyptian cat", "tree frog, tree-frog")
    assert data.note == (
        "not the official files: 12 training images instead of 100,000, 4 test images instead of 10,000, "
        "3 classes instead of 200"
    )


def test_words_are_optional(tmp_path):
    tiny_imagenet(tmp_path)
    assert datasets.load("tiny-imagenet", tmp_path / FOLDER).classes[1] == "Egyptian cat"
    (tmp_path / FOLDER / "words.txt").unlink()
    assert datasets.load("tiny-imagenet", tmp_path / FOLDER).classes == ("n03", "n01", "n02")


def zipped(data_dir):
    with zipfile.ZipFile(data_dir / f"{FOLDER}.zip", "w") as archive:
        for path in sorted((data_dir / FOLDER).rglob("*")):
            archive.write(path, path.relative_to(data_dir))
    return hashlib.md5((data_dir / f"{FOLDER}.zip").read_bytes()).hexdigest()


def test_it_is_official_by_the_checksums_in_the_official_archive(tmp_path, monkeypatch):
    def load():
        return datasets.load("tiny-imagenet", tmp_path)

    tiny_imagenet(tmp_path)
    monkeypatch.setattr(module, "ABOUT", dataclasses.replace(module.ABOUT, classes=3, train=12, test=4))
    assert not load().official
    assert load().note == (
        "not known to be the official files, which only tiny-imagenet-200.zip beside tiny-imagenet-200 could tell"
    )
    known = zipped(tmp_path)
    assert load().note == "not the official files: tiny-imagenet-200.zip differs"
    monkeypatch.setattr(module, "ARCHIVE", dataclasses.replace(module.ARCHIVE, md5=known))
    shutil.rmtree(tmp_path / FOLDER)
    assert load().label == "tiny-imagenet"  # unpacked
    assert load().label == "tiny-imagenet"  # from the cache
    picture(tmp_path / FOLDER / "train" / "n01" / "images" / "n01_2.JPEG", seed=55)
    assert load().note == "not the official files: n01_2.JPEG differs"


def test_getting_it_names_the_official_archive(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "download", lambda *args: asked.append(args))
    datasets.get("tiny-imagenet", tmp_path)
    assert asked == [(tmp_path, module.ARCHIVE, "wnids.txt")]
    assert module.ARCHIVE.name == "tiny-imagenet-200.zip"


def damage(folder=Path()):
    jpeg = folder / "train" / "n01" / "images" / "n01_1.JPEG"
    annotations = folder / "val" / "val_annotations.txt"
    return {
        "cut off": (lambda: jpeg.write_bytes(jpeg.read_bytes()[:400]), "cannot decode .*n01_1.JPEG"),
        "no image": (lambda: jpeg.write_bytes(b"hello"), "cannot decode .*n01_1.JPEG"),
        "size": (lambda: picture(jpeg, (32, 32)), "n01_1.JPEG is 32×32 pixels, not 64×64"),
        "class": (lambda: annotations.write_text("val_0.JPEG\tn99\n"), "line 1: 'n99' is none of the classes"),
        "line": (lambda: annotations.write_text("nonsense\n"), "annotations.txt, line 1: ''"),
        "absent": (lambda: annotations.write_text("val_9.JPEG\tn01\n"), "line 1: there is no image .*val_9.JPEG"),
        "empty": (lambda: annotations.write_text(""), "val_annotations.txt is empty"),
        "no classes": (lambda: (folder / "wnids.txt").write_text(""), "wnids.txt lists no classes"),
        "folder": (lambda: shutil.rmtree(folder / "train" / "n02"), "lists n02, but train/n02/images has no JPEG"),
    }


@pytest.mark.parametrize("case", damage())
def test_malformed_files_are_named(tmp_path, case):
    tiny_imagenet(tmp_path)
    change, message = damage(tmp_path / FOLDER)[case]
    change()
    with pytest.raises(ValueError, match=message):
        datasets.load("tiny-imagenet", tmp_path)
    assert not [name for name in os.listdir(tmp_path / FOLDER) if name.startswith(".")]


def test_the_real_one():
    folder = real(FOLDER)
    data = datasets.load("tiny-imagenet", folder)
    compare(data, folder / FOLDER)
    greys = [(image[0] == image[1]).all() and (image[0] == image[2]).all() for image in data.train.x]
    assert 0 < sum(map(bool, greys)) < len(greys)


def test_lists_that_are_no_text_are_named(tmp_path):
    (tmp_path / "tiny-imagenet-200").mkdir()
    (tmp_path / "tiny-imagenet-200" / "wnids.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"wnids\.txt is no text"):
        datasets.load("tiny-imagenet", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("wnids.txt", "n03\nn01\nn03\n", r"wnids\.txt lists n03 more than once"),
        ("wnids.txt", "n03\n../n01\n", r"wnids\.txt names '\.\./n01', which is no name of a file"),
        ("val/val_annotations.txt", "{other}\tn01\n", r"val_annotations\.txt names '.*x\.JPEG', which is no name"),
        ("val/val_annotations.txt", "../x.JPEG\tn01\n", r"names '\.\./x\.JPEG', which is no name of a file"),
    ],
)
def test_lists_name_only_what_is_in_the_folder(tmp_path, name, content, message):
    """Each class once: else its images would have two labels."""
    tiny_imagenet(tmp_path)
    for other in (tmp_path / "x.JPEG", tmp_path / FOLDER / "val" / "x.JPEG"):
        shutil.copy(next((tmp_path / FOLDER / "val" / "images").iterdir()), other)
    (tmp_path / FOLDER / name).write_text(content.format(other=tmp_path / "x.JPEG"))
    with pytest.raises(ValueError, match=message):
        datasets.load("tiny-imagenet", tmp_path)
