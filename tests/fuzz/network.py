"""The network's file: what is taken has the weights that a literal reader finds, a model that is not filled stays."""

from __future__ import annotations

import contextlib
import runpy
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch

import driveprune as dp
from driveprune import netfile
from driveprune.cli.delivery import _network_of
from tests.fuzz.mutations import mutated_tensors
from tests.nets import convnet, mlp, same, snapshot

READ_NET = Path(__file__).parents[2] / "examples" / "read_net.py"
SIZES = {"name": "digits_net", "classes": 10, "inputs": 1, "size": 8, "width": 0.1}


def honest(folder: Path) -> list[bytes]:
    """Small networks, exact, rounded and tied; one of 60 MB that keeps a few weights, as a file may claim to be."""
    found = []
    large = torch.nn.Sequential(torch.nn.Linear(4000, 3700, bias=False))
    tied = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    kinds = [(mlp(), 0.3, "exact"), (convnet(), 0.8, "fp16"), (tied, 0.5, "exact"), (large, 1e-6, "exact")]
    for net, density, values in [*kinds, (dp.models.digits_net(width=0.1), 0.2, "exact")]:
        torch.manual_seed(0)
        mask = dp.Mask({name: torch.rand(w.shape) < density for name, w in dp.prunable(net).items()})
        dp.apply(net, mask)
        dp.save(folder / "net", net, mask, values=values, provenance={"network": SIZES, "a": [1, {"b": "c"}]})
        found.append((folder / "net").read_bytes())
    return found


def mutated(data: bytes, chance: Random) -> bytes:
    return mutated_tensors(data, chance, ("layers", "layers", "layers", "tied", "provenance"))


@cache
def _read_net():
    return runpy.run_path(str(READ_NET))["read_net"]


@cache
def _models():
    return mlp(seed=3), convnet(seed=3)


def target(data: bytes, folder: Path) -> None:
    path = folder / "net"
    path.write_bytes(data)
    models = [(model, snapshot(model)) for model in _models()]
    for model, before in models:
        try:
            dp.load(path, model)
        except ValueError:
            assert same(before, snapshot(model)), "a file that was refused changed the model"
        else:
            _compare(snapshot(model), path)
            model.load_state_dict(before)
    with contextlib.suppress(ValueError):
        _network_of(path, {}, None, None, 10)
    outline = netfile.outline(path)
    common = netfile.shared(path, path)
    assert {name: each.both for name, each in common.items()} == outline.kept
    weights, mask = netfile.read(path)
    assert {name: int(kept.sum()) for name, kept in mask.items()} == outline.kept
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        name: kind.shape for name, kind in outline.kinds.items()
    }
    _compare(weights, path)


def _compare(weights, path: Path) -> None:
    literal, weights = (
        {name: value for name, value in found.items() if ":" not in name}  # which the literal reader leaves out
        for found in (_read_net()(path), weights)
    )
    assert literal.keys() == weights.keys()
    for name, value in weights.items():
        theirs = np.asarray(literal[name])
        assert str(theirs.dtype) == str(value.dtype).removeprefix("torch."), name
        assert theirs.shape == tuple(value.shape), name
        ours = value.numpy()
        if ours.dtype.kind == "f":  # which NaN a NaN becomes in a wider type is the processor's affair
            assert np.array_equal(np.isnan(theirs), np.isnan(ours)), name
            theirs, ours = (np.where(np.isnan(each), 0, each) for each in (theirs, ours))
        assert theirs.tobytes() == ours.tobytes(), name
