"""How methods are found: by name, by dotted name, as a module, as a function."""

import sys
import types

import pytest
import torch

import driveprune as dp
from driveprune.plan import Prune
from tests.nets import batch, mlp


def by_position(model, mask, batches, *, loss, generator):
    """A score of one's own: later weights are better."""
    return {name: torch.arange(kept.numel()).view(kept.shape) for name, kept in mask.items()}


@pytest.fixture
def own_module(monkeypatch):
    module = types.ModuleType("own_methods")
    module.score = by_position
    monkeypatch.setitem(sys.modules, "own_methods", module)
    return module


def test_functions_modules_and_dotted_names_give_the_same(own_module):
    masks = [
        dp.prune(mlp(), [batch()], method=method, sparsity=0.1)
        for method in (by_position, own_module, "own_methods", "own_methods.score")
    ]
    assert all(torch.equal(mask["0.weight"], masks[0]["0.weight"]) for mask in masks)
    assert not masks[0]["4.weight"][0, 0]
    assert masks[0].provenance["method"] == "tests.methods.test_names.by_position"


def test_a_module_with_a_plan_has_knobs(own_module):
    def plan(sparsity, steps, steps_per_epoch, *, cuts=2):
        return [Prune(by_position, (sparsity / 2,) * (cuts - 1) + (sparsity,)), dp.Train(steps)]

    own_module.plan = plan
    assert dp.methods.knobs("own_methods") == {"cuts": 2}
    kept = dp.prune(mlp(), [batch()], method="own_methods", sparsity=0.1, knobs={"cuts": 3})
    assert dp.sparsity(kept) == pytest.approx(0.1)


def test_own_scores_work_in_the_pruner():
    net = mlp()
    pruner = dp.Pruner(
        net, torch.optim.SGD(net.parameters(), lr=0.1), [batch()], method=by_position, sparsity=0.1, epochs=1,
        steps_per_epoch=1,
    )  # fmt: skip
    assert dp.sparsity(pruner.mask) == pytest.approx(0.1)


def test_unknown_methods_and_knobs_are_listed():
    with pytest.raises(
        ValueError, match="unknown method 'drve'; there are drive, driveflow, erk, force, gmp, grasp, imp"
    ):
        dp.prune(mlp(), [batch()], method="drve", sparsity=0.9)
    with pytest.raises(ValueError, match="unknown method 'no.such.thing'"):
        dp.prune(mlp(), [batch()], method="no.such.thing", sparsity=0.9)
    with pytest.raises(ValueError, match="synflow has no knob 'cut'; it has early_epochs, cuts"):
        dp.prune(mlp(), [batch()], method="synflow", sparsity=0.9, knobs={"cut": 3})
    with pytest.raises(ValueError, match="by_position has no knob 'cuts'; it has none"):
        dp.prune(mlp(), [batch()], method=by_position, sparsity=0.9, knobs={"cuts": 3})
    with pytest.raises(TypeError, match="a name, a module, a score function or a plan, got 7"):
        dp.prune(mlp(), [batch()], method=7, sparsity=0.9)


def test_a_broken_import_in_a_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_methods.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        dp.prune(mlp(), [batch()], method="broken_methods.score", sparsity=0.9)
