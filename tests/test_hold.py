import copy
import gc
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import driveprune as dp
from tests.nets import batch, convnet, images, mlp, removed_are_zero, same, snapshot

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_l2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adam_eps0": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused_adam": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
FACTORED = {"adafactor"}  # keeps sums over rows and columns, which belong to no single weight
NEVER_ZERO = FACTORED | {"adamax", "rprop"}  # these keep a state above a positive floor


def random_mask(model, density=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(w.shape, generator=generator) < density for name, w in dp.prunable(model).items()}


def backward(net, data=None, scale=1.0):
    x, y = data or batch()
    (F.cross_entropy(net(x.to(next(net.parameters()).dtype)).float(), y) * scale).backward()


def train(net, optimizer, steps=5, **options):
    for seed in range(steps):
        optimizer.zero_grad()
        backward(net, batch(seed=seed), **options)
        optimizer.step()


def state_is_zero(net, optimizer, mask):
    weights = dict(net.named_parameters())
    values = [
        (value, kept)
        for name, kept in mask.items()
        for value in optimizer.state.get(weights[name], {}).values()
        if isinstance(value, torch.Tensor) and value.shape == kept.shape
    ]
    return all(not value[~kept].count_nonzero() for value, kept in values)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_stay_zero_and_state_is_zero(name):
    net = mlp()
    optimizer = OPTIMIZERS[name](net.parameters())
    train(net, optimizer)  # a dense state, from before the cut
    mask = random_mask(net)
    held = dp.hold(net, optimizer, mask)
    assert removed_are_zero(net, mask)
    before = snapshot(net)
    for _ in range(10):
        train(net, optimizer, 1)
        assert removed_are_zero(net, mask)
        assert name in NEVER_ZERO or state_is_zero(net, optimizer, mask)
    assert same(dict(held.mask), mask)
    assert not torch.equal(before["0.weight"], net[0].weight)


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - FACTORED))
def test_kept_weights_move_as_under_a_literal_mask(name):
    """The same steps with explicit multiplications by the mask around every step."""
    held_net, plain = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    mask = random_mask(plain)
    held_optimizer, optimizer = (OPTIMIZERS[name](net.parameters()) for net in (held_net, plain))
    dp.hold(held_net, held_optimizer, mask)
    train(held_net, held_optimizer, 6)
    weights = dict(plain.named_parameters())

    def multiply():
        with torch.no_grad():
            for key, kept in mask.items():
                weights[key].copy_(torch.where(kept, weights[key], 0))
                if weights[key].grad is not None:
                    weights[key].grad.mul_(kept)

    multiply()
    for seed in range(6):
        optimizer.zero_grad()
        backward(plain, batch(seed=seed))
        multiply()
        optimizer.step()
        multiply()
    for a, b in zip(held_net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_muon():
    """Muon's updates are dense: they are orthogonalised gradients."""
    net = mlp(bias=False)
    optimizer = torch.optim.Muon(net.parameters(), lr=0.05)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    for _ in range(5):
        train(net, optimizer, 1)
        assert removed_are_zero(net, mask)
        assert state_is_zero(net, optimizer, mask)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_with_closures(line_search):
    net = mlp()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch()[0]), batch()[1])
        loss.backward()
        seen.append(removed_are_zero(net, mask))
        return loss

    mask = {name: torch.ones(w.shape, dtype=torch.bool) for name, w in dp.prunable(net).items()}
    optimizer.step(closure)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    seen.clear()
    losses = [optimizer.step(closure).item() for _ in range(6)]
    assert len(seen) > 10
    assert all(seen)
    assert losses[-1] < losses[0]


def test_clipping_sees_only_kept_weights():
    net = mlp()
    mask = random_mask(net)
    dp.hold(net, torch.optim.SGD(net.parameters(), lr=0.1), mask)
    backward(net)
    kept = [p.grad[mask[n]] if n in mask else p.grad.reshape(-1) for n, p in net.named_parameters()]
    expected = torch.cat(kept).norm()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(net.parameters(), 1e-3), expected)


def test_gradient_accumulation():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    for seed in range(3):
        backward(net, batch(seed=seed))
        assert all(not p.grad[~mask[n]].any() for n, p in net.named_parameters() if n in mask)
    optimizer.step()
    assert removed_are_zero(net, mask)


