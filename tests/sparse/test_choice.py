"""Which layers torch computes: a measurement, made once, that changes nothing else."""

import random
from functools import partial

import numpy
import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.sparse import choice
from driveprune.sparse.layers import SparseLayer, sparse_layer
from tests.sparse.literal import assert_near, floats


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch):
    monkeypatch.setattr(choice, "_measured", {})
    monkeypatch.setattr(choice, "WORTH_MEASURING", 0)


def layer(density, outputs=20, inputs=30):
    kept = torch.rand(outputs, inputs, generator=torch.Generator().manual_seed(0)) < density
    return sparse_layer(nn.Linear(inputs, outputs), kept)


def clock(monkeypatch, dense, sparse):
    """Measurements come out as said."""
    seconds = iter([dense, sparse])
    monkeypatch.setattr(choice, "_seconds", lambda work: next(seconds))


def test_clearly_sparse_layers_are_not_measured(monkeypatch):
    clock(monkeypatch, 0.0, 1.0)
    assert not choice.is_dense_faster(layer(0.1), torch.Size([1, 30]))
    assert not choice._measured


def test_tiny_layers_are_not_measured(monkeypatch):
    clock(monkeypatch, 0.0, 1.0)
    monkeypatch.setattr(choice, "WORTH_MEASURING", 20 * 30 * choice.BATCH + 1)
    assert not choice.is_dense_faster(layer(0.9), torch.Size([1, 30]))
    monkeypatch.setattr(choice, "WORTH_MEASURING", 20 * 30 * choice.BATCH)
    assert choice.is_dense_faster(layer(0.9), torch.Size([1, 30]))


@pytest.mark.parametrize(("dense", "expected"), [(0.5, True), (0.84, True), (0.86, False), (2.0, False)])
def test_the_faster_one_is_chosen(monkeypatch, dense, expected):
    clock(monkeypatch, dense, 1.0)
    assert choice.is_dense_faster(layer(0.9), torch.Size([1, 30])) is expected


def test_a_shape_is_measured_once(monkeypatch):
    clock(monkeypatch, 0.5, 1.0)
    for batch in (1, 64):
        assert choice.is_dense_faster(layer(0.9), torch.Size([batch, 30]))
    assert len(choice._measured) == 1


def test_a_measurement_changes_nothing():
    one = layer(0.9)
    before, state = one.weight.clone(), torch.get_rng_state()
    assert choice.is_dense_faster(one, torch.Size([1, 30])) in {True, False}
    assert torch.equal(one.weight, before)
    assert one.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_layers_are_measured_too():
    one = layer(0.9).requires_grad_(False)
    with torch.no_grad():
        assert choice.is_dense_faster(one, torch.Size([1, 30])) in {True, False}


@pytest.mark.parametrize("shape", [(3, 30), (3, 5, 30), (3, 5, 2, 30)])
def test_networks_whose_layers_are_dense(monkeypatch, shape):
    monkeypatch.setattr("driveprune.sparse.graphs.is_dense_faster", lambda layer, shape: True)
    monkeypatch.setattr(choice, "timed", lambda jobs: {"dense": 2.0, "sparse": 1.0})
    net = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4))
    mask = {name: torch.rand(net.get_parameter(name).shape) < 0.9 for name in ("0.weight", "2.weight")}
    found = dp.sparsify(net, mask, floats(*shape))
    dense = dp.densify(found)
    layers = [module for module in found.modules() if isinstance(module, SparseLayer)]
    assert [each.dense for each in layers] == [len(shape) == 2] * 2
    x = floats(*shape)
    assert_near(found(x), dense(x))
    found(x).square().sum().backward()
    dense(x).square().sum().backward()
    assert_near(layers[0].weight.grad, dense[0].weight.grad[mask["0.weight"]])
    never = dp.sparsify(net, mask, floats(*shape), layers="sparse")
    assert not any(module.dense for module in never.modules() if isinstance(module, SparseLayer))


# Whole networks.


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Branching(Small):
    """torch.fx does not follow it: it runs layer by layer."""

    def forward(self, x):
        return super().forward(x if float(x.detach().sum()) > 0 else -x)


