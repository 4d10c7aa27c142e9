import copy
import sys

import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.bench import Bench, Timing, fastest, interleaved
from tests.nets import Transformer, convnet, mlp, tokens

FASTER = Timing("inference", 32, 0.030, 0.010)
SLOWER = Timing("inference", 1, 0.010, 0.013)
SAME = Timing("training step", 128, 1.0, 1.02)


def made(*timings, **facts):
    return Bench(timings, **{"sparsity": 0.98, "mac_density": 0.13, "threads": 2, "load": 0.1, **facts})


def test_a_network_is_measured_in_inference_and_in_training():
    net = convnet()
    mask = dp.prune(net, method="erk", sparsity=0.8)
    before, threads = copy.deepcopy(net.state_dict()), torch.get_num_threads()
    said = []
    found = dp.bench(net, mask, torch.zeros(1, 3, 8, 8), batches=(1, 9), threads=1, rounds=1, watch=said.append)
    works = [(each.work, each.batch) for each in found.timings]
    assert works == [("inference", 1), ("inference", 9), ("training step", 1), ("training step", 9)]
    assert all(each.dense > 0 and each.sparse > 0 for each in found.timings)
    assert found.threads == 1
    assert found.sparsity == pytest.approx(0.8, abs=1e-2)
    assert 0 < found.mac_density < 1
    assert "inference, batch 9" in said
    assert torch.get_num_threads() == threads
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_what_cannot_be_measured_is_said():
    net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    mask = dp.prune(net, method="erk", sparsity=0.5)
    found = dp.bench(net, mask, torch.zeros(1, 6), batches=[1, 2], rounds=1)
    assert [(each.work, each.batch) for each in found.timings][2:] == [("training step", 2)]
    assert found.left_out[0].startswith("training step, batch 1: Expected more than 1 value per channel")
    assert "left out: training step, batch 1" in str(found)


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x) if len(x) > x.sum() - 1e9 else x


@pytest.mark.filterwarnings("ignore:the network is not made smaller:driveprune.CompactWarning")
@pytest.mark.parametrize(("net", "example"), [(Transformer(), tokens(1)[0]), (Untraceable(), torch.zeros(1, 6))])
def test_any_network_works(net, example):
    mask = dp.prune(net, method="magnitude", sparsity=0.5)
    assert len(dp.bench(net, mask, example, batches=[2], rounds=1).timings) == 2


def test_rounds_fit_into_the_time(monkeypatch):
    monkeypatch.setattr(sys.modules["driveprune.bench"], "SECONDS", 0.0)
    net = mlp()
    mask = dp.prune(net, method="erk", sparsity=0.5)
    assert dp.bench(net, mask, torch.zeros(1, 6), batches=[2]).timings


@pytest.mark.parametrize(
    ("knobs", "said"), [({"batches": []}, "batches"), ({"batches": [0]}, "batches"), ({"threads": 0}, "threads")]
)
def test_impossible_numbers_are_refused(knobs, said):
    net = mlp()
    mask = dp.prune(net, method="erk", sparsity=0.5)
    with pytest.raises(ValueError, match=said):
        dp.bench(net, mask, torch.zeros(1, 6), **knobs)


def test_verdicts():
    assert FASTER.verdict == "3.0× faster"
    assert SLOWER.verdict == "dense is faster here: 1.3×"
    assert Timing("inference", 1, 1.0, 1.07).verdict == "dense is faster here: 1.07×"
    assert SAME.verdict == "nothing gained"


def test_it_says_where_nothing_is_gained():
    assert made(FASTER).notes == []
    assert made(FASTER, SLOWER, SAME).notes == [
        "nothing is gained in inference, batch 1; training step, batch 128: stay with the dense network there"
    ]
    assert made(SLOWER, SAME).notes == ["nothing is gained on this machine: stay with the dense network"]
    assert "busy" in made(FASTER, load=1000.0).notes[0]
    assert made(FASTER, load=None).notes == []


def test_it_is_printed_as_a_table():
    text = str(made(FASTER, SLOWER, SAME))
    assert text.startswith("sparsity 98.00%, 13.0% of the multiply-adds left, 2 threads")
    for words in ("3.0× faster", "dense is faster here: 1.3×", "1,000", "1,020", "dense, ms", "training step"):
        assert words in text
    assert "multiply-adds" not in str(made(FASTER, mac_density=None))


def test_jobs_run_in_turn_and_the_fastest_third_counts():
    order = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert [len(each) for each in seconds.values()] == [2, 2]
    assert fastest([9.0, 1.0, 5.0, 2.0, 6.0, 7.0]) == 1.5
