"""Cuts spread over training: when they come, what they look at, and that nothing else decides what comes out."""

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import driveprune as dp
from driveprune.batches import Batches, Images
from driveprune.fit import Loader, Tensors
from driveprune.gradients import endless
from driveprune.mask import kept_count
from driveprune.plan import Prune, Train, spread
from driveprune.schedule import cubic, exponential, named
from tests.methods import literal
from tests.methods.test_driveflow import literal_mean
from tests.methods.test_synflow import literal_score, masked
from tests.nets import batch, convnet, images, mlp, removed_are_zero, same, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
METRICS = {
    "drive": literal.drive_metric,
    "synflow": lambda model, theta, mask, data: literal_score(masked(model, theta, mask), mask, data[0]),
    "magnitude": lambda model, theta, mask, data: {name: theta[name].abs() for name in mask},
    "driveflow": literal_mean,
}
STEPS, PER_EPOCH = 60, 6


def moments(plan):
    """(step, sparsities) of each Prune of a plan."""
    step, found = 0, []
    for phase in plan:
        if isinstance(phase, Train):
            step = phase.until
        else:
            found.append((step, phase.path))
    return found


def test_cuts_are_evenly_spread_from_the_end_of_the_early_epochs():
    plan = dp.methods.make_plan("drive", 0.875, 100, 10, {"early_epochs": 1, "window": 4, "cuts": 3})
    assert moments(plan) == [(10, (0.5,)), (30, (0.75,)), (50, (0.875,))]
    assert plan[-1] == Train(100)
    plan = dp.methods.make_plan("synflow", 0.8, 100, 10, {"window": 3.0, "cuts": 4, "path": "cubic"})
    assert moments(plan) == [(step, (reached,)) for step, reached in zip((0, 10, 20, 30), cubic(0.8, 4), strict=True)]
    plan = dp.methods.make_plan("magnitude", 0.8, 100, 10, {"window": 2.0, "cuts": 2})
    assert moments(plan) == [(50, exponential(0.8, 2)[:1]), (70, (0.8,))]


@pytest.mark.parametrize("method", METRICS)
def test_without_a_window_the_plan_is_one_phase(method):
    plans = [dp.methods.make_plan(method, 0.9, 100, 10, given) for given in ({}, {"window": 0})]
    assert dp.kinds.same(*plans)
    assert sum(isinstance(phase, Prune) for phase in plans[0]) == 1
    assert next(phase for phase in plans[0] if isinstance(phase, Prune)).skip == 0


def test_cuts_that_fall_on_one_step_are_made_at_once():
    cut = Prune(lambda: None, exponential(0.9, 7))
    plan = spread(cut, 1.0, 0.3, 10)
    assert moments(plan) == [
        (10, cut.path[:2]), (11, cut.path[2:3]), (12, cut.path[3:6]), (13, cut.path[6:])
    ]  # fmt: skip
    assert [phase.skip for phase in plan if isinstance(phase, Prune)] == [0, 2, 3, 6]
    assert moments(spread(cut, 1.0, 0.04, 10)) == [(10, cut.path)]
    short = dp.methods.make_plan("magnitude", 0.9, 60, 10, {"early_epochs": 1, "window": 0.3, "cuts": 7})
    assert [path for _, path in moments(short)] == [(cut.path[n],) for n in (1, 2, 5, 6)]


