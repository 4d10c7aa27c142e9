import gzip

import numpy as np

from driveprune import datasets
from tests.datasets.written import idx_files, real


def test_other_folders_and_the_folder_of_debian(tmp_path):
    for number, place in enumerate(["fashion-mnist", "FashionMNIST/raw", "fashion"]):
        (x, _), _ = idx_files(tmp_path / str(number) / place, "-ubyte.gz")
        assert datasets.load("fashion-mnist", tmp_path / str(number)).train.x.numpy().tobytes() == x.tobytes()


def test_the_real_one():
    folder = real("fashion-mnist")
    data = datasets.load("fashion-mnist", folder)
    assert (data.official, data.note) == (True, "")
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert (round(data.mean[0], 3), round(data.deviation[0], 3)) == (0.286, 0.353)
    for half, images in (("train", data.train), ("t10k", data.test)):
        for kind, tensor, skip in (("images-idx3", images.x, 16), ("labels-idx1", images.y, 8)):
            with gzip.open(folder / "fashion-mnist" / f"{half}-{kind}-ubyte.gz") as file:
                assert np.array_equal(np.frombuffer(file.read(), np.uint8)[skip:], tensor.numpy().ravel())
