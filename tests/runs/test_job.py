"""One run: what it says of itself while it works."""

import pytest
import torch
from torch import nn

from driveprune import datasets
from driveprune.files import read_json, write_json
from driveprune.runs import job
from driveprune.runs.store import read_run, result_of
from tests.runs.kills import small_spec


def test_a_run_shorter_than_a_second_says_where_it_went_on(tmp_path, monkeypatch):
    def end(moment):
        if moment.step == 4:
            raise KeyboardInterrupt

    data, spec = datasets.load("digits"), small_spec("snip")
    with pytest.raises(KeyboardInterrupt):
        job.carry_out(tmp_path, spec, data, every=0, watch=end)
    monkeypatch.setattr(job.time, "time", lambda: 1e9)
    job.carry_out(tmp_path, spec, data, every=0)
    assert read_run(tmp_path / spec.id).status["began_step"] == 4


def test_multiply_adds_are_those_of_one_example(tmp_path):
    data, spec = datasets.load("digits"), small_spec("snip")
    result = job.carry_out(tmp_path, spec, data)
    model = job.build_model(spec, data)
    counted = {}
    for name, layer in model.named_modules():  # by what comes out of each layer for one image
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(
                lambda layer, _, y, name=name: counted.update(
                    {name: y[0].numel() // len(y[0]) * layer.weight.numel()}
                )
            )
    model(torch.zeros(1, 1, 8, 8))
    assert result["dense_macs"] == sum(counted.values())
    kept = {layer["name"].removesuffix(".weight"): layer["kept"] / layer["weights"] for layer in result["layers"]}
    assert result["macs"] == round(sum(counted[name] * kept[name] for name in counted))
    assert result["macs_examples"] == 1


def test_multiply_adds_of_runs_from_before_are_those_of_two_examples_and_are_halved(tmp_path):
    data, spec = datasets.load("digits"), small_spec("snip")
    result = job.carry_out(tmp_path, spec, data)
    path = tmp_path / spec.id / "result.json"
    old = {**result, "macs": 2 * result["macs"], "dense_macs": 2 * result["dense_macs"]}
    del old["macs_examples"]
    write_json(path, old)
    for found in (read_run(tmp_path / spec.id).result, result_of(tmp_path / spec.id)):
        assert (found["macs"], found["dense_macs"]) == (result["macs"], result["dense_macs"])
    assert job.carry_out(tmp_path, spec, data)["macs"] == result["macs"]
    assert read_json(path) == old  # reading changes no file


def test_a_result_says_which_processor_it_is_from(tmp_path):
    machine = job.environment()["machine"]
    assert machine["model"] == job.processor() != ""
    assert machine["instructions"] == torch.backends.cpu.get_cpu_capability()


def test_a_python_without_memory_says_so(tmp_path, monkeypatch):
    """Its own errors of that kind say nothing."""
    monkeypatch.setattr(job, "_train", lambda *_: (_ for _ in ()).throw(MemoryError))
    spec = small_spec("snip")
    with pytest.raises(MemoryError, match="there is no memory left"):
        job.carry_out(tmp_path, spec, datasets.load("digits"))
    assert read_run(tmp_path / spec.id).error.endswith("MemoryError: there is no memory left")


def test_a_onednn_without_memory_says_so(tmp_path, monkeypatch):
    words = RuntimeError("could not create a primitive")
    monkeypatch.setattr(job, "_train", lambda *_: (_ for _ in ()).throw(words))
    spec = small_spec("snip")
    with pytest.raises(RuntimeError, match="there may be no memory left"):
        job.carry_out(tmp_path, spec, datasets.load("digits"))
    assert read_run(tmp_path / spec.id).error.endswith("there may be no memory left")