def test_windows_that_cannot_be():
    given = {"sparsity": 0.9, "epochs": 10, "steps_per_epoch": 6}
    with pytest.raises(ValueError, match=r"early_epochs=5.0 \(30 steps\), window=5.5 \(33 steps\). Set them lower"):
        dp.Pruner(mlp(), None, [batch()], method="drive", knobs={"window": 5.5}, **given)
    with pytest.raises(ValueError, match=r"60 steps in 10 epochs.*window=11.0 \(66 steps\)"):
        dp.fit(
            mlp(), [batch()] * 6, method="synflow", knobs={"window": 11.0}, sparsity=0.9, epochs=10, progress=False
        )
    with pytest.raises(ValueError, match="window must be a number of at least 0, got -1"):
        dp.Pruner(mlp(), None, [batch()], method="driveflow", knobs={"window": -1}, **given)
    with pytest.raises(ValueError, match='path must be "exponential" or "cubic", got'):
        dp.Pruner(mlp(), None, [batch()], method="drive", knobs={"path": "linear"}, **given)
    for method in METRICS:
        with pytest.raises(ValueError, match=rf"window=2.0 would do nothing: it says how {method} trains"):
            dp.prune(mlp(), [batch()], method=method, sparsity=0.9, knobs={"window": 2.0})
    for method in ("snip", "grasp", "force", "erk", "random"):
        with pytest.raises(ValueError, match=f"{method} has no knob 'window'"):
            dp.Pruner(mlp(), None, [batch()], method=method, knobs={"window": 2.0}, **given)
    with pytest.raises(ValueError, match="skip must be a whole number of at least 0, got -1"):
        Prune(lambda: None, (0.5,), skip=-1)


def test_the_window_grows_and_shrinks_with_a_recipe():
    recipe = dp.recipes.get("demo-digits")
    recipe = dp.recipes.scaled(
        dp.recipes.Recipe.from_json({**recipe.to_json(), "knobs": {"drive": {"window": 6.0, "cuts": 9}}}), epochs=6
    )
    assert recipe.knobs["drive"] == {"window": 3.0, "cuts": 9}


def data(draw):
    return [draw(size=16, seed=seed, dtype=torch.float64) for seed in range(PER_EPOCH)]


