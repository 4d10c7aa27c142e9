"""One suite over every data set in the folder."""

from pathlib import Path

import numpy as np
import pytest
import torch

from driveprune import datasets
from driveprune.batches import Batches, split, subset
from tests.datasets.written import WRITERS

NAMES = datasets.names()


@pytest.fixture(params=NAMES)
def place(request, tmp_path):
    """A data set's name, and the folder that its files were written to."""
    WRITERS[request.param](tmp_path)
    return request.param, tmp_path


def test_every_data_set_has_a_test():
    for name in [*NAMES, "folder"]:
        assert (Path(__file__).parent / f"test_{name.replace('-', '_')}.py").exists(), name
    assert sorted(WRITERS) == NAMES


def test_images_and_classes_are_what_they_should_be(place):
    name, folder = place
    data = datasets.load(name, folder)
    assert data.name == name
    for images in (data.train, data.test):
        assert len(images) > 0
        assert images.shape == datasets.describe(name).shape
        assert images.pixels(slice(None)).shape == (len(images), *images.shape)
        assert images.x.dtype == torch.uint8
        assert images.y.dtype == torch.int64
        assert int(images.y.min()) >= 0
        assert int(images.y.max()) < len(data.classes)
    assert len(set(data.classes)) == len(data.classes)
    assert len(data.mean) == len(data.deviation) == data.train.shape[0]
    pixels = data.train.pixels(slice(None)).double() / 255
    assert data.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert data.deviation == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())


def test_the_second_load_is_the_same(place):
    name, folder = place
    first, second = datasets.load(name, folder), datasets.load(name, str(folder))
    assert first.fingerprint == second.fingerprint
    assert (first.mean, first.classes, first.note) == (second.mean, second.classes, second.note)


def test_pixels_and_classes_are_those_that_were_written(place):
    name, folder = place
    written = WRITERS[name](folder)
    if written is None:
        return  # compared with an independent read in its own test
    data = datasets.load(name, folder)
    for images, (x, y) in zip((data.train, data.test), written, strict=True):
        assert np.array_equal(images.pixels(slice(None)).numpy(), x)
        assert np.array_equal(images.y.numpy(), y)


def test_small_copies_are_labelled(place):
    name, folder = place
    data = datasets.load(name, folder)
    if name == "digits":
        assert (data.label, data.note) == ("digits", "")
    else:
        assert data.label == f"{name} (not the official data)"
        assert "not the official files" in data.note


def test_it_gives_batches(place):
    name, folder = place
    data = datasets.load(name, folder)
    training, held = split(subset(data.train, 10), 3)
    assert (len(training), len(held)) == (7, 3)
    batches = Batches(training, size=4, mean=data.mean, deviation=data.deviation, padding=2, flip=True)
    assert [tuple(x.shape) for x, _ in batches] == [(4, *data.train.shape), (3, *data.train.shape)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "digits"])
def test_data_that_are_not_there_say_where_they_were_looked_for(name, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        datasets.load(name, tmp_path / "nothing")
    message = str(error.value)
    assert f"{name} is not in {tmp_path / 'nothing'}" in message
    remedy = (
        "register at https://image-net.org" if name == "imagenet32" else f"`driveprune data get {name} --data-dir"
    )
    assert remedy in message
    assert "\n" not in message


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_are_one_line(name):
    text = str(datasets.describe(name))
    assert text
    assert "\n" not in text
    assert len(text) < 150


def test_unknown_names_say_which_there_are(tmp_path):
    for ask in (datasets.load, datasets.describe, datasets.get):
        with pytest.raises(ValueError, match=r"unknown data set 'cifar'; there are cifar10, .* or a folder of class"):
            ask("cifar")
    with pytest.raises(ValueError, match="unknown data set"):
        datasets.load("folder", tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_only_folders_can_be_resized(name, tmp_path):
    with pytest.raises(ValueError, match=f"the images of {name} have their own size; size=16"):
        datasets.load(name, tmp_path, size=16)


def test_downloads_happen_only_when_asked_for_and_needed(tmp_path, monkeypatch):
    asked = []

    def download(folder):
        asked.append(folder)
        WRITERS["cifar10"](folder)

    monkeypatch.setattr("driveprune.datasets.cifar10.get", download)
    with pytest.raises(FileNotFoundError):
        datasets.load("cifar10", tmp_path)
    assert not asked
    assert len(datasets.load("cifar10", tmp_path, download=True).train) == 50
    datasets.load("cifar10", tmp_path, download=True)
    datasets.load("digits", tmp_path, download=True)
    assert asked == [tmp_path]


def test_without_a_folder_the_cache_of_the_system_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert datasets.default_dir().name == "driveprune"
    monkeypatch.setattr(datasets, "default_dir", lambda: tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "x")):
        datasets.load("mnist")
