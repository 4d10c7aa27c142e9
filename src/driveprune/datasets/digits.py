"""Handwritten digits, 8×8 pixels, as scikit-learn brings them: nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from driveprune.batches import Data, Images, statistics
from driveprune.datasets._source import About

ABOUT = About("handwritten digits", (1, 8, 8), 10, 1437, 360, "comes with scikit-learn")
EMBEDDED = True
"""There are no files of it."""


def load(data_dir: Path | None = None) -> Data:
    """The digits: 1437 for training and 360 for testing, by one fixed shuffle.

    Their grey levels 0..16 become 0..255: (level·255 + 8) // 16, which rounds a half up.

    Reference: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415  (half a second that other data sets need not wait for)

    levels, digits = load_digits(return_X_y=True)
    x = torch.from_numpy((levels.astype(np.int64) * 255 + 8) // 16).to(torch.uint8).view(-1, *ABOUT.shape)
    everything = Images(x, torch.from_numpy(digits).long())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = everything.take(order[: ABOUT.train]), everything.take(order[ABOUT.train :])
    return Data("digits", train, test, tuple("0123456789"), *statistics(train), official=True)


def get(data_dir: Path) -> Path:
    """There is nothing to download."""
    raise ValueError("digits comes with scikit-learn: there is nothing to download")
