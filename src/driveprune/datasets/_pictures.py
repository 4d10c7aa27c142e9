"""Image files: decoded one by one, with a progress bar on a terminal, and errors that name the file."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rich.progress import track

from driveprune.files import open_regular
from driveprune.screen import Screen

T = TypeVar("T")
_DEEP = ("I", "F")
"""Modes with more than eight bits; conversion to colour would cut them off."""


def decode(path: Path, size: int, *, resize: bool = False) -> NDArray[np.uint8]:
    """The pixels of an image file in colour, (3, size, size).

    With `resize` the shorter side is brought to `size` and the middle kept; without, another size is an error.
    """
    with _opened(path) as image:
        if image.mode.startswith(_DEEP):
            raise ValueError(f"its mode {image.mode} has more than eight bits a channel")
        colour = image.convert("RGB")
    if resize:
        colour = ImageOps.fit(colour, (size, size), Image.Resampling.BILINEAR)
    if colour.size != (size, size):
        raise ValueError(f"{path} is {colour.width}×{colour.height} pixels, not {size}×{size}")
    return np.asarray(colour).transpose(2, 0, 1)


def decode_all(files: Sequence[Path], size: int, *, resize: bool = False, what: str) -> Iterator[NDArray[np.uint8]]:
    """The pixels of image files one after the other, each (1, 3, size, size)."""
    return (decode(path, size, resize=resize)[None] for path in progress(files, f"decoding {what}"))


def sizes(files: Sequence[Path]) -> set[tuple[int, int]]:
    """The sizes that occur, read from the beginnings of the files."""
    return {_size(path) for path in progress(files, "looking at sizes")}


def _size(path: Path) -> tuple[int, int]:
    with _opened(path) as image:
        return image.size


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image file, of which not a pixel is decoded yet; an error that names it, whatever is wrong with it.

    It is one of the known kinds whatever its name (Pillow would give others to programs that run what is in them),
    and has so many pixels at most as Pillow thinks safe: a file of some kilobytes may unpack to gigabytes. Where
    they are many, the file has a byte for each 1024 of them, as those of photographs have by far.
    """
    with open_regular(path) as file, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file, formats=_KINDS) as image:
                _check_pixels(image.width * image.height, os.fstat(file.fileno()).st_size)
                yield image
        except Exception as error:  # decoders of damaged files raise nearly everything
            raise ValueError(f"cannot decode {path}: {error}") from None


def _check_pixels(count: int, size: int) -> None:
    if count > max(_FEW_PIXELS, _PIXELS_OF_A_BYTE * size):
        raise ValueError(f"a file of {size:,} bytes cannot hold the {count:,} pixels that it claims")


_FEW_PIXELS, _PIXELS_OF_A_BYTE = 1 << 24, 1024
_KINDS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def progress(things: Iterable[T], description: str) -> Iterable[T]:
    """The same things, with a progress bar if a person is watching."""
    console = Screen(stderr=True)
    return track(things, description, transient=True, console=console, disable=not sys.stderr.isatty())
