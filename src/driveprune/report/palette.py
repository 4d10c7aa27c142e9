"""Colours and marks of methods: safe for colour-blind readers (Okabe and Ito), the same in every figure."""

from __future__ import annotations

from collections.abc import Sequence

from driveprune.report.groups import base
from driveprune.runs.spec import DENSE

_COLOURS = {
    DENSE: "#555555", "imp": "#0072B2", "snip": "#009E73", "synflow": "#CC79A7", "drive": "#D55E00",
    "grasp": "#56B4E9", "force": "#E69F00", "magnitude": "#8C6BB1", "gmp": "#35618F", "erk": "#8C564B",
    "random": "#7F7F7F", "driveflow": "#AA3377",
}  # fmt: skip
_OTHERS = ("#117733", "#882255", "#332288", "#AA4499", "#999933")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""As matplotlib names them."""
_MARK_OF = {
    "drive": "o", "imp": "s", "snip": "^", "synflow": "D", "grasp": "v", "force": "P", "magnitude": "X", "gmp": "*",
    "erk": "s", "random": "v", "driveflow": "P",
}  # fmt: skip

WORKS = {
    "loading": "#999999", "early training": "#56B4E9", "scoring": "#D55E00", "selection": "#E69F00",
    "training": "#0072B2", "evaluation": "#009E73", "saving": "#CC79A7",
}  # fmt: skip
"""Colours of what the time is spent with."""


def colour(method: str, methods: Sequence[str]) -> str:
    """The colour of a method among those of a figure; variants share it."""
    names = sorted({base(label) for label in methods} - _COLOURS.keys())
    return _COLOURS.get(base(method)) or _OTHERS[names.index(base(method)) % len(_OTHERS)]


def mark(method: str, methods: Sequence[str]) -> str:
    """The mark of a method among those of a figure: always the same one, but variants have different ones.

    >>> mark("imp", ["imp", "drive"]), mark("drive cuts=2", ["imp", "drive cuts=1", "drive cuts=2"])
    ('s', 's')
    """
    variants = [label for label in methods if base(label) == base(method)]
    first = _MARKS.index(_MARK_OF.get(base(method), "D"))
    return _MARKS[(first + variants.index(method)) % len(_MARKS)]


def shade(place: int, count: int) -> str:
    """A colour for the place in an order, from light to dark."""
    shades = ("#A6CEE3", "#6BAED6", "#3182BD", "#08519C", "#08306B", "#031A38")
    return shades[min(len(shades) - 1, round(place * (len(shades) - 1) / max(1, count - 1)))]