def test_grad_scaler_with_overflow():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for scale in (1.0, float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        x, y = batch()
        loss = F.cross_entropy(net(x), y) * scale
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert removed_are_zero(net, mask)
        assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("name", ["momentum", "adam", "adam_eps0", "rmsprop"])
def test_hand_set_gradients(name):
    net = mlp()
    optimizer = OPTIMIZERS[name](net.parameters())
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    for _ in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert removed_are_zero(net, mask)
        assert state_is_zero(net, optimizer, mask)


def test_infinite_gradients_do_not_reach_removed_weights():
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    optimizer.step()
    assert removed_are_zero(net, mask)
    assert state_is_zero(net, optimizer, mask)


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models(when):
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    mask = random_mask(net)
    if when == "before":
        compiled = torch.compile(net, backend="aot_eager")
        train(compiled, optimizer, 2)
        dp.hold(compiled, optimizer, mask)
    else:
        dp.hold(net, optimizer, mask)
        compiled = torch.compile(net, backend="aot_eager")
    for _ in range(3):
        train(compiled, optimizer, 1)
        assert removed_are_zero(net, mask)
        assert state_is_zero(net, optimizer, mask)


@pytest.mark.parametrize("name", ["momentum", "adam_l2", "foreach"])
def test_compiled_steps(name):
    net = mlp()
    optimizer = OPTIMIZERS[name](net.parameters())
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)

    @torch.compile(backend="aot_eager")
    def step():
        optimizer.step()

    for seed in range(3):
        optimizer.zero_grad()
        backward(net, batch(seed=seed))
        step()
        assert removed_are_zero(net, mask)
        assert state_is_zero(net, optimizer, mask)


@pytest.mark.slow
def test_compiled_with_inductor():
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    compiled = torch.compile(net)

    @torch.compile
    def step():
        optimizer.step()

    for seed in range(3):
        optimizer.zero_grad()
        backward(compiled, batch(seed=seed))
        step()
        assert removed_are_zero(net, mask)
        assert state_is_zero(net, optimizer, mask)


@pytest.mark.parametrize("name", ["momentum", "adam", "rmsprop"])
def test_loading_a_dense_optimiser_state(name):
    dense = mlp()
    dense_optimizer = OPTIMIZERS[name](dense.parameters())
    train(dense, dense_optimizer)
    net = mlp()
    optimizer = OPTIMIZERS[name](net.parameters())
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    optimizer.load_state_dict(dense_optimizer.state_dict())
    assert state_is_zero(net, optimizer, mask)
    train(net, optimizer)
    assert removed_are_zero(net, mask)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_dense_model(assign):
    net = mlp()
    mask = random_mask(net)
    dp.hold(net, None, mask)
    net.load_state_dict(mlp(seed=5).state_dict(), assign=assign)
    assert removed_are_zero(net, mask)
    backward(net)
    assert all(not p.grad[~mask[n]].any() for n, p in net.named_parameters() if n in mask)


def test_loading_through_wrappers_and_parts():
    net = mlp()
    mask = random_mask(net)
    dp.hold(net, None, mask)
    nn.DataParallel(net).load_state_dict(nn.DataParallel(mlp(seed=5)).state_dict())
    assert removed_are_zero(net, mask)
    net[0].load_state_dict(nn.Linear(6, 40).state_dict())
    assert removed_are_zero(net, mask)


def test_several_groups_and_several_optimisers():
    net = mlp()
    groups = [
        {"params": net[0].parameters(), "lr": 0.1},
        {"params": net[2].parameters(), "weight_decay": 0.5},
    ]
    optimizers = [torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(net[4].parameters(), lr=0.1, momentum=0.9)]
    mask = random_mask(net)
    dp.hold(net, optimizers, mask)
    for _ in range(4):
        backward(net)
        for optimizer in optimizers:
            optimizer.step()
        assert removed_are_zero(net, mask)
        assert all(state_is_zero(net, optimizer, mask) for optimizer in optimizers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_to_another_dtype_after_holding(dtype):
    net = mlp()
    mask = random_mask(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    dp.hold(net, optimizer, mask)
    train(net, optimizer)
    net.to(dtype)
    optimizer.state.clear()
    train(net, optimizer)
    assert removed_are_zero(net, mask)
    assert state_is_zero(net, optimizer, mask)


def test_another_memory_format_after_holding():
    net = convnet()
    mask = random_mask(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    dp.hold(net, optimizer, mask)
    net.to(memory_format=torch.channels_last)
    for _ in range(3):
        backward(net, images())
        optimizer.step()
    assert removed_are_zero(net, mask)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)])
