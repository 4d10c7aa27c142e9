"""Methods × entry points × knobs: another value of a knob changes what comes out, or is refused.

New methods and knobs are tested by themselves: the values to try are made from the knob's kind and default. The
callbacks and the command `run` stand in tests/integrations/test_knobs.py and tests/runs/test_knobs.py.
"""

import functools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import driveprune as dp
from driveprune.kinds import OptionError, others
from driveprune.plan import early
from driveprune.schedule import exponential
from tests.nets import convnet, images

QUICK = {
    "drive": {"early_epochs": 1.0, "cuts": 5},
    "driveflow": {"early_epochs": 1.0, "cuts": 5},
    "force": {"cuts": 5},
    "gmp": {"cuts": 4},
    "imp": {"cycles": 2, "cycle_epochs": 2.0},
    "synflow": {"cuts": 5},
}
BESIDE = {
    ("drive", "combine"): {"batches_per_cut": 2},
    ("driveflow", "combine"): {"batches_per_cut": 2},
    ("magnitude", "cuts"): {"window": 2.0},
    ("magnitude", "path"): {"window": 2.0},
}
"""What a knob needs beside it to act."""
TRAINS_BETWEEN = {"gmp", "imp"}
EPOCHS = 6
CASES = [(method, knob) for method in dp.methods.names() for knob in dp.methods.knobs(method)]
pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


def data():
    return [images(seed=seed) for seed in range(3)]


def net():
    made = convnet()
    for seed in range(5):  # running statistics that are neither the initial ones nor those of a batch
        made.train()(images(seed=10 + seed)[0])
    return made


def by_prune(method, knobs):
    cuts = []
    mask = dp.prune(
        net(), data(), method=method, sparsity=0.9, knobs=knobs, progress=lambda *at: cuts.append(at)
    )  # fmt: skip
    return {name: kept.tolist() for name, kept in mask.items()}, cuts


def by_pruner(method, knobs):
    model, seen = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = dp.Pruner(
        model, optimizer, data(), method=method, sparsity=0.9, epochs=EPOCHS, steps_per_epoch=3, knobs=knobs,
        progress=lambda *at: seen.append(at),
    )  # fmt: skip
    for _ in range(pruner.epochs):
        for x, y in data():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            pruner.step()
            seen.append((pruner.cycle, pruner.cycle_step, dp.sparsity(pruner.mask)))
    return {name: kept.tolist() for name, kept in pruner.mask.items()}, seen


def by_fit(method, knobs):
    seen = []
    trained = dp.fit(
        net(), data(), method=method, sparsity=0.9, epochs=EPOCHS, knobs=knobs,
        watch=lambda moment: seen.append((moment.step, moment.work)),
    )  # fmt: skip
    return {name: kept.tolist() for name, kept in trained.mask.items()}, seen


ENTRIES = {"prune": by_prune, "Pruner": by_pruner, "fit": by_fit}


def only_cut(method, knobs):
    """Without the knobs that are for training."""
    known = dp.prune(net(), data(), method=method, sparsity=0.9).provenance["knobs"]
    return {name: value for name, value in knobs.items() if name in known}


@functools.cache
def outcome(by, method, given):
    return by(method, dict(given))


def outcome_or_error(by, method, knobs):
    try:
        return by(method, knobs)
    except ValueError as error:
        return str(error)


def beside(method, knob):
    """The knobs that make a method quick, and those that a knob needs beside it to act."""
    return {**QUICK.get(method, {}), **BESIDE.get((method, knob), {})}


def check_acts(by, method, knob, others):
    """Another value gives another outcome of an entry point, or an error that names the knob."""
    usual, refused = outcome(by, method, tuple(others.items())), []
    for value in values_to_try(method, knob):
        found = outcome_or_error(by, method, {**others, knob: value})
        if isinstance(found, str):
            assert knob in found
            refused.append(value)
        elif found != usual:
            return
    assert refused, f"{knob} of {method} does nothing in {by.__name__}"


def values_to_try(method, knob):
    default = {**dp.methods.knobs(method), **QUICK.get(method, {})}[knob]
    return others(default, dp.methods.kinds(method)[knob])


@pytest.mark.parametrize(("method", "knob"), CASES)
def test_there_is_a_value_to_try(method, knob):
    assert values_to_try(method, knob), f"{knob} of {method} needs an annotation that says what it can be"


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("method", "knob"), CASES)
def test_another_value_changes_what_comes_out_or_is_refused(method, knob, entry):
    others = beside(method, knob)
    if entry == "prune":
        if method in TRAINS_BETWEEN:
            with pytest.raises(ValueError, match="trains between its cuts"):
                dp.prune(net(), data(), method=method, sparsity=0.9, knobs=others)
            return
        others = only_cut(method, others)
    check_acts(ENTRIES[entry], method, knob, others)


@pytest.mark.parametrize(("method", "knob"), [case for case in CASES if case[0] not in TRAINS_BETWEEN])
def test_provenance_has_the_knobs_that_prune_takes(method, knob):
    """And those that it refuses are not in it, whether they are given or not."""
    known = dp.prune(net(), data(), method=method, sparsity=0.9).provenance["knobs"]
    default = dp.methods.knobs(method)[knob]
    if knob in known:
        assert known[knob] == (list(default) if isinstance(default, tuple) else default)
        return
    others = BESIDE.get((method, knob), {})
    if others and "window" not in others:
        known = dp.prune(net(), data(), method=method, sparsity=0.9, knobs=others).provenance["knobs"]
        assert known[knob] == default
        return
    for value in (default, *values_to_try(method, knob)):
        if value is not None:
            refused = rf"{knob}=.* would do nothing.*Pruner and driveprune.fit|would do nothing with {knob}={value}:"
            with pytest.raises(OptionError, match=refused):
                dp.prune(net(), data(), method=method, sparsity=0.9, knobs={knob: value, **others})


