import os
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from driveprune import datasets
from tests.datasets.written import noise, picture


def folder_of(root, counts, **options):
    for name, count in counts.items():
        for i in range(count):
            picture(root / name / f"{i:02d}.png", seed=crc32(f"{name}{i}".encode()), **options)
    return root


def test_every_fifth_image_of_each_class_is_test_data(tmp_path):
    root = folder_of(tmp_path / "pets", {"dog": 11, "cat": 5, "bird": 4}, size=(8, 8))
    data = datasets.load(str(root))
    assert data.classes == ("bird", "cat", "dog")
    assert data.train.y.tolist() == [0] * 4 + [1] * 4 + [2] * 9
    assert data.test.y.tolist() == [1, 2, 2]
    for image, path in zip(data.test.x, ["cat/04.png", "dog/04.png", "dog/09.png"], strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(Image.open(root / path)))
    assert (data.label, data.note) == ("folder pets", "every fifth image of each class is test data")


@pytest.mark.parametrize("half", ["test", "val"])
def test_train_and_test_folders_are_the_split(tmp_path, half):
    folder_of(tmp_path / "train", {"a": 3, "b": 2}, size=(8, 8))
    folder_of(tmp_path / half / "b" / "deeper", {"x": 2}, size=(8, 8))
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "a" / ".hidden.png").write_text("no image")
    data = datasets.load(str(tmp_path))
    assert data.train.y.tolist() == [0, 0, 0, 1, 1]
    assert data.test.y.tolist() == [1, 1]
    assert data.note == ""


def test_test_images_without_classes_leave_val(tmp_path):
    folder_of(tmp_path / "train", {"a": 2, "b": 2}, size=(8, 8))
    folder_of(tmp_path / "val", {"a": 1, "b": 1}, size=(8, 8))
    folder_of(tmp_path, {"test": 2}, size=(8, 8))
    assert datasets.load(str(tmp_path)).test.y.tolist() == [0, 1]


def test_mixed_sizes_are_resized_and_the_middle_is_kept(tmp_path):
    folder_of(tmp_path, {"a": 5, "b": 5}, size=(20, 20))
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    Image.fromarray(wide).save(tmp_path / "a" / "04.png")
    data = datasets.load(str(tmp_path), size=10)
    assert data.train.shape == (3, 10, 10)
    assert (data.test.x[0] == 200).all()
    assert "resized to 10×10" in data.note
    assert datasets.load(str(tmp_path)).train.shape == (3, 64, 64)
    assert datasets.load(str(tmp_path), size=20).fingerprint != data.fingerprint
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".driveprune-cache")]) == 3


def test_equal_squares_keep_their_size_unless_told(tmp_path):
    folder_of(tmp_path, {"a": 5, "b": 5}, size=(12, 12))
    assert datasets.load(str(tmp_path)).train.shape == (3, 12, 12)
    assert "resized" not in datasets.load(str(tmp_path), size=12).note
    assert datasets.load(str(tmp_path), size=6).train.shape == (3, 6, 6)


def test_grey_palette_and_transparent_images_become_colour(tmp_path):
    folder_of(tmp_path, {"a": 5, "b": 5}, size=(8, 8))
    colours = Image.fromarray(noise(8, 8, 3))
    grey = colours.convert("L")
    grey.save(tmp_path / "a" / "04.png")
    colours.convert("RGBA").save(tmp_path / "b" / "04.png")
    data = datasets.load(str(tmp_path))
    assert all(np.array_equal(plane, np.asarray(grey)) for plane in data.test.x[0].numpy())
    assert np.array_equal(data.test.x[1].permute(1, 2, 0).numpy(), np.asarray(colours))


def test_a_name_wins_over_a_folder_and_a_path_over_a_name(tmp_path, monkeypatch):
    folder_of(tmp_path / "digits", {"a": 5, "b": 5}, size=(8, 8))
    monkeypatch.chdir(tmp_path)
    assert datasets.load("digits").name == "digits"
    assert datasets.load("./digits").name == "folder digits"


def deep(path):
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(path)


FAILURES = {
    "one class": ({"a": 5}, None, "at least two classes, but has 1 folders"),
    "empty class": ({"a": 5, "b": 5}, lambda root: (root / "c").mkdir(), "c has no images"),
    "too small": ({"a": 4, "b": 4}, None, "is too small"),
    "lonely train": ({"train/a": 4, "train/b": 4}, None, "has a folder train, but no folder test or val"),
    "strange class": ({"train/a": 2, "train/b": 2, "val/c": 2}, None, "classes that .*train has not: c"),
    "no test images": (
        {"train/a": 2, "train/b": 2},
        lambda root: (root / "val" / "a").mkdir(parents=True),
        "no images",
    ),
    "damaged": ({"a": 5, "b": 5}, lambda root: (root / "b" / "02.png").write_bytes(b"x"), "cannot decode .*b/02.png"),
    "deep": ({"a": 5, "b": 5}, lambda root: deep(root / "b" / "02.png"), "cannot decode .*b/02.png: its mode I;16"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_is_no_folder_of_class_folders_raises(tmp_path, case):
    counts, change, message = FAILURES[case]
    folder_of(tmp_path, counts, size=(8, 8))
    if change:
        change(tmp_path)
    with pytest.raises(ValueError, match=message):
        datasets.load(str(tmp_path))


def test_an_impossible_size_raises(tmp_path):
    with pytest.raises(ValueError, match="size of images must be at least 1, got 0"):
        datasets.load(str(tmp_path), size=0)
