import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from driveprune.mask import kept_count
from tests.nets import batch, convnet, images, mlp, removed_are_zero, same, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


DATA = [images(seed=0), images(seed=1), images(seed=2)]


def make(method="drive", net=None, **options):
    net = net or convnet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    knobs = {"imp": {"cycles": 3, "cycle_epochs": 2}, "gmp": {"cuts": 4}, "drive": {"early_epochs": 2, "cuts": 5}}
    pruner = dp.Pruner(
        net, optimizer, DATA, method=method, sparsity=0.9, epochs=6, steps_per_epoch=3, scheduler=scheduler,
        **{"knobs": knobs.get(method), **options},
    )  # fmt: skip
    return net, optimizer, scheduler, pruner


def one_step(net, optimizer, pruner, number):
    x, y = DATA[number % 3]
    torch.manual_seed(number)  # dropout by counter
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    pruner.step()


def test_the_moment_of_the_cut():
    net, optimizer, _, pruner = make(knobs={"early_epochs": 2, "cuts": 5})
    assert pruner.epochs == 6
    assert pruner.held is None
    for number in range(18):
        assert (pruner.held is not None) == (number >= 6)
        one_step(net, optimizer, pruner, number)
    assert pruner.done
    pruner.step()  # training on after the end changes nothing but the weights
    assert removed_are_zero(net, pruner.mask)


def test_methods_that_cut_first_cut_when_the_pruner_is_made():
    net, _, _, pruner = make("snip")
    assert pruner.held is not None
    assert removed_are_zero(net, pruner.mask)
    assert sum(int(k.sum()) for k in pruner.mask.values()) == kept_count(1624, 0.9)


def test_optimiser_state_is_kept_after_the_cut_and_zero_where_removed():
    net, optimizer, _, pruner = make()
    for number in range(6):
        one_step(net, optimizer, pruner, number)
    state = optimizer.state[net[4].weight]["exp_avg"]
    assert state[pruner.mask["4.weight"]].any()
    assert not state[~pruner.mask["4.weight"]].any()


def test_imp_takes_all_its_epochs():
    *_, pruner = make("imp")
    assert pruner.epochs == 3 * 2 + 6


@pytest.mark.parametrize("method", ["drive", "imp", "gmp", "snip"])
@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 13, 17])
@pytest.mark.parametrize("order", ["pruner first", "pruner last"])
def test_going_on_from_a_checkpoint_is_bit_exact(method, stop, order):
    net, optimizer, scheduler, pruner = make(method)
    steps = pruner.epochs * 3
    for number in range(stop):
        one_step(net, optimizer, pruner, number)
    file = io.BytesIO()
    torch.save(
        {
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "pruner": pruner.state_dict(),
        },
        file,
    )
    for number in range(stop, steps):
        one_step(net, optimizer, pruner, number)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again, optimizer_again, scheduler_again, resumed = make(method, net=convnet(seed=9))
    if order == "pruner first":
        resumed.load_state_dict(state["pruner"])
    again.load_state_dict(state["net"])
    optimizer_again.load_state_dict(state["optimizer"])
    scheduler_again.load_state_dict(state["scheduler"])
    if order == "pruner last":
        resumed.load_state_dict(state["pruner"])
    for number in range(stop, steps):
        one_step(again, optimizer_again, resumed, number)
    assert same(net.state_dict(), again.state_dict())
    assert same(dict(pruner.mask), dict(resumed.mask))
    assert resumed.done


def test_the_last_epoch_need_not_be_whole():
    net = convnet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = dp.Pruner(net, optimizer, DATA, method="snip", sparsity=0.9, epochs=7 / 3, steps_per_epoch=3)
    assert (pruner.plan[-1].until, pruner.epochs) == (7, 3)
    with pytest.raises(ValueError, match="at least 1 step in an epoch and in all epochs, got epochs=0.1"):
        dp.Pruner(net, optimizer, DATA, method="snip", sparsity=0.9, epochs=0.1, steps_per_epoch=3)


def test_resume_does_not_cut_again():
    calls = []

    def score(model, mask, batches, *, loss, generator):
        calls.append(1)
        return {name: torch.rand(kept.shape, generator=generator) for name, kept in mask.items()}

    *_, pruner = make(score)
    net = convnet(seed=3)
    before = snapshot(net)
    *_, resumed = make(score, net=net, resume=pruner.state_dict())
    assert len(calls) == 1
    assert same(dict(resumed.mask), dict(pruner.mask))
    assert all(torch.equal(net.state_dict()[n], torch.where(k, before[n], 0.0)) for n, k in pruner.mask.items())


