"""Names in a spec that are not the package's own: what they would load, and whether that may be.

A spec may come from somebody else. Its model and its method are names, and to import a name is to run code; its data
may be a folder anywhere. Unless somebody has said that a spec is trusted, or the code here is that of the run by the
checksum in the spec, nothing that it names is imported or opened.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from driveprune import datasets, methods, models
from driveprune.datasets import folder
from driveprune.runs.spec import DENSE, Spec, code_of, located


@dataclass(frozen=True)
class Foreign:
    """A name in a spec that is not the package's own."""

    what: str
    """model, method or data."""
    name: str
    known: bool
    """Whether what it loads here is what the run had, by a checksum."""
    place: str
    """Where it would be loaded from."""


def foreign(spec: Spec) -> list[Foreign]:
    """What a spec names beside the models, methods and data of this package; nothing of it is imported."""
    found = [
        Foreign(what, name, bool(code) and not _is_standard(name) and code == code_of(name), _place(name))
        for what, name, code, own in (
            ("model", spec.recipe.model, spec.model_code, models.names()),
            ("method", spec.method, spec.method_code, [DENSE, *methods.names()]),
        )
        if name not in own
    ]
    data = spec.recipe.data
    if data not in datasets.names():
        found.append(Foreign("data", data, _was_read(data, spec), f"the folder {data}"))
    return found


def check_code(spec: Spec) -> None:
    """An error if code that a spec names is no longer that of the run."""
    for name, code in ((spec.recipe.model, spec.model_code), (spec.method, spec.method_code)):
        if code and code != code_of(name):
            raise ValueError(f"the code of {name} is not that of the run {spec.id}: it has changed")


def check_trusted(spec: Spec, trusted: bool = False, *, has_data: bool = False) -> None:
    """An error that names what a spec would load, unless it is trusted or known by its checksum.

    With `has_data` the data are loaded already: no folder will be read.
    """
    check_code(spec)
    unknown = [] if trusted else [each for each in foreign(spec) if not each.known]
    unknown = [each for each in unknown if not (has_data and each.what == "data")]
    if unknown:
        each = unknown[0]
        why = "reads" if each.what == "data" else "runs"
        raise ValueError(
            f"the spec names the {each.what} {each.name!r}, which is not of this package and has no checksum that "
            f"proves it: this {why} {each.place}; if you trust where the spec comes from, say --trust (trust=True)"
        )


def names_code(spec: Spec) -> bool:
    """Whether a run of this spec imports anything that is not of this package."""
    return any(each.what != "data" for each in foreign(spec))


@contextmanager
def code_here(always: bool = True) -> Iterator[None]:
    """Let modules in the current folder be found, before all others; for good, unless an error comes."""
    here, before = os.getcwd(), list(sys.path)
    if always and here not in sys.path[:1]:
        sys.path.insert(0, here)
    try:
        yield
    except BaseException:
        sys.path[:] = before
        raise


def _place(name: str) -> str:
    found = located(name)
    return str(found) if found is not None else f"code by the name {name}"


def _is_standard(name: str) -> bool:
    """Whether a name is of Python itself: everybody knows the checksums of that."""
    return name.partition(".")[0] in sys.stdlib_module_names


def _was_read(data: str, spec: Spec) -> bool:
    """Whether the images of a folder were read here before, and were those of the run."""
    return folder.known_fingerprint(Path(data).expanduser(), spec.size) == spec.fingerprint
