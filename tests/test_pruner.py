import copy
import io
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from driveprune.mask import kept_count
from driveprune.methods import magnitude
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
    for options in ({"epochs": 0}, {"steps_per_epoch": 0}, {"epochs": 0.1}):
        with pytest.raises(
            ValueError, match="epochs must be a number above 0|whole number of at least 1|at least 1 step"
        ):
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
        dp.Pruner(net, None, [batch()], method=plan, steps_per_epoch=3)
    assert same(before, snapshot(net))


def test_bad_knobs_of_scores():
    for knobs, message in (
        ({"batches_per_cut": 0}, "batches_per_cut must be a whole number of at least 1, got 0"),
        ({"early_epochs": float("nan")}, "early_epochs must be a number, got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            dp.prune(mlp(), [batch()], sparsity=0.5, knobs=knobs)
    with pytest.raises(ValueError, match="a plan of your own has no knobs, got cuts"):
        dp.Pruner(mlp(), None, method=[dp.Train(1)], sparsity=0.5, epochs=1, steps_per_epoch=1, knobs={"cuts": 1})


OTHERS = {
    "min_kept": (0, 2), "include": ("4.*", ("4.*", "10.*")), "exclude": ((), "0.weight"), "frozen": (False, True),
    "budget": ("weights", "macs"), "seed": (0, 1), "sparsity": (0.9, 0.5), "epochs": (6, 7),
    "loss": (dp.gradients.cross_entropy, lambda model, b: F.cross_entropy(model(b[0]), b[1])),
    "knobs": ({"mode": "training"}, {"mode": "evaluation"}),
}  # fmt: skip


@pytest.mark.parametrize("option", OTHERS)
def test_a_checkpoint_made_with_another_option_is_refused_and_both_values_are_named(option):
    ours, theirs = OTHERS[option]
    pruners = []
    for value in (theirs, ours):
        net = convnet()
        net[0].weight.requires_grad_(option != "frozen")
        given = {"method": "snip", "sparsity": 0.9, "epochs": 6, "steps_per_epoch": 3, option: value}
        pruners.append(dp.Pruner(net, torch.optim.SGD(net.parameters(), lr=0.1), DATA, **given))
    state = copy.deepcopy(pruners[0].state_dict())
    before = pruners[1].state_dict()
    name = {"knobs": "mode", "epochs": "steps"}.get(option, option)
    message = f"(another plan|other weights).*its {name} is .*, and that of this pruner "
    with pytest.raises(ValueError, match=message) as error:
        pruners[1].load_state_dict(state)
    if option in ("min_kept", "seed", "frozen", "sparsity"):
        assert f"its {option} is {theirs!r}, and that of this pruner {ours!r}" in str(error.value)
    assert same(before["mask"], pruners[1].state_dict()["mask"])
    pruners[0].load_state_dict(state)


def test_checkpoints_from_before_there_were_these_options_still_load():
    """As the version before wrote them: all knobs, the sparsity that was asked for, and no other option."""
    *_, pruner = make("drive", min_kept=1)
    state = copy.deepcopy(pruner.state_dict())
    old = {
        "method": "drive", "sparsity": 0.9, "budget": "weights", "seed": 0, "steps": 18, "phases": 3,
        "knobs": {"early_epochs": 2, "cuts": 5, "fresh": True, "batches_per_cut": 1, "combine": "mean",
                  "terms": ["magnitude", "connection", "convergence"]},
    }  # fmt: skip
    pruner.load_state_dict({**state, "identity": json.dumps(old)})
    for name, value in (("cuts", 6), ("combine", "squares")):
        changed = {**old, "knobs": {**old["knobs"], name: value}}
        with pytest.raises(ValueError, match=f"its {name} is {value!r}, and that of this pruner"):
            pruner.load_state_dict({**state, "identity": json.dumps(changed)})


def test_a_loss_of_a_script_is_that_of_the_module():
    def loss(model, b):
        return F.cross_entropy(model(b[0]), b[1])

    *_, pruner = make("snip", loss=loss)
    state = copy.deepcopy(pruner.state_dict())
    assert "test_a_loss_of_a_script_is_that_of_the_module.<locals>.loss" in state["identity"]
    state["identity"] = state["identity"].replace("tests.test_pruner.", "__main__.")
    pruner.load_state_dict(state)
    with pytest.raises(ValueError, match="its loss is 'other', and that of this pruner"):
        pruner.load_state_dict({**state, "identity": json.dumps({**json.loads(state["identity"]), "loss": "other"})})


def test_a_plan_of_ones_own_says_how_long_and_how_sparse():
    plan = [dp.Train(3), dp.Prune(magnitude.score, (0.25, 0.5)), dp.Train(6)]
    net = convnet()
    pruner = dp.Pruner(net, torch.optim.SGD(net.parameters(), lr=0.1), DATA, method=plan, steps_per_epoch=3)
    assert pruner.epochs == 2
    assert pruner.mask.provenance["sparsity"] == 0
    for _ in range(3):
        pruner.step()
    assert pruner.mask.provenance["sparsity"] == dp.sparsity(pruner.mask) == 0.5
    assert pruner.mask.provenance["knobs"] == {}
    dp.Pruner(convnet(), None, DATA, method=plan, sparsity=0.5, epochs=2, steps_per_epoch=3)
    for options, message in (
        ({"epochs": 3}, "the plan ends at step 6, which is 2 epochs, so epochs=3 would do nothing"),
        ({"sparsity": 0.9}, "the plan cuts to sparsity 0.5, so sparsity=0.9 would do nothing"),
    ):
        with pytest.raises(dp.OptionError, match=message):
            dp.Pruner(convnet(), None, DATA, method=plan, steps_per_epoch=3, **options)
    with pytest.raises(dp.OptionError, match="one of its phases is 3"):
        dp.Pruner(convnet(), None, DATA, method=[3], steps_per_epoch=3)
    with pytest.raises(dp.OptionError, match="needs at least one phase"):
        dp.Pruner(convnet(), None, DATA, method=[], steps_per_epoch=3)


def test_a_checkpoint_of_another_plan_of_ones_own_is_refused():
    from driveprune.methods import magnitude, random

    def plan(until=4, score=magnitude.score, path=(0.3, 0.9), **options):
        return [dp.Train(until), dp.Prune(score, path, **options), dp.Train(8)]

    def pruner(method, state=None):
        return dp.Pruner(convnet(), None, DATA, method=method, steps_per_epoch=2, resume=state)

    state = pruner(plan()).state_dict()
    assert pruner(plan(), state).steps_left == 4
    for other in (
        plan(until=6), plan(score=random.score), plan(path=(0.5, 0.9)), plan(scope="layer"), plan(revive=True),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"another plan: its plan is .Train.4., Prune.driveprune.methods.magni"):
            pruner(other, state)


def test_provenance_follows_a_plan_of_many_cuts():
    net, knobs = convnet(), {"cuts": 4}
    pruner = dp.Pruner(net, None, DATA, method="gmp", sparsity=0.9, epochs=6, steps_per_epoch=3, knobs=knobs)
    seen = []
    for _ in range(18):
        pruner.step()
        assert pruner.mask.provenance["sparsity"] == dp.sparsity(pruner.mask)
        seen.append(pruner.mask.provenance["sparsity"])
    assert len(set(seen)) == 5
    assert pruner.mask.provenance["asked"] == 0.9
    assert pruner.held.mask.provenance == pruner.mask.provenance


BAD = [
    ({"scheduler": 3}, "scheduler must be a learning-rate scheduler"),
    ({"resume": "state"}, "resume must be the state"),
    ({"epochs": None}, "epochs must be given"),
    ({"sparsity": None}, "sparsity must be given"),
    ({"epochs": float("nan")}, "epochs must be a number, got nan"),
    ({"epochs": True}, "epochs must be a number, got"),
    ({"steps_per_epoch": 2.5}, "steps_per_epoch must be a whole number, got 2.5"),
    ({"group": "all"}, "group must be a process group"),
    ({"progress": "yes"}, "progress must be true or false"),
    ({"knobs": [1]}, "knobs must be names and values"),
    ({"method": "erk", "budget": "macs"}, "needs a method whose weights compete globally"),
    ({"method": "imp", "budget": "macs", "min_kept": 1}, "without min_kept"),
    ({"batches": None, "budget": "macs"}, "needs batches"),
    ({"sparsity": float("nan")}, "sparsity must be in"),
    ({"optimizer": "adam"}, "optimizer must be a torch optimiser"),
    ({"seed": 1.7}, "seed must be a whole number, got 1.7"),
    ({"frozen": 0}, "frozen must be true or false, got 0"),
    ({"min_kept": -1}, "min_kept must be a whole number of at least 0, got -1"),
    ({"exclude": [3]}, "exclude must be a pattern"),
    ({"knobs": {"early_epochs": 9}}, "early_epochs=9.0 .27 steps"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_options_that_cannot_be_change_nothing(options, message):
    net = convnet()
    before = snapshot(net)
    given = {"optimizer": None, "batches": DATA, "sparsity": 0.9, "epochs": 6, "steps_per_epoch": 3, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        dp.Pruner(net, given.pop("optimizer"), given.pop("batches"), **given)
    assert same(before, snapshot(net))