def by_works(monkeypatch, inference, training):
    """Times by the kind of work and the batch; what was asked for is returned."""
    asked = []

    def times(twin, own, work, inputs):
        asked.append((work, len(inputs.args[0])))
        found = inference if work == choice.INFERENCE else training
        return found(len(inputs.args[0])) if callable(found) else found

    monkeypatch.setattr(choice, "_times", times)
    return asked


SLOW, FAST = {"dense": 1.0, "sparse": 2.0}, {"dense": 2.0, "sparse": 1.0}


def noted(runs, function, *args):
    runs.append(function)
    return function(*args)


@pytest.mark.parametrize("density", [0.05, 0.9])
@pytest.mark.parametrize("make", [Small, Branching])
@pytest.mark.parametrize(("inference", "training"), [(SLOW, FAST), (FAST, SLOW), (SLOW, SLOW), (FAST, FAST)])
def test_each_work_is_done_in_the_faster_way(monkeypatch, make, density, inference, training):
    by_works(monkeypatch, inference, training)
    monkeypatch.setattr("driveprune.sparse.graphs.is_dense_faster", lambda layer, shape: False)
    net = make()
    mask = {name: torch.rand(net.get_parameter(name).shape) < density for name in ("a.weight", "b.weight")}
    fast = dp.sparsify(net, mask, floats(1, 6))
    runs = []
    for layer in (module for module in fast.modules() if isinstance(module, SparseLayer)):
        monkeypatch.setattr(layer, "forward_dense", partial(noted, runs, layer.forward_dense))
    dense = dp.densify(fast)
    for learns, times in ((False, inference), (True, training)):
        runs.clear()
        with torch.set_grad_enabled(learns):
            x = floats(5, 6)
            assert_near(fast(x), dense(x))
        assert len(runs) == (2 if times is SLOW else 0)
    found = dp.explain(fast)
    expected = ["dense" if each is SLOW else "sparse" for each in (inference, training)]
    assert [found.inference, found.training] == expected
    fast(floats(5, 6)).square().sum().backward()
    dense(floats(5, 6)).square().sum().backward()
    for name, kept in mask.items():
        assert_near(fast.get_parameter(name).grad, dense.get_parameter(name).grad[kept])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (1, [("inference", 1), ("inference", 32), ("training step", 32)]),
        (2, [("inference", 2), ("inference", 32), ("training step", 32)]),
        (10, [("inference", 10), ("training step", 10)]),
    ],
)
def test_the_batches_that_are_measured(monkeypatch, batch, expected):
    asked = by_works(monkeypatch, FAST, FAST)
    net = Small()
    fast = dp.sparsify(net, {"a.weight": torch.rand(8, 6) < 0.5}, floats(batch, 6))
    assert asked == expected
    assert [(each.work, each.batch) for each in dp.explain(fast).timings] == expected


def test_nothing_is_measured_for_sparse_layers(monkeypatch):
    asked = by_works(monkeypatch, SLOW, SLOW)
    found = dp.explain(dp.sparsify(Small(), {"a.weight": torch.rand(8, 6) < 0.5}, floats(1, 6), layers="sparse"))
    assert not asked
    assert (found.inference, found.training, found.timings) == ("sparse", "sparse", ())


def test_a_frozen_network_is_not_measured_in_training(monkeypatch):
    asked = by_works(monkeypatch, SLOW, FAST)
    net = Small().requires_grad_(False)
    found = dp.explain(dp.sparsify(net, {"a.weight": torch.rand(8, 6) < 0.5}, floats(8, 6)))
    assert asked == [("inference", 8)]
    assert (found.inference, found.training) == ("dense", "dense")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([{"sparse": 0.96, "dense": 1.0}], "sparse"),
        ([{"sparse": 0.98, "dense": 1.0}], "dense"),
        ([{"sparse": 0.5, "dense": 1.0}, {"sparse": 1.02, "dense": 1.0}], "sparse"),
        ([{"sparse": 0.5, "dense": 1.0}, {"sparse": 1.05, "dense": 1.0}], "dense"),
        ([{"sparse": 0.99, "dense": 1.0}, {"sparse": 0.99, "dense": 1.0}], "dense"),
        ([{"sparse": 0.9, "dense": 1.0, "channels last": 0.8}], "channels last"),
        ([{"sparse": 2.0, "dense": 1.0, "channels last": 0.98}], "dense"),
        ([{"sparse": 2, "dense": 1.0, "channels last": 0.5}, {"sparse": 2, "dense": 1.0, "channels last": 1.2}],
         "channels last"),
        ([{"sparse": 2, "dense": 1.0, "channels last": 0.9}, {"sparse": 2, "dense": 1.0, "channels last": 1.5}],
         "dense"),
    ],
)  # fmt: skip
def test_the_decision(times, expected):
    assert choice.fastest_way(times) == expected


