import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.engine import Engine, engine_of
from driveprune.gradients import cross_entropy


def images(count=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long()


def net(dropout=0.2):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(32, 2),
    )  # fmt: skip


class StoppedError(Exception):
    pass


class Kept:
    """Checkpoints in memory; stops after a number of them."""

    def __init__(self, stop_after=None):
        self.state, self.left = None, stop_after

    def load(self):
        return copy.deepcopy(self.state)

    def save(self, state):
        self.state = copy.deepcopy(state)
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise StoppedError


def fitted(engine, method="drive", checkpoints=None, **knobs):
    model = net()
    recipe = replace(dp.recipes.get("strong-general"), batch=25)
    trained = dp.fit(
        model, (images(), images()), sparsity=0.8, method=method, recipe=recipe, epochs=6, engine=engine, knobs=knobs,
        checkpoints=checkpoints, progress=False, **({} if checkpoints is None else {"every": 0.0}),
    )  # fmt: skip
    return model, trained


def same(a, b, tolerance=2e-3):
    return all(
        torch.allclose(x.float(), y.float(), atol=tolerance, rtol=tolerance) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("method", ["drive", "snip", "imp"])
def test_both_engines_train_alike(method):
    dense, by_dense = fitted("dense", method)
    sparse, by_sparse = fitted("sparse", method)
    assert all(torch.equal(by_dense.mask[name], by_sparse.mask[name]) for name in by_dense.mask)
    assert by_sparse.engine == "sparse"
    assert by_dense.engine == "dense"
    assert same(dense.state_dict().values(), sparse.state_dict().values())
    assert [row["loss"] for row in by_dense.rows] == pytest.approx([row["loss"] for row in by_sparse.rows], rel=1e-3)


def test_removed_weights_are_zero_after_the_sparse_engine():
    model, trained = fitted("sparse")
    for name, kept in trained.mask.items():
        weight = model.get_parameter(name)
        assert torch.equal(weight != 0, kept & (weight != 0))
        assert type(model[0]) is nn.Conv2d


def test_a_run_that_was_stopped_goes_on_to_the_same_bits():
    whole, _ = fitted("sparse")
    kept = Kept(stop_after=17)
    with pytest.raises(StoppedError):
        fitted("sparse", checkpoints=kept)
    kept.left = None
    again, _ = fitted("sparse", checkpoints=kept)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(("first", "then"), [("sparse", "dense"), ("dense", "sparse")])
def test_another_engine_goes_on_with_a_run(first, then):
    whole, _ = fitted("dense")
    kept = Kept(stop_after=17)
    with pytest.raises(StoppedError):
        fitted(first, checkpoints=kept)
    assert {name: value.shape for name, value in kept.state["model"].items()} == {
        name: value.shape for name, value in whole.state_dict().items()
    }
    kept.left = None
    again, _ = fitted(then, checkpoints=kept)
    assert same(whole.parameters(), again.parameters())


def test_auto_measures_and_says_what_it_took():
    _, trained = fitted("auto")
    assert trained.speedup is not None
    assert trained.engine == ("sparse" if trained.speedup >= 1.05 else "dense")


@pytest.mark.parametrize(("dense", "engine"), [(1.06, "sparse"), (1.04, "dense"), (0.5, "dense")])
def test_auto_follows_the_measurement(monkeypatch, dense, engine):
    """Of a step with the loss and a batch of the training, on copies."""
    called = []

    def timed(jobs):
        called.append([job() for job in jobs.values()])
        return {"dense": dense, "sparse": 1.0}

    monkeypatch.setattr("driveprune.engine.timed", timed)
    _, trained = fitted("auto")
    assert called == [[None, None]]
    assert (trained.engine, trained.speedup) == (engine, dense)


def test_a_synced_optimiser_has_the_moments_of_the_sparse_one():
    model, (x, y) = net(dropout=0.0), images(20)
    optimizer = torch.optim.Adam(model.parameters())
    mask = {"0.weight": torch.rand(8, 3, 3, 3) < 0.5, "8.weight": torch.rand(2, 32) < 0.2}
    dp.apply(model, mask)
    engine = Engine("sparse", model, optimizer, cross_entropy)
    engine.begin(mask, (x, y))
    assert engine.is_sparse
    for _ in range(3):
        engine.follow()
        engine.optimizer.zero_grad()
        cross_entropy(engine.model, (x, y)).backward()
        engine.optimizer.step()
    engine.sync()
    state = optimizer.state[model[0].weight]
    values = engine.optimizer.state[engine.model.get_parameter("0.weight")]
    assert torch.equal(state["exp_avg"][mask["0.weight"]], values["exp_avg"])
    assert not state["exp_avg"][~mask["0.weight"]].any()
    assert float(state["step"]) == 3
    assert torch.equal(model[0].weight[mask["0.weight"]], engine.model.get_parameter("0.weight"))
    engine.end()
    assert engine.model is model
    assert engine.optimizer is optimizer


def test_rates_of_a_scheduler_reach_the_sparse_optimiser():
    model, batch = net(), images(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine("sparse", model, optimizer, cross_entropy)
    engine.begin({"8.weight": torch.rand(2, 32) < 0.2}, batch)
    optimizer.param_groups[0]["lr"] = 0.125
    engine.follow()
    assert engine.optimizer.param_groups[0]["lr"] == 0.125


def test_errors_name_the_choices():
    with pytest.raises(ValueError, match="engine must be dense, sparse, auto, got 'fast'"):
        engine_of("fast")
    with pytest.raises(ValueError, match="fp32"):
        dp.fit(net(), images(), sparsity=0.5, epochs=1, engine="sparse", precision="bf16", progress=False)
    engine = Engine("sparse", net(), torch.optim.SGD(net().parameters(), lr=1.0), cross_entropy)
    with pytest.raises(ValueError, match="tensor"):
        engine.begin({}, {"x": 1})