def knobs(method, path, cuts=23):
    early = {"synflow": 0.0}.get(method, 1.0)
    return {"early_epochs": early, "window": 7.5, "cuts": cuts, "path": path}


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def train_step(net, optimizer, one, number):
    torch.manual_seed(number)  # dropout by counter
    F.cross_entropy(net(one[0]), one[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def literal_training(method, net, batches, sparsity, path, cuts=23):
    """SGD with the mask multiplied in after each step; cut n round(45·n/22) steps after the early epochs."""
    optimizer, start = optimizer_of(net), 0 if method == "synflow" else PER_EPOCH
    weights = dp.prunable(net)
    mask = {name: torch.ones(w.shape, dtype=torch.bool) for name, w in weights.items()}
    size, reached = sum(w.numel() for w in weights.values()), named(path, sparsity, cuts)
    due = {n: start + round(45 * n / (cuts - 1)) for n in range(cuts)}
    masks = []
    for step in range(STEPS + 1):
        for n in [n for n, moment in due.items() if moment == step]:
            theta = {name: w.detach().clone() for name, w in weights.items()}
            scores = METRICS[method](copy.deepcopy(net), theta, mask, batches[n % len(batches)])
            mask = literal.best(scores, mask, max(1, round((1 - reached[n]) * size)))
            zero(weights, mask, optimizer)
        masks.append(mask)
        if step < STEPS:
            train_step(net, optimizer, batches[step % PER_EPOCH], step)
            zero(weights, mask, optimizer)
    return masks


@torch.no_grad()
def zero(weights, mask, optimizer):
    for name, weight in weights.items():
        weight[~mask[name]] = 0
        if (momentum := optimizer.state[weight].get("momentum_buffer")) is not None:
            momentum[~mask[name]] = 0


def pruner_of(method, net, optimizer, batches, path="exponential", sparsity=0.95, cuts=23, **options):
    return dp.Pruner(
        net, optimizer, batches, method=method, sparsity=sparsity, epochs=STEPS / PER_EPOCH,
        steps_per_epoch=PER_EPOCH, knobs=knobs(method, path, cuts), **options,
    )  # fmt: skip


def masks_of(method, net, batches, path="exponential", **options):
    """The mask after each step, and the pruner in the end."""
    optimizer = optimizer_of(net)
    pruner = pruner_of(method, net, optimizer, batches, path, **options)
    masks = [dict(pruner.mask)]
    for step in range(STEPS):
        train_step(net, optimizer, batches[step % PER_EPOCH], step)
        pruner.step()
        assert removed_are_zero(net, pruner.mask)
        masks.append(dict(pruner.mask))
    assert pruner.done
    return masks, pruner


@pytest.mark.parametrize("path", ["exponential", "cubic"])
@pytest.mark.parametrize(("build", "draw"), [(mlp, batch), (convnet, images)])
@pytest.mark.parametrize("method", METRICS)
def test_masks_and_weights_equal_a_literal_loop_in_float64(method, build, draw, path):
    batches, net = data(draw), build(dtype=torch.float64)
    other = copy.deepcopy(net)
    expected = literal_training(method, other, batches, 0.95, path)
    found, _ = masks_of(method, net, batches, path)
    for step, (own, exact) in enumerate(zip(found, expected, strict=True)):
        assert all(torch.equal(own[name], exact[name]) for name in exact), step
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert len({tuple(int(kept.sum()) for kept in mask.values()) for mask in found}) > 15


@pytest.mark.parametrize("cuts", [2, 23, 100])
@pytest.mark.parametrize("method", METRICS)
def test_counts_are_exact_at_every_moment_and_the_same_seed_gives_the_same_bits(method, cuts):
    nets = [convnet(), convnet()]
    (found, pruner), (again, _) = (masks_of(method, net, data32(), cuts=cuts) for net in nets)
    size = sum(kept.numel() for kept in pruner.mask.values())
    due = dict(moments(pruner.plan))
    reached = 0.0
    for step, mask in enumerate(found):
        reached = due[step][-1] if step in due else reached
        assert sum(int(kept.sum()) for kept in mask.values()) == kept_count(size, reached)
    assert all(same(one, other) for one, other in zip(found, again, strict=True))
    assert same(snapshot(nets[0]), snapshot(nets[1]))
    for before, after in itertools.pairwise(found):
        assert all(not (after[name] & ~before[name]).any() for name in before)


def data32():
    return [images(seed=seed) for seed in range(PER_EPOCH)]


@pytest.mark.parametrize("at", [3, 20, 21, 40, 59])
@pytest.mark.parametrize("method", METRICS)
def test_a_training_resumed_before_inside_and_after_the_window_gives_the_same_bits(method, at):
    batches, whole = data32(), convnet()
    masks, _ = masks_of(method, whole, batches)
    net = convnet()
    optimizer = optimizer_of(net)
    pruner = pruner_of(method, net, optimizer, batches)
    for step in range(at):
        train_step(net, optimizer, batches[step % PER_EPOCH], step)
        pruner.step()
    stored = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict(), pruner.state_dict()), stored)
    stored.seek(0)
    of_net, of_optimizer, of_pruner = torch.load(stored)
    net = convnet(seed=1)
    optimizer = optimizer_of(net)
    net.load_state_dict(of_net)
    optimizer.load_state_dict(of_optimizer)
    pruner = pruner_of(method, net, optimizer, batches, resume=of_pruner)
    for step in range(at, STEPS):
        train_step(net, optimizer, batches[step % PER_EPOCH], step)
        pruner.step()
        assert same(dict(pruner.mask), masks[step + 1])
    assert same(snapshot(net), snapshot(whole))


def test_a_checkpoint_of_another_window_is_refused():
    net = convnet()
    state = pruner_of("drive", net, None, data32()).state_dict()
    with pytest.raises(ValueError, match="belongs to another plan: its path is 'exponential', and.*'cubic'"):
        pruner_of("drive", convnet(), None, data32(), path="cubic", resume=state)


@pytest.mark.parametrize("method", METRICS)
def test_a_hundred_cuts_stay_small_in_a_checkpoint(method):
    sizes = {}
    for cuts in (2, 100):
        state = pruner_of(method, convnet(), None, data32(), cuts=cuts).state_dict()
        torch.save(state, stored := io.BytesIO())
        sizes[cuts] = len(stored.getvalue())
        assert len(state["identity"]) < 2000
    assert abs(sizes[100] - sizes[2]) < 200


