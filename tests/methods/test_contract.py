"""One suite over every method in the folder."""

import copy
import itertools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import driveprune as dp
from driveprune import cut as interpreter
from driveprune.mask import kept_count
from driveprune.plan import Prune
from tests.nets import (
    Recurrent,
    Transformer,
    batch,
    convnet,
    images,
    mlp,
    removed_are_zero,
    same,
    sequences,
    snapshot,
    tokens,
)

METHODS = dp.methods.names()
IN_ONE_GO = [name for name in METHODS if name not in ("imp", "gmp")]
SHORT = {
    "imp": {"cycles": 3, "cycle_epochs": 2},
    "gmp": {"cuts": 4},
    "drive": {"early_epochs": 1, "cuts": 5},
    "driveflow": {"early_epochs": 1, "cuts": 5},
}
CASES = {"mlp": (mlp, batch), "conv": (convnet, images), "lstm": (Recurrent, sequences)}
pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


def knobs(method):
    return {**SHORT.get(method, {}), **({"cuts": 5} if method in ("synflow", "force") else {})}


def knobs_of_cut(method):
    return {name: value for name, value in knobs(method).items() if name != "early_epochs"}


def steps(method, net, data, sparsity=0.9, epochs=6, seed=0, optimizer=None):
    """Train with a Pruner, two steps an epoch; yields the pruner after each step."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    pruner = dp.Pruner(
        net, optimizer, data, method=method, sparsity=sparsity, epochs=epochs, steps_per_epoch=2, seed=seed,
        knobs=knobs(method),
    )  # fmt: skip
    yield pruner
    for _ in range(pruner.epochs):
        for x, y in data:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            pruner.step()
            yield pruner


def pruned(method, net, data, **options):
    *_, last = steps(method, net, data, **options)
    return last


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.993])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_the_final_count_is_exact(method, case, sparsity):
    build, draw = CASES[case]
    net, data = build(), [draw(seed=0), draw(seed=1)]
    last = pruned(method, net, data, sparsity=sparsity, epochs=3)
    size = sum(w.numel() for w in dp.prunable(net).values())
    assert last.done
    assert sum(int(k.sum()) for k in last.mask.values()) == kept_count(size, sparsity)
    assert removed_are_zero(net, last.mask)


@pytest.mark.parametrize("method", METHODS)
def test_masks_only_shrink_unless_the_method_revives(method, monkeypatch):
    masks = []

    def record(*args, **kwargs):
        masks.append(keep_top(*args, **kwargs))
        return masks[-1]

    keep_top = interpreter.keep_top
    monkeypatch.setattr(interpreter, "keep_top", record)
    last = pruned(method, convnet(), [images(seed=0), images(seed=1)])
    if any(phase.revive for phase in last.plan if isinstance(phase, Prune)):
        assert method == "force"  # compared with its own literal loop in test_force.py
        return
    assert masks
    for before, after in itertools.pairwise(masks):
        assert all(not (after[name] & ~before[name]).any() for name in before)
    assert same(dict(masks[-1]), dict(last.mask))


@pytest.mark.parametrize("method", METHODS)
def test_zeros_are_exact_through_50_steps_of_training(method):
    net, data = convnet(), [images(seed=0), images(seed=1)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    trained = 0
    for pruner in steps(method, net, data, epochs=40, optimizer=optimizer):
        if pruner.held is not None:
            trained += 1
            assert removed_are_zero(net, pruner.mask)
            for weight, kept in ((dp.prunable(net)[name], kept) for name, kept in pruner.mask.items()):
                for value in optimizer.state.get(weight, {}).values():
                    if value.shape == kept.shape:
                        assert not value[~kept].any()
    assert trained > 50 or method in ("gmp", "magnitude")
    moved = [w for name, w in dp.prunable(net).items() if w[pruner.mask[name]].any()]
    assert moved


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_mask(method):
    masks = [dict(pruned(method, convnet(), [images(seed=0), images(seed=1)], seed=3).mask) for _ in range(2)]
    assert same(*masks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_other_dtypes(method, dtype):
    net = mlp(dtype=dtype)
    last = pruned(method, net, [batch(seed=0, dtype=dtype), batch(seed=1, dtype=dtype)])
    assert sum(int(k.sum()) for k in last.mask.values()) == kept_count(1530, 0.9)
    assert removed_are_zero(net, last.mask)
    assert all(w.dtype == dtype for w in net.parameters())


@pytest.mark.parametrize("method", IN_ONE_GO)
def test_transformers_with_tokens(method):
    net = Transformer()
    kept = dp.prune(net, [tokens()], method=method, sparsity=0.8, knobs=knobs_of_cut(method))
    assert sum(int(k.sum()) for k in kept.values()) == kept_count(288, 0.8)
    assert removed_are_zero(net, kept)


@pytest.mark.parametrize("method", IN_ONE_GO)
def test_channels_last_gives_the_same_count(method):
    net = convnet().to(memory_format=torch.channels_last)
    kept = dp.prune(net, [images()], method=method, sparsity=0.9, knobs=knobs_of_cut(method))
    assert sum(int(k.sum()) for k in kept.values()) == kept_count(1624, 0.9)
    assert removed_are_zero(net, kept)


class Loader:
    """A loader that draws from every global source of random numbers."""

    def __iter__(self):
        for _ in range(3):
            np.random.rand()
            random.random()
            yield images(seed=int(torch.randint(100, ())))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", IN_ONE_GO)
def test_scoring_leaves_no_trace(method, training):
    net = convnet().train(training)
    net[1].eval()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, flags = snapshot(net), [module.training for module in net.modules()]
    weights = set(dp.prunable(net))
    grads = [parameter.grad for parameter in net.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    dp.prune(net, Loader(), method=method, sparsity=0.9, knobs=knobs_of_cut(method))
    after = snapshot(net)
    assert all(torch.equal(before[name], after[name]) for name in before if name not in weights)
    assert [module.training for module in net.modules()] == flags
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        assert parameter.grad is grad
        assert (grad == 1).all()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))


@pytest.mark.parametrize("method", IN_ONE_GO)
def test_kept_weights_keep_their_values(method):
    net = convnet()
    before = snapshot(net)
    kept = dp.prune(net, [images()], method=method, sparsity=0.9, knobs=knobs_of_cut(method))
    after = snapshot(net)
    for name, mask in kept.items():
        assert torch.equal(after[name], torch.where(mask, before[name], 0.0))


@pytest.mark.parametrize("method", ["imp", "gmp"])
def test_methods_that_train_between_cuts_point_to_the_pruner(method):
    with pytest.raises(ValueError, match=rf"{method} trains between its cuts.*driveprune.Pruner"):
        dp.prune(mlp(), [batch()], method=method, sparsity=0.9)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_removed_at_sparsity_zero(method):
    net = mlp()
    before = copy.deepcopy(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner = next(steps(method, net, [batch()], sparsity=0.0))
    assert dp.sparsity(pruner.mask) == 0
    assert same(before, net.state_dict())
