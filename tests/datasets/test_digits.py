import pytest
import torch
from sklearn.datasets import load_digits

from driveprune import datasets


def test_levels_become_bytes():
    data = datasets.load("digits")
    levels, digits = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert len(data.train) == 1437
    assert len(data.test) == 360
    found = torch.cat([data.train.x, data.test.x]).view(-1, 64).double()
    assert torch.equal(found, (torch.from_numpy(levels)[order] * 255 / 16 + 0.5).floor())
    assert torch.cat([data.train.y, data.test.y]).tolist() == digits[order].tolist()


def test_the_digits_are_frozen():
    """Runs must repeat for years: these bytes may not change."""
    assert datasets.load("digits").fingerprint.startswith("1a8cd007")


def test_there_is_nothing_to_download(tmp_path):
    with pytest.raises(ValueError, match="nothing to download"):
        datasets.get("digits", tmp_path)