def test_a_checkpoint_of_another_plan():
    *_, pruner = make("snip")
    *_, other = make("drive")
    with pytest.raises(ValueError, match="belongs to another plan.*snip.*drive"):
        other.load_state_dict(pruner.state_dict())


def test_shuffle_keeps_densities_and_gives_values_back():
    net, initial = convnet(), snapshot(convnet())
    cut = dp.methods.make_plan("snip", 0.9, 18, 3)[0]
    pruner = dp.Pruner(
        net, None, DATA, method=[cut, dp.Shuffle(seed=1), dp.Train(18)], sparsity=0.9, epochs=6, steps_per_epoch=3
    )
    plain = dp.prune(convnet(), DATA, method="snip", sparsity=0.9)
    for name, kept in pruner.mask.items():
        assert int(kept.sum()) == int(plain[name].sum())
        assert torch.equal(net.state_dict()[name], torch.where(kept, initial[name], 0.0))
    assert any(not torch.equal(kept, plain[name]) for name, kept in pruner.mask.items())


def test_shuffle_after_a_rewind():
    net, initial = mlp(), snapshot(mlp())
    plan = [dp.Train(1), dp.Prune(dp.methods.magnitude.score, (0.9,)), dp.Rewind(0), dp.Shuffle(), dp.Train(3)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = dp.Pruner(net, optimizer, [batch()], method=plan, sparsity=0.9, epochs=3, steps_per_epoch=1)
    F.cross_entropy(net(batch()[0]), batch()[1]).backward()
    optimizer.step()
    pruner.step()
    for name, kept in pruner.mask.items():
        assert torch.equal(net.state_dict()[name], torch.where(kept, initial[name], 0.0))


def test_reinit_draws_new_weights_under_the_same_mask():
    net, initial = convnet(), snapshot(convnet())
    net.train()(DATA[0][0])
    cut = dp.methods.make_plan("snip", 0.9, 18, 3)[0]
    state = torch.get_rng_state()
    pruner = dp.Pruner(
        net, None, DATA, method=[cut, dp.Reinit(seed=1), dp.Train(18)], sparsity=0.9, epochs=6, steps_per_epoch=3
    )
    assert torch.equal(state, torch.get_rng_state())
    assert removed_are_zero(net, pruner.mask)
    assert not net[1].running_mean.any()
    for name, kept in pruner.mask.items():
        assert not torch.equal(net.state_dict()[name][kept], initial[name][kept])


def bad_scores(value):
    def score(model, mask, batches, *, loss, generator):
        scores = {name: torch.rand(kept.shape) for name, kept in mask.items()}
        if int(sum(kept.sum() for kept in mask.values())) < 1000:  # only after the first cuts
            scores["4.weight"][0, 0] = value
        return scores

    return score


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_scores_in_the_middle_roll_back(value):
    net = convnet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = snapshot(net)
    plan = [dp.Prune(bad_scores(value), (0.1, 0.3, 0.5, 0.9)), dp.Train(3)]
    with pytest.raises(ValueError, match="scores of 4.weight hold NaN or infinity"):
        dp.Pruner(net, optimizer, DATA, method=plan, sparsity=0.9, epochs=1, steps_per_epoch=3)
    assert same(before, snapshot(net))
    assert not optimizer.state


def test_bad_lengths():
    for options in ({"epochs": 0}, {"steps_per_epoch": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            dp.Pruner(mlp(), None, [batch()], sparsity=0.9, **{"epochs": 1, "steps_per_epoch": 1, **options})
    with pytest.raises(ValueError, match="epochs before the cut are more than the whole training"):
        dp.Pruner(mlp(), None, [batch()], sparsity=0.9, epochs=3, steps_per_epoch=1)


@pytest.mark.parametrize("order", ["pruner first", "pruner last"])
@pytest.mark.parametrize("method", ["drive", "imp"])
def test_going_back_to_a_checkpoint_from_before_the_cut(method, order):
    net, optimizer, scheduler, pruner = make(method)
    one_step(net, optimizer, pruner, 0)
    parts = (net, optimizer, scheduler)
    saved = [copy.deepcopy(part.state_dict()) for part in (*parts, pruner)]
    steps = pruner.epochs * 3
    for number in range(1, steps):
        one_step(net, optimizer, pruner, number)
    expected = snapshot(net)
    if order == "pruner first":
        pruner.load_state_dict(saved[3])
    for part, state in zip(parts, saved[:3], strict=True):
        part.load_state_dict(state)
    if order == "pruner last":
        pruner.load_state_dict(saved[3])
    assert pruner.held is None
    assert dp.sparsity(pruner.mask) == 0
    for number in range(1, steps):
        one_step(net, optimizer, pruner, number)
    assert same(expected, snapshot(net))


def test_a_constructor_that_fails_leaves_nothing_behind():
    net = convnet()
    before = snapshot(net)
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="none of the masked weights"):
        dp.Pruner(net, other, DATA, method="snip", sparsity=0.9, epochs=1, steps_per_epoch=3)
    cut = dp.Prune(dp.methods.snip.score, (0.5,))
    with pytest.raises(ValueError, match="used up"):
        dp.Pruner(
            net, None, iter(DATA[:1]), method=[cut, dp.Prune(dp.methods.snip.score, (0.9,)), dp.Train(3)],
            sparsity=0.9, epochs=1, steps_per_epoch=3,
        )  # fmt: skip
    assert same(before, snapshot(net))
    dp.Pruner(net, None, DATA, method="snip", sparsity=0.9, epochs=1, steps_per_epoch=3)
    cut_once = snapshot(net)
    with pytest.raises(ValueError, match="held already"):
        dp.Pruner(net, None, DATA, method="snip", sparsity=0.95, epochs=1, steps_per_epoch=3)
    assert same(cut_once, snapshot(net))


def test_schedulers_of_schedulers_rewind():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
    ]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])
    pruner = dp.Pruner(
        net, optimizer, [batch()], method="imp", sparsity=0.5, epochs=4, steps_per_epoch=1, scheduler=scheduler,
        knobs={"cycles": 2, "cycle_epochs": 3},
    )  # fmt: skip
    rates = []
    for _ in range(pruner.epochs):
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
        F.cross_entropy(net(batch()[0]), batch()[1]).backward()
        optimizer.step()
        pruner.step()
    assert rates[:3] == rates[3:6] == rates[6:9]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match="ReduceLROnPlateau"):
        dp.Pruner(mlp(), None, sparsity=0.5, epochs=9, steps_per_epoch=1, scheduler=plateau)


