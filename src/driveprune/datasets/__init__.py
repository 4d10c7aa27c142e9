"""The data sets, one file each: `load()` reads the official files, `get()` downloads them, `ABOUT` describes them.

The name of the file is the name of the data set (with - for _). A folder of class folders works wherever a name does.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pooch  # type: ignore[import-untyped]

from driveprune.batches import Data
from driveprune.datasets import folder as class_folders
from driveprune.datasets._source import About


def names() -> list[str]:
    """The data sets of this package.

    >>> names()
    ['cifar10', 'cifar100', 'digits', 'fashion-mnist', 'imagenet32', 'mnist', 'tiny-imagenet']
    """
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in found if not name.startswith("_") and name != "folder")


def load(name: str, data_dir: str | Path | None = None, *, download: bool = False, size: int | None = None) -> Data:
    """A data set by its name, from files below data_dir, or a folder of class folders by its path.

    Knobs:
        download: fetch the official files first if they are not there.
        size: height and width of the images of a folder; other data sets have their own.

    >>> len(load("digits").train)
    1437
    """
    if name not in names():
        return class_folders.load(_folder(name), size=size)
    if size is not None:
        raise ValueError(f"the images of {name} have their own size; size={size} is for folders of images")
    place = Path(data_dir or default_dir())
    try:
        return _module(name).load(place)  # type: ignore[no-any-return]
    except FileNotFoundError:
        if not download:
            raise
    get(name, place)
    return _module(name).load(place)  # type: ignore[no-any-return]


def describe(name: str) -> About:
    """What a data set officially is; as a string it is one line.

    >>> print(describe("digits"))
    handwritten digits; 8×8 grey, 10 classes, 1,437 + 360 images; comes with scikit-learn
    """
    return _module(name).ABOUT  # type: ignore[no-any-return]


def embedded(name: str) -> bool:
    """Whether a data set comes with a package: it has no files of its own, wherever one looks for them.

    >>> embedded("digits"), embedded("cifar10")
    (True, False)
    """
    return bool(getattr(_module(name), "EMBEDDED", False))


def get(name: str, data_dir: str | Path | None = None) -> Path:
    """Download the official files of a data set and unpack them below data_dir; the folder that holds them."""
    return _module(name).get(Path(data_dir or default_dir()))  # type: ignore[no-any-return]


def default_dir() -> Path:
    """Where data sets are kept unless you say otherwise: this system's folder for caches."""
    return Path(pooch.os_cache("driveprune"))


def _module(name: str) -> ModuleType:
    if name not in names():
        raise _unknown(name)
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise _unknown(name)
    return path


def _unknown(name: str) -> ValueError:
    return ValueError(f"unknown data set {name!r}; there are {', '.join(names())}, or a folder of class folders")
