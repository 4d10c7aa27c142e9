"""Several real processes: torchrun, gloo, DDP and fully_shard, against one process with the batches of all."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import driveprune as dp
from driveprune import datasets
from driveprune.cli import app
from driveprune.files import read_json
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec
from driveprune.runs.store import read_run
from tests.nets import convnet, images, mlp
from tests.ranks import OPTIONS, launch, torchrun, trained, whole
from tests.runs.kills import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


def both(folder, name):
    """What two ranks wrote, which must be the same bits."""
    first, second = (load_file(folder / f"{name}-{rank}") for rank in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    return first


def assert_same_as(found, mask, model, about):
    for name, kept in mask.items():
        assert torch.equal(found[f"mask.{name}"], kept), (about, name)
        assert not found[f"net.{name}"][~kept].any()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[f"net.{name}"], weight.detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_masks_and_weights_are_those_of_one_process_with_all_batches(kind, tmp_path):
    launch("all_of", tmp_path, kind)
    for method in dp.methods.names():
        model = mlp(dtype=torch.float64)
        pruner = trained(model, method, [whole(0), whole(1)], [1.0, 1.0])
        assert_same_as(both(tmp_path, method), pruner.mask, model, method)
    assert_options(tmp_path)


def assert_options(tmp_path):
    for name, (method, options) in OPTIONS.items():
        model = mlp(dtype=torch.float64)
        kept = dp.prune(model, [whole(0), whole(1)], method=method, sparsity=0.8, progress=False, **options)
        assert_same_as(both(tmp_path, name), kept, model, name)


def test_small_things_on_two_ranks(tmp_path):
    launch("small_things", tmp_path)
    assert_options(tmp_path)
    x, y = images(16, dtype=torch.float64)
    halves = list(zip(x.split(8), y.split(8), strict=True))
    model = convnet(dtype=torch.float64)
    kept = dp.prune(model, halves, method="drive", sparsity=0.9, knobs={"cuts": 5, "batches_per_cut": 2})
    assert_same_as(both(tmp_path, "bn"), kept, model, "a batch that is split alike")
    assert both(tmp_path, "norm")


@pytest.mark.slow
def test_scores_that_are_sharded_in_many_ways_are_chosen_as_whole_ones():
    launch("choose_at_random", 150, ranks=4, seconds=3600)


COMMAND = (
    "run --model tests.nets.without_norm --data digits --epochs 2 --images 385 --test-images 101 --sparsity 0.9 "
    "--knob cuts=5 --every 0 --json --runs"
)
"""The last batch of an epoch has one image: one rank has none."""


def test_a_run_is_that_of_one_process_and_goes_on_when_a_rank_was_killed(tmp_path):
    done = torchrun("driveprune", *COMMAND.split(), str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # one rank speaks
    folder = tmp_path / "whole" / result["id"]
    spec = Spec.from_json(read_json(folder / "spec.json"))
    assert spec.ranks == 2

    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        carry_out(tmp_path, spec, datasets.load("digits"))
    alone = Spec.from_json({name: value for name, value in spec.to_json().items() if name != "ranks"})
    assert alone.id != spec.id
    expected = carry_out(tmp_path / "alone", alone, datasets.load("digits"))
    for row, other in zip(result["rows"], expected["rows"], strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    assert result["layers"] == expected["layers"]

    killed = torchrun("tests.ranks", "run_until_killed", str(tmp_path), str(folder / "spec.json"), "9")
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    assert list((tmp_path / spec.id).glob("checkpoint-*"))
    assert read_run(tmp_path / spec.id).standing in {"failed", "unfinished"}
    again = torchrun("tests.ending", *COMMAND.split(), str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert "terminate called" not in again.stderr
    assert "resuming" in again.stderr
    assert_same(tmp_path / spec.id, folder)


def test_a_batch_of_nan_on_one_rank_stops_all():
    launch("nan_in_a_batch_of_one_rank")


def test_a_sweep_is_not_for_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = CliRunner().invoke(app, ["sweep"])
    assert said.exit_code == 2
    assert "a sweep starts processes of its own" in said.stderr
