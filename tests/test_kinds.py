from functools import partial
from typing import Annotated, Literal

import numpy as np
import pytest
import torch

from driveprune.kinds import (
    Amount,
    Count,
    Fraction,
    Mode,
    OptionError,
    Positive,
    Range,
    Whole,
    checked,
    kinds_of,
    others,
    qualified,
    same,
)

GOOD = [
    (Count, 3, 3), (Count, np.int32(3), 3), (Count, torch.tensor(3), 3), (Whole, 0, 0), (int, -5, -5),
    (Amount, 0, 0.0), (Amount, np.float32(0.5), 0.5), (Amount, torch.tensor(1.5), 1.5), (Positive, 1e-9, 1e-9),
    (Fraction, 1, 1.0), (bool, True, True), (bool, np.False_, False), (bool, torch.tensor(True), True),
    (str, "a", "a"), (Mode, "evaluation", "evaluation"), (Amount | None, None, None), (Amount | None, 2, 2.0),
    (tuple[str, ...], ["a"], ["a"]), (list, (1,), (1,)), (int | str, "a", "a"),
]  # fmt: skip
BAD = [
    (Count, 0, "x must be a whole number of at least 1, got 0"), (Count, 2.0, "a whole number, got 2.0"),
    (Count, True, "a whole number, got True"), (Count, "3", "a whole number, got '3'"),
    (Count, torch.tensor(True), "a whole number, got"), (Count, torch.ones(2), "a whole number, got a Tensor"),
    (Amount, float("nan"), "a number, got nan"), (Amount, float("inf"), "a number, got inf"),
    (Amount, torch.tensor(float("nan")), "a number, got"), (Amount, -1, "a number of at least 0, got -1"),
    (Positive, 0.0, "a number above 0, got 0.0"), (Fraction, 1.5, "a number from 0 to 1, got 1.5"),
    (Amount, False, "a number, got False"), (Amount, None, "a number, got None"), (Amount | None, "a", "or None"),
    (bool, 1, "true or false, got 1"), (bool, "false", "true or false, got 'false'"), (str, 3, "a word, got 3"),
    (Mode, "eval", '"training" or "evaluation", got \'eval\''), (tuple[str, ...], "ab", "a list, got 'ab'"),
    (tuple[str, ...], [1], "a list, got"), (Count, {"a": 1}, "a whole number, got a dict"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "plain"), GOOD)
def test_values_come_out_as_plain_python_has_them(kind, value, plain):
    found = checked("x", value, kind)
    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize(("kind", "value", "message"), BAD)
def test_what_cannot_be_says_what_can(kind, value, message):
    for error in (OptionError, ValueError, TypeError):  # whichever one catches
        with pytest.raises(error) as found:
            checked("x", value, kind)
        assert message in str(found.value)


def test_kinds_are_those_of_annotations_or_else_of_defaults():
    def plan(a, *, b: Count = 1, c=2, d=None, e=(), f: "NotKnown" = 3):  # noqa: F821
        """Of a function whose annotations cannot all be evaluated, the defaults speak."""

    assert {name: str(kind) for name, kind in kinds_of(plan).items()}["c"] == "<class 'int'>"

    def known(*, b: Count = 1, c=2, d=None, e=()):
        """All can be evaluated."""

    kinds = kinds_of(known)
    assert kinds["b"] == Count
    assert checked("d", object, kinds["d"]) is object
    assert kinds["e"] is tuple


@pytest.mark.parametrize(
    "kind", [Count, Amount, Fraction, bool, Mode, tuple[str, ...], Amount | None, Literal["a", "b"]]
)
def test_others_are_possible_and_other(kind):
    value = {Mode: "training", tuple[str, ...]: ("a", "b"), bool: True, Literal["a", "b"]: "a"}.get(kind, 1)
    found = others(value, kind)
    assert found
    assert value not in found
    assert [checked("x", each, kind) for each in found] == found


def rank(model, *, count=1):
    """A score."""


def test_functions_are_alike_if_made_by_the_same_code_of_the_same_values():
    def made(count):
        return lambda model: count

    assert same(partial(rank, count=2), partial(rank, count=2))
    assert not same(partial(rank, count=2), partial(rank, count=3))
    assert same(made(2), made(2))
    assert not same(made(2), made(3))
    assert same([1, (rank, "a")], [1, (rank, "a")])
    assert not same(1, True)


def test_names_of_functions_have_no_addresses():
    class Callable:
        def __call__(self, model, batch):
            """A loss."""

    assert qualified(rank) == "tests.test_kinds.rank"
    assert qualified(partial(rank, count=2)) == "tests.test_kinds.rank(count=2)"
    assert qualified(Callable()).endswith("Callable")
    assert "0x" not in qualified(partial(rank, count=Callable()))
    assert qualified(pytest) == "pytest"


def test_ranges_in_words():
    assert str(Range()) == ""
    assert checked("x", 5, Annotated[int, Range(high=9)]) == 5