def test_averaged_copies(average):
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    copies = AveragedModel(net, multi_avg_fn=average)
    for _ in range(5):
        train(net, optimizer, 1)
        copies.update_parameters(net)
    assert removed_are_zero(copies.module, mask)


def test_an_average_from_before_the_cut_takes_the_mask_with_apply():
    net = mlp()
    copies = AveragedModel(net)
    copies.update_parameters(net)
    mask = random_mask(net)
    dp.apply(copies, mask)
    assert removed_are_zero(copies.module, mask)


def test_state_dict_keys_do_not_change_and_copies_are_plain():
    net = mlp()
    keys = list(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    assert list(net.state_dict()) == keys
    plain = copy.deepcopy(net)
    assert list(plain.state_dict()) == keys
    assert removed_are_zero(plain, mask)
    held_values = snapshot(net)
    with pytest.warns(dp.HoldWarning, match="a copy is not held"):
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 2)
    assert not removed_are_zero(plain, mask)
    plain.load_state_dict(mlp(seed=4).state_dict())
    assert not removed_are_zero(plain, mask)
    assert same(held_values, snapshot(net))


def test_a_held_model_can_be_pickled_by_others():
    """People do save whole models; the hold must not stand in the way, nor come back with them."""
    net = mlp()
    dp.hold(net, torch.optim.SGD(net.parameters(), lr=0.1), random_mask(net))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert same(net.state_dict(), again.state_dict())
    again.load_state_dict(mlp(seed=4).state_dict())
    assert same(again.state_dict(), mlp(seed=4).state_dict())


def test_a_mask_that_comes_after_the_values_finds_them():
    """A checkpoint in parts: values and state are loaded under an old mask, then the mask they belong to."""
    done = mlp(seed=1)
    done_optimizer = torch.optim.Adam(done.parameters())
    mask = random_mask(done, seed=1)
    dp.hold(done, done_optimizer, mask)
    train(done, done_optimizer)
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    held = dp.hold(net, optimizer, random_mask(net, seed=2))
    net.load_state_dict(done.state_dict())
    optimizer.load_state_dict(done_optimizer.state_dict())
    assert removed_are_zero(net, held.mask)
    held.update(mask)
    assert same(net.state_dict(), done.state_dict())
    for mine, theirs in zip(net.parameters(), done.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], done_optimizer.state[theirs]["exp_avg"])