def test_checkpoints_of_own_plans_from_before_there_was_a_skip_are_known():
    plan = [Prune(dp.methods.magnitude.score, (0.5,)), Train(6)]
    state = dp.Pruner(mlp(), None, method=plan, steps_per_epoch=6).state_dict()
    assert "Prune(driveprune.methods.magnitude.score, (0.5,), 'global', False, True)" in state["identity"]


def firsts(batches, skips):
    """The first number in the first batch of cuts of a window that skip batches."""
    torch.manual_seed(0)
    return [next(endless(batches, skip))[0].reshape(-1)[0].item() for skip in skips]


X, Y = torch.arange(12.0)[:, None], torch.zeros(12, dtype=torch.long)
PAIRS = TensorDataset(X, Y)


class Unsized:
    """Batches of unknown length."""

    def __iter__(self):
        return iter(DataLoader(PAIRS, batch_size=3))


@pytest.mark.parametrize(
    "batches",
    [
        list(DataLoader(PAIRS, batch_size=3)), DataLoader(PAIRS, batch_size=3), Unsized(),
        Tensors(X, Y, 3, None), Loader(DataLoader(PAIRS, batch_size=3), None),
        Loader(list(DataLoader(PAIRS, batch_size=3)), 0),
    ],
)  # fmt: skip
def test_cuts_at_different_moments_look_at_the_batches_that_cuts_at_one_moment_look_at(batches):
    assert firsts(batches, range(10)) == [0, 3, 6, 9, 0, 3, 6, 9, 0, 3]
    row = endless(batches, 3)
    assert [next(row)[0][0].item() for _ in range(3)] == [9, 0, 3]


@pytest.mark.parametrize("of", ["images", "tensors"])
def test_shuffled_batches_of_the_package_go_on_in_their_order(of):
    pixels = Images(torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1), Y)
    batches = Batches(pixels, size=3, seed=1) if of == "images" else Tensors(X, Y, 3, 1)
    row = endless(batches)
    expected = [next(row)[0].reshape(-1)[0].item() for _ in range(8)]
    assert firsts(batches, range(8)) == expected


def test_a_loader_that_shuffles_begins_a_new_order_at_each_cut():
    drawn = []

    class Noted(TensorDataset):
        def __getitem__(self, index):
            drawn.append(index)
            return super().__getitem__(index)

    for loader in (
        DataLoader(Noted(X, Y), batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(0)),
        Loader(DataLoader(Noted(X, Y), batch_size=1, shuffle=True), 3),
    ):
        found = firsts(loader, range(1, 12))
        assert len(set(found)) > 3
        assert firsts(loader, range(1, 12)) == found
    assert len(drawn) == 4 * 11  # none is drawn only to be passed over


class Nothing:
    """Batches of unknown length, which are none."""

    def __iter__(self):
        return iter(())


def test_no_batches_is_an_error_in_a_window_too():
    for batches in ([], Nothing()):
        with pytest.raises(ValueError, match="batches is empty"):
            next(endless(batches, 3))


def test_fit_carries_out_a_window_and_repeats():
    def trained():
        net, counts = convnet(), []
        run = dp.fit(
            net, data32(), method="drive", sparsity=0.9, epochs=4, progress=False,
            knobs={"early_epochs": 1.0, "window": 2.0, "cuts": 5},
            watch=lambda moment: counts.append(moment.work),
        )  # fmt: skip
        return snapshot(net), dict(run.mask), sum(work.startswith("pruning") for work in counts)

    (net, mask, cuts), (again, other, _) = trained(), trained()
    assert cuts == 5
    assert same(net, again)
    assert same(mask, other)
    assert sum(int(kept.sum()) for kept in mask.values()) == kept_count(1624, 0.9)