BAD = {bool: ["false", 1, 0, None], int: [2.5, "3", True, float("nan"), None, -1, 0], float: ["abc", True]}
ALWAYS_BAD = [float("nan"), float("inf"), object(), {"a": 1}, -1e9]


@pytest.mark.parametrize(("method", "knob"), CASES)
def test_values_that_cannot_be_are_refused_by_all_entry_points(method, knob):
    default = dp.methods.knobs(method)[knob]
    for value in (*BAD.get(type(default), ()), *ALWAYS_BAD):
        given = {"method": method, "sparsity": 0.9, "knobs": {knob: value}}
        with pytest.raises((ValueError, TypeError), match=knob):
            dp.prune(net(), data(), **given)
        with pytest.raises((ValueError, TypeError), match=knob):
            dp.Pruner(net(), None, data(), epochs=60, steps_per_epoch=3, **given)
        with pytest.raises((ValueError, TypeError), match=knob):
            dp.fit(net(), data(), epochs=6, progress=False, **given)


@pytest.mark.parametrize("make", [int, torch.tensor, np.int64])
def test_numbers_of_numpy_and_torch_are_numbers(make):
    given = {"knobs": {"cuts": make(3)}, "seed": make(1), "min_kept": make(2)}
    mask = dp.prune(net(), data(), sparsity=torch.tensor(0.5), **given)
    assert mask.provenance["knobs"]["cuts"] == 3
    assert (mask.provenance["seed"], mask.provenance["min_kept"]) == (1, 2)


def own(model, mask, batches, *, loss, generator):
    """A score of one's own."""
    weights = dict(model.named_parameters())
    return {name: weights[name].detach().abs() for name in mask}


def own_plan(sparsity, steps, steps_per_epoch, *, early_epochs=1.0, cuts=10):
    """Without annotations."""
    return [*early(early_epochs, steps_per_epoch), dp.Prune(own, exponential(sparsity, cuts)), dp.Train(steps)]


def test_a_method_of_ones_own_is_checked_alike():
    mine = types.ModuleType("mine")
    mine.plan = own_plan
    assert dp.prune(net(), data(), method=mine, sparsity=0.9).provenance["knobs"] == {"cuts": 10}
    with pytest.raises(OptionError, match=r"early_epochs=1.0 would do nothing: it says how mine trains"):
        dp.prune(net(), data(), method=mine, sparsity=0.9, knobs={"early_epochs": 1.0})
    with pytest.raises(OptionError, match=r"cuts must be a whole number, got 2.5"):
        dp.prune(net(), data(), method=mine, sparsity=0.9, knobs={"cuts": 2.5})
    pruner = dp.Pruner(net(), None, data(), method=mine, sparsity=0.9, epochs=6, steps_per_epoch=3)
    assert pruner.mask.provenance["knobs"] == {"early_epochs": 1.0, "cuts": 10}


@pytest.mark.parametrize(
    ("method", "knobs", "message"),
    [
        ("drive", {"terms": ["magnitude"], "batches_per_cut": 2}, "batches_per_cut would do nothing with terms="),
        ("drive", {"terms": ["magnitude"], "combine": "squares"}, "combine would do nothing with terms="),
        ("drive", {"terms": ["magnitude"], "fresh": False}, "fresh would do nothing with terms="),
        ("drive", {"terms": ["magnitude"], "mode": "evaluation"}, "mode would do nothing with terms="),
        ("drive", {"combine": "squares"}, 'combine="squares" would do nothing with batches_per_cut=1'),
        ("drive", {"fresh": False, "cuts": 1}, "fresh=False would do nothing with cuts=1"),
        ("drive", {"fresh": False, "window": 2.0}, "fresh=False cannot be with window=2.0"),
        ("drive", {"window": 2.0, "cuts": 1}, "window=2.0 would do nothing with cuts=1"),
        ("driveflow", {"path": "cubic", "cuts": 1}, "path='cubic' would do nothing with cuts=1"),
        ("synflow", {"window": 2.0, "path": "cubic", "cuts": 1}, "window=2.0 and path='cubic' would do nothing"),
        ("magnitude", {"cuts": 5}, "cuts=5, path='exponential' would do nothing with window=0"),
        ("magnitude", {"path": "cubic"}, "path='cubic' would do nothing with window=0"),
        ("force", {"revive": False, "cuts": 1}, "revive and fresh do nothing with cuts=1"),
        ("gmp", {"begin": 0.2, "cuts": 1}, "begin=0.2 would do nothing with cuts=1"),
        ("gmp", {"begin": 0.8, "end": 0.2}, "begin and end must satisfy"),
        ("imp", {"cycle_epochs": 1.0, "rewind_epochs": 2.0}, "rewind_epochs must not be more than a cycle has"),
    ],
)
def test_knobs_that_do_nothing_beside_others_are_refused(method, knobs, message):
    with pytest.raises(OptionError if "satisfy" not in message else ValueError, match=message):
        dp.Pruner(net(), None, data(), method=method, sparsity=0.9, epochs=60, steps_per_epoch=3, knobs=knobs)
