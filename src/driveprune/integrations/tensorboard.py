"""TensorBoard: curves of a training, densities of layers. Needs `pip install 'driveprune[tensorboard]'`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import Tensor

from driveprune.mask import sparsity
from driveprune.train import Moment

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError("this board needs TensorBoard: pip install 'driveprune[tensorboard]'") from error


class Board:
    """Writes to a folder that TensorBoard shows.

    In your own loop, call `mask` when you like. For `driveprune.fit`, the board itself is the `watch`: rate, loss,
    sparsity and results of each epoch are written as they come.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder, Board(folder) as board:
    ...     board.mask({"weight": torch.tensor([True, False])}, step=0)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer: Any = SummaryWriter(os.fspath(folder))
        self._rows = 0

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write everything out."""
        self._writer.close()

    def mask(self, mask: Mapping[str, Tensor], step: int) -> None:
        """Write the sparsity, and the density of each layer."""
        self._writer.add_scalar("sparsity", sparsity(mask), step)
        for name, kept in mask.items():
            self._writer.add_scalar(f"density/{name}", 1 - sparsity({name: kept}), step)

    def __call__(self, moment: Moment) -> None:
        """Write what is new in a training that is watched."""
        for row in moment.rows[self._rows :]:
            self._rows += 1
            for name, value in row.items():
                if name not in ("cycle", "epoch"):
                    self._writer.add_scalar(name, value, self._rows)