class Clock:
    """Time that passes only when a job runs; that of the processors is a tenth of it, if nothing else is said."""

    def __init__(self, monkeypatch):
        self.now, self.worked, self.runs = 0.0, 0.0, []
        monkeypatch.setattr(choice.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(choice.time, "process_time", lambda: self.worked)

    def job(self, name, *seconds, work=None):
        def run():
            count = self.runs.count(name)
            self.runs.append(name)
            self.now += seconds[min(count, len(seconds) - 1)]
            self.worked += seconds[-1] / 10 if work is None else work

        return run


def test_the_first_run_does_not_count(monkeypatch):
    clock = Clock(monkeypatch)
    found = choice.timed({"dense": clock.job("dense", 0.9, 0.5), "sparse": clock.job("sparse", 60.0, 0.4)})
    assert found == pytest.approx({"dense": 0.5, "sparse": 0.4})
    assert not found.busy


def test_what_is_near_is_measured_in_turn_and_what_is_clear_once(monkeypatch):
    clock = Clock(monkeypatch)
    jobs = {"dense": clock.job("dense", 1.0), "channels last": clock.job("channels last", 1.1),
            "sparse": clock.job("sparse", 5.0)}  # fmt: skip
    assert not choice.timed(jobs).busy
    assert clock.runs == [*jobs, *jobs, *reversed(jobs)]  # that took long enough
    clock.runs.clear()
    jobs = {"dense": clock.job("dense", 0.01), "channels last": clock.job("channels last", 0.011),
            "sparse": clock.job("sparse", 0.05)}  # fmt: skip
    choice.timed(jobs)
    assert clock.runs.count("sparse") == 1 + choice.LEAST_ROUNDS
    assert clock.runs.count("dense") > 1 + choice.LEAST_ROUNDS
    assert clock.runs[12:16] == ["channels last", "dense", "dense", "channels last"]
    clock.runs.clear()
    choice.timed({"dense": clock.job("dense", 0.1), "sparse": clock.job("sparse", 0.01)})
    assert len(clock.runs) == 2 * (1 + choice.LEAST_ROUNDS)


def test_stalls_of_a_busy_machine_are_waited_out(monkeypatch):
    clock = Clock(monkeypatch)
    stalled = clock.job("dense", 0.1, 0.13, 0.15, 0.14, 0.01, 0.2, 0.0101)
    found = choice.timed({"dense": stalled, "sparse": clock.job("sparse", 0.012)})
    assert found == {"dense": pytest.approx(0.01), "sparse": pytest.approx(0.012)}


def test_on_a_machine_that_is_too_busy_the_time_of_the_processors_decides(monkeypatch):
    clock = Clock(monkeypatch)
    never_twice = [0.1 * 1.3 ** (number % 20) for number in range(100)]
    jobs = {"dense": clock.job("dense", *never_twice[5:], work=0.02),
            "sparse": clock.job("sparse", *never_twice[:40], work=0.03)}  # fmt: skip
    found = choice.timed(jobs)
    assert found.busy
    assert found == {"dense": pytest.approx(0.02), "sparse": pytest.approx(0.03)}
    assert clock.now < 20
    quiet = choice.timed({"dense": clock.job("a", 0.02), "sparse": clock.job("b", 0.02)})
    assert not quiet.busy


def test_quick_passes_are_measured_often_but_not_for_ever(monkeypatch):
    clock = Clock(monkeypatch)
    choice.timed({"dense": clock.job("dense", 1e-5), "sparse": clock.job("sparse", 1e-5)})
    assert clock.runs.count("dense") == 1 + choice.MOST_ROUNDS
    clock.runs.clear()
    start = clock.now
    choice.timed({"dense": clock.job("dense", 0.05), "sparse": clock.job("sparse", 0.05)})
    assert clock.runs.count("dense") == 1 + choice.LEAST_ROUNDS
    assert clock.now - start < 0.5


class Noisy(nn.Module):
    """Draws random numbers of three kinds, counts, and refuses single examples in training."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        scale = random.random() + float(numpy.random.rand()) + float(torch.rand(()))
        return self.norm(self.a(x)) * (1 if scale > -1 else 2)


@pytest.mark.filterwarnings("ignore:the network runs by its own code, layer by layer:driveprune.SparseWarning")
def test_measuring_leaves_no_trace():
    net = Noisy().train()
    state = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    fast = dp.sparsify(net, {"a.weight": torch.rand(8, 6, generator=torch.Generator()) < 0.5}, floats(1, 6))
    assert dp.explain(fast).timings
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == state[:2]
    assert torch.equal(torch.get_rng_state(), state[2])
    assert fast.count == net.count == 0
    assert fast.training
    assert all(module.training for module in fast.modules())
    assert fast.norm.num_batches_tracked == 0
    assert all(weight.grad is None for weight in fast.parameters())


class Picky(Small):
    def forward(self, x):
        if len(x) != 2:
            raise RuntimeError("two inputs, please\nor none")
        return super().forward(x)


def test_what_cannot_be_measured_is_said():
    fast = dp.sparsify(Picky(), {"a.weight": torch.rand(8, 6) < 0.5}, floats(2, 6))
    found = dp.explain(fast)
    assert [each.batch for each in found.timings] == [2]
    assert found.notes == (
        "inference, batch 32: RuntimeError: two inputs, please",
        "training step, batch 32: RuntimeError: two inputs, please",
    )
    assert "not measured: training step, batch 32" in str(found)


def test_examples_are_repeated():
    x, edges = torch.arange(3.0)[:, None], torch.zeros(2, 5)
    given = {"y": torch.arange(3), "scale": torch.tensor(2.0)}
    found = choice.repeated(choice.Inputs((x, [edges, None, 7]), given), 3, 7)
    assert found.args[0].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert found.args[1][0] is edges
    assert found.kwargs["y"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert found.kwargs["scale"] == 2.0
    assert choice.batch_of(choice.Inputs((), {"scale": torch.tensor(2.0), "x": x})) == 3


@pytest.mark.parametrize("way", ["dense", "channels last"])
@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (6, 4, 1, 1), (6, 1, 3, 3), (6, 4)])
def test_filled_in_layers_train_alike(way, shape):
    """Full weights that are used again: twice in a pass, accumulated, changed by hand; against torch's own."""
    torch.manual_seed(0)
    ordinary = nn.Linear(4, 6) if len(shape) == 2 else nn.Conv2d(shape[1], 6, shape[2:], padding=1)
    kept = floats(*shape) > 0
    with torch.no_grad():
        ordinary.weight.mul_(kept)
    one = sparse_layer(ordinary, kept)
    one.ways.training = one.ways.inference = way
    x = floats(5, 4) if len(shape) == 2 else floats(5, shape[1], 6, 6)
    for step in range(4):
        for each in (one, ordinary):
            (each(x).mean() * each(2 * x).square().mean() + each(-x).square().mean()).backward()
            if step != 1:  # accumulated
                slope = each.weight.grad if each is one else each.weight.grad * kept
                if step == 2:
                    each.weight.data = each.weight.data - 0.01 * slope
                else:
                    each.weight.data -= 0.01 * slope  # unknown to torch
                each.weight.grad = None
        assert one.weight.abs().max() < 10
        assert_near(one.weight, ordinary.weight[kept])
    out = one(x.requires_grad_()).square().sum()
    with torch.no_grad():
        one.weight.mul_(2)
    one(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