def test_groups_that_come_later_survive_a_rewind():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = dp.Pruner(
        net,
        optimizer,
        method="imp",
        sparsity=0.5,
        epochs=1,
        steps_per_epoch=1,
        knobs={"cycles": 1, "cycle_epochs": 1},
    )
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.7})
    optimizer.param_groups[0]["lr"] = 0.3
    pruner.step()
    assert pruner.cycle == 1
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.7]


def test_states_that_belong_elsewhere_change_nothing():
    *_, pruner = make("snip")
    *_, other = make("snip", exclude="0.*")
    before = pruner.state_dict()
    with pytest.raises(ValueError, match="only one of them has 0.weight"):
        pruner.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="no state of a pruner: it has no 'cursor'"):
        pruner.load_state_dict({})
    assert same(before["mask"], pruner.state_dict()["mask"])


def test_reinit_checks_before_it_draws():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.matrix = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 3))

        def forward(self, x):
            return self.first(x) @ self.matrix

    net = Own()
    before = snapshot(net)
    plan = [dp.Reinit(), dp.Train(3)]
    with pytest.raises(ValueError, match="no reset_parameters"):
        dp.Pruner(net, None, [batch()], method=plan, sparsity=0.5, epochs=1, steps_per_epoch=3)
    assert same(before, snapshot(net))


def test_bad_knobs_of_scores():
    for knobs, message in (
        ({"batches_per_cut": 0}, "batches_per_cut must be a whole number of at least 1, got 0"),
        ({"early_epochs": float("nan")}, "early_epochs must not be negative, got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            dp.prune(mlp(), [batch()], sparsity=0.5, knobs=knobs)
    with pytest.raises(ValueError, match="a plan of your own has no knobs, got cuts"):
        dp.Pruner(mlp(), None, method=[dp.Train(1)], sparsity=0.5, epochs=1, steps_per_epoch=1, knobs={"cuts": 1})
