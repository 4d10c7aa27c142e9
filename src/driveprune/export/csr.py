"""Sparse matrices for SciPy: a folder with one file a layer, each for `scipy.sparse.load_npz`.

A weight of more than two dimensions is the matrix of its first dimension against all others. Everything else is in
`dense.npz`, the shapes are in `shapes.json`.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn

from driveprune.export._state import masked_state
from driveprune.files import write_atomically


def write(path: Path, model: nn.Module, mask: Mapping[str, Tensor], example: Any = None) -> None:
    """Write the folder; kept weights that happen to be zero are stored, too."""
    path.mkdir(parents=True, exist_ok=True)
    dense, shapes = {}, {}
    for name, value in masked_state(model, mask).items():
        shapes[name] = list(value.shape)
        plain = value.float() if value.dtype == torch.bfloat16 else value
        if name in mask:
            _write_matrix(path / f"{name}.npz", plain.flatten(1), mask[name].cpu().flatten(1))
        else:
            dense[name] = plain.numpy()
    write_atomically(path / "dense.npz", _npz(dense))
    write_atomically(path / "shapes.json", json.dumps(shapes, indent=1).encode())


def _npz(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """What np.savez writes, for any names."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return file.getvalue()


def _write_matrix(path: Path, values: Tensor, kept: Tensor) -> None:
    rows, columns = kept.nonzero(as_tuple=True)
    starts = np.concatenate([[0], np.cumsum(kept.sum(1).numpy())])
    matrix = scipy.sparse.csr_matrix(
        (values[rows, columns].numpy(), columns.numpy(), starts), shape=tuple(kept.shape)
    )
    file = io.BytesIO()
    scipy.sparse.save_npz(file, matrix)
    write_atomically(path, file.getvalue())