def test_lbfgs_keeps_a_history_that_fits():
    net = mlp()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch()[0]), batch()[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[net[0].weight]["old_dirs"]


def test_update_and_release():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    first, second = random_mask(net, 0.5, 0), random_mask(net, 0.5, 1)
    held = dp.hold(net, optimizer, first)
    train(net, optimizer)
    held.update(second)
    assert removed_are_zero(net, second)
    assert state_is_zero(net, optimizer, second)
    train(net, optimizer)
    assert removed_are_zero(net, second)
    assert not removed_are_zero(net, first)
    held.release()
    train(net, optimizer)
    assert not removed_are_zero(net, second)
    dp.hold(net, optimizer, first)


def test_frozen_weights_can_be_held():
    net = mlp()
    net[0].weight.requires_grad_(False)
    mask = {name: torch.rand(w.shape) < 0.5 for name, w in dp.prunable(net, frozen=True).items()}
    held = dp.hold(net, torch.optim.SGD(net.parameters(), lr=0.1), mask)
    assert removed_are_zero(net, mask)
    held.release()


def test_bad_input_changes_nothing():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = snapshot(net)
    with pytest.raises(ValueError, match="no parameter 'x'"):
        dp.hold(net, optimizer, {"x": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(ValueError, match="the optimiser has none of the masked weights"):
        dp.hold(net, torch.optim.SGD(mlp().parameters(), lr=0.1), random_mask(net))
    with pytest.raises(TypeError, match="must be a torch optimiser"):
        dp.hold(net, ["sgd"], random_mask(net))
    assert same(before, snapshot(net))
    held = dp.hold(net, optimizer, random_mask(net))
    after = snapshot(net)
    with pytest.raises(ValueError, match="held already"):
        dp.hold(net, optimizer, random_mask(net))
    with pytest.raises(ValueError, match=r"4.weight is not in both"):
        held.update({name: kept for name, kept in random_mask(net).items() if name != "4.weight"})
    with pytest.raises(ValueError, match="must be boolean of shape"):
        held.update({name: kept.float() for name, kept in random_mask(net).items()})
    assert same(after, snapshot(net))


def test_a_second_load_replaces_the_first():
    net = mlp()
    mask = random_mask(net)
    held = dp.hold(net, None, mask)
    net.load_state_dict(mlp(seed=1).state_dict())
    sparse = mlp(seed=2)
    dp.apply(sparse, mask)
    net.load_state_dict(sparse.state_dict())
    held.update(mask)
    assert same(net.state_dict(), sparse.state_dict())


def test_what_was_loaded_is_forgotten_once_training_goes_on():
    net = mlp()
    mask = random_mask(net)
    held = dp.hold(net, None, mask)
    net.load_state_dict(mlp(seed=1).state_dict())
    backward(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(parameter.grad)
    before = snapshot(net)
    held.update({name: torch.ones_like(kept) for name, kept in mask.items()})
    assert same(before, snapshot(net))


def test_what_was_loaded_survives_a_conversion():
    net, loaded = mlp(), mlp(seed=1)
    mask = random_mask(net)
    held = dp.hold(net, None, mask)
    net.load_state_dict(loaded.state_dict())
    net.double()
    held.update({name: ~kept for name, kept in mask.items()})
    for name, kept in mask.items():
        assert torch.equal(net.state_dict()[name], torch.where(kept, 0.0, loaded.state_dict()[name]).double())


def test_tied_weights_stay_zero_when_loaded():
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    net["b"].weight = net["a"].weight
    mask = random_mask(net)
    dp.hold(net, None, mask)
    net.load_state_dict(
        copy.deepcopy(net).state_dict() | {"b.weight": torch.ones(4, 4), "a.weight": torch.ones(4, 4)}
    )
    assert not net["a"].weight[~mask["a.weight"]].any()


def test_weights_that_are_unfrozen_later():
    net = mlp()
    net[0].weight.requires_grad_(False)
    mask = {name: torch.rand(w.shape) < 0.5 for name, w in dp.prunable(net, frozen=True).items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    dp.hold(net, optimizer, mask)
    train(net, optimizer, 1)
    net[0].weight.requires_grad_(True)
    for _ in range(3):
        train(net, optimizer, 1)
        assert removed_are_zero(net, mask)
        assert state_is_zero(net, optimizer, mask)


def test_sparse_gradients():
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    optimizers = [torch.optim.SparseAdam(net[0].parameters()), torch.optim.SGD(net[2].parameters(), lr=0.1)]
    mask = {name: torch.rand(w.shape) < 0.5 for name, w in dp.prunable(net, include="0.weight").items()}
    dp.hold(net, optimizers, mask)
    for _ in range(3):
        net.zero_grad()
        F.cross_entropy(net(torch.randint(9, (5, 3))), torch.randint(3, (5,))).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert removed_are_zero(net, mask)
        assert state_is_zero(net, optimizers[0], mask)


def test_expanded_gradients_set_by_hand():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    for parameter in net.parameters():
        parameter.grad = torch.ones(()).expand_as(parameter)
    optimizer.step()
    assert removed_are_zero(net, mask)


def test_a_released_hold_and_a_copied_mask():
    net = mlp()
    mask = random_mask(net)
    held = dp.hold(net, None, mask)
    mask["0.weight"].zero_()
    assert held.mask["0.weight"].any()
    held.release()
    with pytest.raises(ValueError, match="was released"):
        held.update(mask)


def state_of(optimizer, net):
    return {name: optimizer.state[w]["momentum_buffer"] for name, w in net.named_parameters()}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("foreach", "fused_sgd")])
def test_an_optimiser_that_was_not_named_moves_no_removed_weight(name):
    """Its state from dense training would; the steps are those under a hold that knows it."""
    nets = [mlp(), mlp()]
    optimizers = [OPTIMIZERS[name](net.parameters()) for net in nets]
    mask = random_mask(nets[0])
    for net, optimizer, named in zip(nets, optimizers, (True, False), strict=True):
        train(net, optimizer)
        dp.hold(net, optimizer if named else None, mask)
        for _ in range(4):
            train(net, optimizer, 1)
            assert removed_are_zero(net, mask)
            assert name in NEVER_ZERO or state_is_zero(net, optimizer, mask)
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_second_optimiser_and_one_that_comes_later_are_taken_in():
    net = mlp()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.SGD([*net[2].parameters(), *net[4].parameters()], lr=0.1, momentum=0.9)
    for optimizer in (first, second):
        backward(net)
        optimizer.step()
    mask = random_mask(net)
    held = dp.hold(net, first, mask)
    for optimizer in (first, second, torch.optim.AdamW(net.parameters(), weight_decay=0.1)):
        backward(net)
        optimizer.step()
        assert removed_are_zero(net, mask)
    other = random_mask(net, seed=1)
    held.update(other)
    assert not second.state[net[2].weight]["momentum_buffer"][~other["2.weight"]].any()
    saved = copy.deepcopy(second.state_dict())
    saved["state"][0]["momentum_buffer"].fill_(1.0)
    second.load_state_dict(saved)
    assert not second.state[net[2].weight]["momentum_buffer"][~other["2.weight"]].any()


def test_after_a_release_or_the_end_of_the_network_nothing_global_is_left():
    from driveprune.hold import _holds as holds

    gc.collect()  # networks of other tests
    before = len(holds)
    net = mlp()
    held = dp.hold(net, None, random_mask(net))
    assert len(holds) == before + 1
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    backward(net)
    optimizer.step()
    held.release()
    assert len(holds) == before
    moved = snapshot(net)
    backward(net)
    optimizer.step()
    assert net[0].weight[~held.mask["0.weight"]].any()
    assert not same(moved, snapshot(net))
    del held
    dp.hold(net, None, random_mask(net))
    assert len(holds) == before + 1
    del net, optimizer
    gc.collect()
    assert len(holds) == before


def test_a_hold_that_goes_in_the_middle_of_a_step_disturbs_no_optimiser():
    """Garbage is collected at any moment, also while torch goes through the hooks of all optimisers."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    net, other = mlp(), mlp(seed=1)
    dp.hold(other, None, random_mask(other)).cycle = other  # goes with the collector alone
    del other
    handle = register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)
    try:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        backward(net)
        optimizer.step()
    finally:
        handle.remove()


def test_an_optimiser_of_another_network_is_left_alone():
    net, other = mlp(), mlp(seed=1)
    dp.hold(net, None, random_mask(net))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    train(other, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert all(value.count_nonzero() == value.numel() for value in list(state_of(optimizer, other).values())[4:])


def test_training_a_deep_copy_says_once_that_it_is_not_held():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mask = random_mask(net)
    dp.hold(net, optimizer, mask)
    copied = copy.deepcopy(net)
    train(net, optimizer)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    with pytest.warns(dp.HoldWarning, match="a copy is not held: its removed weights move. Hold it by hold"):
        train(copied, optimizer, 1)
    assert not removed_are_zero(copied, mask)
    assert removed_are_zero(net, mask)
    train(copied, optimizer, 1)  # said once
    held_copy = copy.deepcopy(net)
    optimizer = torch.optim.SGD(held_copy.parameters(), lr=0.1)
    dp.hold(held_copy, optimizer, mask)
    train(held_copy, optimizer)
    assert removed_are_zero(held_copy, mask)


def of_a_copy(net):
    return copy.deepcopy(copy.deepcopy(net))


def of_a_part(net):
    return nn.Sequential(copy.deepcopy(net[0]), *list(mlp())[1:])


@pytest.mark.parametrize("copied", [copy.deepcopy, of_a_copy, of_a_part])
@pytest.mark.parametrize("gone", [True, False])
def test_copies_of_copies_and_of_parts_say_so_too_even_if_the_held_network_is_gone(copied, gone):
    net = mlp()
    held = dp.hold(net, None, random_mask(net))
    net, first = copied(net), net
    if gone:
        del held, first
        gc.collect()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(dp.HoldWarning, match="a copy is not held"):
        train(net, optimizer, 1)
    train(net, optimizer, 1)


def test_what_is_no_optimiser_or_mask_is_named():
    net = mlp()
    mask = random_mask(net)
    for arguments, message in (
        ((net, mask, None), "mask must be .* got None .the order is hold.model, optimizer, mask"),
        ((net, mask, mask), "optimizer must be a torch optimiser, several of them or None, got a dict"),
        ((mask, None, net), "model must be a torch.nn.Module, got a dict .the order is hold"),
        ((net, 3, mask), "optimizer must be .* got 3"),
    ):
        with pytest.raises(TypeError, match=message):
            dp.hold(*arguments)
