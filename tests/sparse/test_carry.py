"""Dense, sparse and dense again: weights, statistics and optimisers, bit for bit."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import driveprune as dp
from tests.nets import same
from tests.sparse.literal import Residual, Softly, assert_near, floats, random_mask, spoken

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
FLOORS = {"adamax", "rprop"}  # keep something above zero for removed weights, too


def trained(name, steps=3):
    """A network that was trained for a while with zeros held."""
    torch.manual_seed(0)
    net = spoken(Residual(Softly)).train()
    mask = random_mask(net, 0.8)
    optimizer = OPTIMIZERS[name](net.parameters())
    held = dp.hold(net, optimizer, mask)
    for step in range(steps):
        one_step(net, optimizer, step)
    held.release()
    return net, mask, optimizer


def one_step(net, optimizer, seed):
    optimizer.zero_grad()
    (net(floats(10, 3, 8, 8, seed=seed)) - 1).square().mean().backward()
    optimizer.step()


def states(net, optimizer):
    names = {weight: name for name, weight in net.named_parameters()}
    return {
        f"{names[weight]}.{key}": value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        for weight, values in optimizer.state.items()
        for key, value in values.items()
        if value is not None
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_there_and_back_bit_for_bit(name):
    net, mask, optimizer = trained(name)
    before = copy.deepcopy((net.state_dict(), states(net, optimizer), optimizer.state_dict()["param_groups"]))
    sparse, moved = dp.sparsify(net, mask, floats(1, 3, 8, 8), optimizer, layers="sparse")
    assert type(moved) is type(optimizer)
    for weight, values in moved.state.items():
        assert all(v.shape in {weight.shape, torch.Size([])} for v in values.values() if isinstance(v, torch.Tensor))
    dense, back = dp.densify(sparse, moved)
    assert same(dense.state_dict(), before[0])
    found = states(dense, back)
    assert list(found) == list(before[1])
    for key, value in before[1].items():
        kept = mask.get(key.rpartition(".")[0]) if name in FLOORS else None
        if kept is not None and kept.shape == value.shape:
            assert torch.equal(found[key][kept], value[kept])
        else:
            assert torch.equal(found[key], value)
    assert back.state_dict()["param_groups"] == before[2]
    assert same(net.state_dict(), before[0])  # what was given stays as it is
    assert all(torch.equal(value, before[1][key]) for key, value in states(net, optimizer).items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_the_dense_one(name):
    """A step from the same state is the same step; the weights move by gradients that agree."""
    net, mask, optimizer = trained(name)
    sparse, moved = dp.sparsify(net, mask, floats(1, 3, 8, 8), optimizer, layers="sparse")
    slopes = {key: floats(*weight.shape, seed=number) for number, (key, weight) in enumerate(net.named_parameters())}
    for key, weight in net.named_parameters():
        weight.grad = slopes[key] * mask[key] if key in mask else slopes[key]
    for key, weight in sparse.named_parameters():
        weight.grad = slopes[key][mask[key]] if key in mask else slopes[key].clone()
    optimizer.step()
    moved.step()
    for key, weight in dp.densify(sparse).named_parameters():
        kept = mask.get(key, torch.ones(weight.shape, dtype=torch.bool))
        assert_near(weight[kept], net.get_parameter(key)[kept], 1e-6)


def test_state_shrinks_to_the_kept_values():
    net, mask, optimizer = trained("adam")
    sparse, moved = dp.sparsify(net, mask, floats(1, 3, 8, 8), optimizer)
    weight = sparse.get_parameter("stem.weight")
    assert moved.state[weight]["exp_avg"].shape == weight.shape == (int(mask["stem.weight"].sum()),)
    assert moved.state[weight]["step"] == 3


def test_groups_and_frozen_parameters():
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].bias.requires_grad_(False)
    groups = [{"params": [net[0].weight], "lr": 0.3}, {"params": [net[2].weight, net[2].bias], "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    mask = {"0.weight": floats(4, 5) > 0}
    sparse, moved = dp.sparsify(net, mask, floats(1, 5), optimizer)
    assert [group["lr"] for group in moved.param_groups] == [0.3, 0.1]
    assert moved.param_groups[0]["params"][0] is sparse.get_parameter("0.weight")
    assert moved.param_groups[1]["params"][1] is sparse.get_parameter("2.bias")
    assert not sparse.get_parameter("0.bias").requires_grad
    assert not dp.densify(sparse)[0].bias.requires_grad


def test_a_scheduler_stays_with_the_old_optimiser():
    net = nn.Sequential(nn.Linear(5, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    one = (net(floats(2, 5)) ** 2).sum()
    one.backward()
    optimizer.step()
    scheduler.step()
    before = net[0].weight.clone()
    sparse, moved = dp.sparsify(net, {"0.weight": floats(4, 5) > 0}, floats(1, 5), optimizer)
    assert moved.param_groups[0]["lr"] == pytest.approx(0.01)
    (sparse(floats(2, 5)) ** 2).sum().backward()
    weight = sparse.get_parameter("0.weight").clone()
    moved.step()
    assert not torch.equal(sparse.get_parameter("0.weight"), weight)
    assert torch.equal(net[0].weight, before)
    lr_scheduler.StepLR(moved, 1)  # and takes a new one


def test_what_cannot_be_carried_starts_anew_with_a_warning():
    for make in (lambda p: torch.optim.Adafactor(p, lr=0.1), lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)):
        net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        mask = {"0.weight": floats(4, 5) > 0}
        optimizer = make(net.parameters())

        def closure(model=net, used=optimizer):
            used.zero_grad()
            loss = (model(floats(6, 5)) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        with pytest.warns(UserWarning, match=f"{type(optimizer).__name__} starts anew") as told:
            sparse, moved = dp.sparsify(net, mask, floats(1, 5), optimizer)
        assert told[0].filename == __file__
        first = closure(sparse, moved).item()
        for _ in range(5):
            moved.step(lambda model=sparse, used=moved: closure(model, used))
        assert closure(sparse, moved).item() < first


def test_a_fresh_optimiser_is_carried_without_a_warning():
    net = nn.Sequential(nn.Linear(5, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, moved = dp.sparsify(net, {"0.weight": floats(4, 5) > 0}, floats(1, 5), torch.optim.LBFGS(net.parameters()))
    assert not moved.state


def test_channels_last_weights_come_back_so():
    net = nn.Sequential(nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(floats(2, 8, 5, 5)).sum().backward()
    optimizer.step()
    mask = {"0.weight": floats(8, 8, 3, 3) > 0}
    dense, _ = dp.densify(*dp.sparsify(net, mask, floats(1, 8, 5, 5), optimizer))
    assert dense[0].weight.stride() == net[0].weight.stride()
    assert torch.equal(dense[0].weight, net[0].weight * mask["0.weight"])
