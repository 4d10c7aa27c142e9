"""Networks for other programs: one file a format.

A format is a file here with one function, `write(path, model, mask, example)`; the file's name is the format's name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from driveprune.export._pixels import Pixels
from driveprune.mask import check_fits

__all__ = ["Pixels", "export", "names"]


def names() -> list[str]:
    """The formats.

    >>> names()
    ['csr', 'onnx', 'safetensors', 'torch-prune']
    """
    return sorted(found.name.replace("_", "-") for found in pkgutil.iter_modules(__path__) if found.name[0] != "_")


def export(
    path: str | Path,
    model: nn.Module,
    mask: Mapping[str, Tensor],
    example: Any,
    *,
    format: str,
    pixels: Pixels | None = None,
    preprocess: bool = True,
) -> None:
    """Write a network in a format that other programs read.

    Args:
        path: the file, or for `csr` the folder, to write.
        model: the network; its removed weights count as zero.
        mask: name -> True where the weight is kept.
        example: an input of the network, such as `x[:1]`; only `onnx` needs it.
        format: onnx (the compacted network), safetensors (a dense state dict), torch-prune (the state dict of
            torch.nn.utils.prune), csr (a SciPy matrix for each layer).
        pixels: for onnx and networks of images: how pixels were normalised in training, and the names of the classes.
            They stand in the file's metadata.
        preprocess: with `pixels`, put the normalisation into the graph: the file takes images as bytes.

    """
    if format not in names():
        raise ValueError(f"format must be one of {', '.join(names())}, got {format!r}")
    if pixels is not None and format != "onnx":
        raise ValueError(f"pixels are for the format onnx, which has a graph and metadata; {format} has neither")
    check_fits(model, mask)
    options = {} if pixels is None else {"pixels": pixels, "preprocess": preprocess}
    module = importlib.import_module(f"driveprune.export.{format.replace('-', '_')}")
    module.write(Path(path), model, mask, example, **options)
