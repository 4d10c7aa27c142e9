"""The loop: resuming from any step, what is measured when, and where the time goes."""

import copy

import pytest
import torch
from torch import nn

import driveprune as dp
import driveprune.train
from driveprune import methods
from driveprune.fit import Tensors
from driveprune.plan import Train
from driveprune.pruner import Pruner
from driveprune.train import Stopped, Trained, measured, train
from tests.nets import same

STEPS = 4
"""Steps of an epoch."""


def data(seed=0):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16 * STEPS, 10, generator=generator)
    return Tensors(x, (x.sum(1) > 0).long(), 16, seed)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(0.3), nn.Linear(30, 20), nn.ReLU(),
        nn.Linear(20, 2),
    )  # fmt: skip


PLANS = {
    "drive": ("drive", {"early_epochs": 1.5, "cuts": 4}),
    "imp": ("imp", {"cycles": 2, "cycle_epochs": 1.0}),
    "imp, rewound to an epoch": ("imp", {"cycles": 2, "cycle_epochs": 2.0, "rewind_epochs": 1.0}),
    "gmp": ("gmp", {"cuts": 3}),
    "snip": ("snip", {}),
}


class Memory:
    """Keeps a copy of every state; `given` is what to go on from."""

    def __init__(self, given=None):
        self.given, self.states = given, []

    def load(self):
        return copy.deepcopy(self.given)

    def save(self, state):
        self.states.append(copy.deepcopy(state))


def run(plan="drive", memory=None, adam=False, epochs=3, **options):
    model = net()
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.05)
    if not adam:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    method, knobs = PLANS[plan] if isinstance(plan, str) else (plan, None)
    source = data()
    sparsity = None if plan == [Train(3 * STEPS)] else 0.8

    def make_pruner(resume, tell):
        return Pruner(
            model, optimizer, source, sparsity=sparsity, epochs=epochs, steps_per_epoch=len(source), method=method,
            knobs=knobs, scheduler=scheduler, progress=tell, resume=resume,
        )  # fmt: skip

    trained = train(
        model, optimizer, source, make_pruner, scheduler=scheduler, tests={"test": data(None)},
        checkpoints=memory, **{"every": 0.0, **options},
    )  # fmt: skip
    return model, trained


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("adam", [False, True])
def test_from_any_step_the_same_bits(plan, adam):
    memory = Memory()
    model, trained = run(plan, memory, adam)
    again, other = run(plan, None, adam)
    assert same(model.state_dict(), again.state_dict())
    for state in memory.states:
        resumed, other = run(plan, Memory(state), adam)
        assert same(model.state_dict(), resumed.state_dict())
        assert other.rows == trained.rows
        assert same(dict(other.mask), dict(trained.mask))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains_and_resumes_to_the_same_bits(precision):
    memory = Memory()
    model, trained = run("drive", memory, precision=precision)
    full, _ = run("drive")
    assert not same(model.state_dict(), full.state_dict())
    assert trained.last() > 0.6
    resumed, _ = run("drive", Memory(memory.states[5]), precision=precision)
    assert same(model.state_dict(), resumed.state_dict())


def test_the_random_state_of_the_caller_is_left_alone():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    settings = {"sparsity": 0.5, "epochs": 1, "steps_per_epoch": STEPS, "method": "snip"}
    train(model, optimizer, data(), lambda resume, tell: Pruner(model, optimizer, data(), **settings))
    assert torch.equal(before, torch.get_rng_state())


def test_a_row_an_epoch_with_what_the_model_does_then():
    model, trained = run("drive")
    assert [(row["cycle"], row["epoch"]) for row in trained.rows] == [(0, 1), (0, 2), (0, 3)]
    assert trained.rows[-1]["test"] == trained.last() == measured(model, data(None))
    assert trained.rows[0]["sparsity"] == 0
    assert trained.rows[1]["sparsity"] == pytest.approx(0.8, abs=0.01)
    assert [row["rate"] for row in trained.rows] == pytest.approx([0.05, 0.0375, 0.0125])
    assert all(0 < row["loss"] < 2 for row in trained.rows)


def test_imp_is_measured_in_its_first_and_last_cycle():
    _, trained = run("imp, rewound to an epoch")
    assert [(row["cycle"], row["epoch"]) for row in trained.rows] == [(0, 1), (2, 2), (2, 3)]


def test_times_are_split_and_pruning_is_all_before_the_sparse_network():
    _, trained = run("drive", Memory())
    seconds = trained.seconds
    works = {"loading", "early training", "scoring", "selection", "training", "evaluation", "saving", "pruning"}
    assert seconds.keys() == works
    assert all(value > 0 for value in seconds.values())
    before = seconds["early training"] + seconds["scoring"] + seconds["selection"]
    assert before < seconds["pruning"] < before + seconds["loading"]
    _, dense = run([Train(3 * STEPS)])
    assert dense.seconds.keys() == {"loading", "training", "evaluation"}


class Shared:
    def __init__(self, kept=()):
        self.kept = dict(kept)

    def load(self, steps, usable, *, making):
        fitting = [number for number in self.kept if number <= steps and usable(number)]
        return copy.deepcopy(self.kept[max(fitting)]) if fitting else None

    def save(self, steps, state):
        self.kept[steps] = copy.deepcopy(state)


def test_a_common_beginning_changes_no_bit_and_its_time_is_charged():
    shared = Shared()
    reference, trained = run("drive", beginning=shared)
    assert shared.kept.keys() == {6}
    model, other = run("drive", beginning=Shared(shared.kept))
    assert same(reference.state_dict(), model.state_dict())
    assert other.rows == trained.rows
    assert other.seconds["early training"] == shared.kept[6]["seconds"]["early training"]
    assert other.seconds["pruning"] > other.seconds["early training"]
    alone, _ = run([Train(3 * STEPS)])
    dense, charged = run([Train(3 * STEPS)], beginning=Shared(shared.kept))
    assert same(alone.state_dict(), dense.state_dict())
    assert "early training" not in charged.seconds
    assert charged.seconds["training"] > shared.kept[6]["seconds"]["early training"]


def test_a_beginning_that_has_passed_the_step_to_rewind_to_is_not_used():
    plan = "imp, rewound to an epoch"
    shared = Shared()
    reference, _ = run(plan, beginning=shared)
    assert shared.kept.keys() == {8}
    usable = []

    class Asked(Shared):
        def load(self, steps, usable_steps, *, making):
            usable.extend(number for number in (2, 4, 6, 8) if usable_steps(number))
            return super().load(steps, usable_steps, making=making)

    model, _ = run(plan, beginning=Asked(shared.kept))
    assert usable == [2, 4]
    assert same(reference.state_dict(), model.state_dict())


def test_best_looks_at_held_out_data_and_only_at_the_sparse_network():
    rows = [
        {"sparsity": 0.0, "test": 0.99, "holdout": 0.99},
        {"sparsity": 0.9, "test": 0.70, "holdout": 0.80},
        {"sparsity": 0.9, "test": 0.75, "holdout": 0.70},
    ]
    trained = Trained(dp.Mask({}), rows, {})
    assert trained.last() == 0.75
    assert trained.best() == 0.70
    assert Trained(dp.Mask({}), [{k: v for k, v in row.items() if k != "holdout"} for row in rows], {}).best() == 0.75


def test_plans_of_all_methods_train():
    for name in methods.names():
        plan = methods.make_plan(
            name, 0.8, 3 * STEPS, STEPS, {"early_epochs": 1.0} if name in ("drive", "driveflow") else None
        )
        if name != "imp":  # 50 cycles
            _, trained = run(plan)
            assert dp.sparsity(trained.mask) == pytest.approx(0.8, abs=0.01)


def test_whoever_watches_is_told_of_every_cut():
    moments = []
    run("drive", watch=moments.append)
    works = [moment.work for moment in moments]
    assert [work for work in works if work.startswith("pruning")] == [f"pruning, cut {n} of 4" for n in (1, 2, 3, 4)]
    assert works.count("early training") == 6
    assert works.count("training") == 6
    assert moments[-1].step == moments[-1].steps == 12


class Conv(nn.Module):
    """Convolutions, a buffer that no state_dict has, and that changes what is learnt."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)
        )
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.passes += 1
        return self.layers(x.view(-1, 1, 4, 4)) / (1 + self.passes / 10)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("fused", [False, True])
def test_layouts_and_hidden_buffers_come_back(layout, fused):
    source = Tensors(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2, 16, 0)

    def once(memory=None, beginning=None):
        torch.manual_seed(0)
        model = Conv().to(memory_format=layout)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        settings = {"sparsity": 0.5, "epochs": 3, "steps_per_epoch": 4, "knobs": {"early_epochs": 1.0, "cuts": 2}}
        make = lambda resume, tell: Pruner(model, optimizer, source, resume=resume, **settings)  # noqa: E731
        train(model, optimizer, source, make, checkpoints=memory, every=0.0, beginning=beginning)
        return model.state_dict()

    memory, shared = Memory(), Shared()
    whole = once(memory)
    for state in memory.states:
        assert same(whole, once(Memory(through_a_file(state))))
    once(beginning=shared)
    assert same(whole, once(beginning=Shared({n: through_a_file(state) for n, state in shared.kept.items()})))


def through_a_file(state):
    """As it comes back from a file: tensors contiguous."""
    if isinstance(state, torch.Tensor):
        return state.contiguous()
    if isinstance(state, dict):
        return {key: through_a_file(value) for key, value in state.items()}
    return [through_a_file(value) for value in state] if isinstance(state, list) else state


def test_after_an_error_the_model_is_free_again():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"sparsity": 0.5, "epochs": 1, "steps_per_epoch": STEPS, "method": "snip"}

    def wrong(model, batch):
        raise KeyError("measure")

    with pytest.raises(KeyError, match="measure"):
        train(
            model, optimizer, data(), lambda resume, tell: Pruner(model, optimizer, data(), **settings),
            tests={"test": data()}, measure=wrong,
        )  # fmt: skip
    dp.hold(model, optimizer, dp.prune(model, data(), method="snip", sparsity=0.5))


def test_the_switches_of_cudnn_are_as_the_user_has_set_them():
    seen = []
    run("snip", watch=lambda _: seen.append(torch.backends.cudnn.enabled))
    assert set(seen) == {torch.backends.cudnn.enabled}


class Harmed:
    """Data of which the inputs of one batch hold something that is no number."""

    def __init__(self, source, epoch, place, value=float("nan")):
        self.source, self.at, self.value = source, (epoch, place), value

    def __len__(self):
        return len(self.source)

    def __iter__(self):
        return iter(self.source)

    def epoch(self, cycle, number, start=0):
        for place, (x, y) in enumerate(self.source.epoch(cycle, number, start), start):
            harmed = torch.full_like(x, self.value) if (number, place) == self.at else x
            yield harmed, y


def harmed_run(monkeypatch, memory=None, at=(2, 1), **options):
    source = data()
    monkeypatch.setattr(__name__ + ".data", lambda seed=0: source if seed is None else Harmed(source, *at))
    try:
        return run("drive", memory, **options)
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"engine": "sparse"}])
def test_a_batch_of_nan_stops_the_training_and_it_goes_on_from_before(monkeypatch, options):
    memory = Memory()
    with pytest.raises(
        FloatingPointError, match=r"not finite at step 10 \(epoch 3, batch 2\): the batch itself holds"
    ):
        harmed_run(monkeypatch, memory, **options)
    assert [state["steps_done"] for state in memory.states] == list(range(1, 10))
    for state in memory.states:
        assert all(value.isfinite().all() for value in state["model"].values())
    mended, trained = run("drive", Memory(memory.states[-1]), **options)
    never_harmed, other = run("drive", **options)
    assert same(mended.state_dict(), never_harmed.state_dict())
    assert trained.rows == other.rows


def test_on_a_gpu_it_is_seen_before_anything_is_kept(monkeypatch):
    """There losses are not looked at for each step; here they seem to be on another device."""
    monkeypatch.setattr("driveprune.train.LOOK", 1000)
    look, steps = driveprune.train._Training._check_losses, []

    def late(self, batch=None):
        if batch is None or self._steps_done % 1000 == 999:
            look(self, batch)
        else:
            steps.append(self._steps_done)

    for at, last in (((2, 1), 9), ((1, 1), 5), ((0, 2), 2)):
        monkeypatch.setattr(driveprune.train._Training, "_check_losses", late)
        memory = Memory()
        with pytest.raises(FloatingPointError, match=rf"not finite at step {last + 1} \(epoch {at[0] + 1}, batch"):
            harmed_run(monkeypatch, memory, at)
        assert [state["steps_done"] for state in memory.states] == list(range(1, last + 1))
    assert steps


class Rooted(nn.Module):
    def forward(self, x):
        return x + 0 * (x * 0).sqrt()  # zero, and its gradient is not a number


def test_weights_are_looked_at_before_they_are_kept(monkeypatch):
    """The loss is finite, and its gradient is not: of the last step, no other loss tells."""
    model = nn.Sequential(nn.Linear(10, 8), Rooted(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"epochs": 1, "steps_per_epoch": 1, "method": [Train(1)]}
    source = Tensors(torch.randn(8, 10), torch.zeros(8, dtype=torch.long), 8, 0)
    memory = Memory()
    with pytest.raises(FloatingPointError, match=r"the weights 0.weight are not finite after step 1"):
        train(
            model, optimizer, source, lambda resume, tell: Pruner(model, optimizer, source, **settings),
            checkpoints=memory, every=0.0,
        )  # fmt: skip
    assert memory.states == []


def test_a_scaler_may_leave_out_a_step_but_not_ten_in_a_row(monkeypatch):
    values = iter([0, 1, 1, 0, 0] + [0] * 100)
    plain = dp.gradients.cross_entropy

    def sometimes(model, batch):
        return plain(model, batch) * (float("inf") if next(values) else 1)

    model, trained = run("drive", precision="fp16", loss=sometimes)
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in trained.rows)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    never = pytest.warns(UserWarning, match="before `optimizer.step")  # for a whole epoch
    said = r"not finite at step 1 \(epoch 1, batch 1\) and at the 9 after it"
    with never, pytest.raises(FloatingPointError, match=said):
        run("drive", precision="fp16", loss=lambda model, batch: plain(model, batch) * float("inf"))


def test_a_pruner_in_a_loop_of_ones_own_does_not_cut_by_nan():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = data()
    pruner = Pruner(
        model, optimizer, source, sparsity=0.8, epochs=3, steps_per_epoch=2, method="drive",
        knobs={"early_epochs": 0.5, "cuts": 3},
    )  # fmt: skip
    with torch.no_grad():
        model[4].weight[0, 0] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="NaN or infinity"):
        pruner.step()
    assert all(torch.equal(value.isnan(), before[name].isnan()) for name, value in model.state_dict().items())
    assert same(
        {n: v.nan_to_num() for n, v in model.state_dict().items()}, {n: v.nan_to_num() for n, v in before.items()}
    )


@pytest.mark.parametrize("plan", PLANS)
def test_asked_to_stop_it_keeps_all_that_was_done(plan):
    reference, trained = run(plan)
    steps = 0

    def count():
        nonlocal steps
        steps += 1
        return False

    run(plan, stop=count)  # how often it is asked: at steps, at cuts, at evaluations
    for ask in range(1, steps + 1, 3):
        left = [ask]

        def stop(left=left):
            left[0] -= 1
            return left[0] == 0

        memory = Memory()
        with pytest.raises(Stopped):
            run(plan, memory, stop=stop, every=1e9)
        assert len(memory.states) <= 1
        resumed, other = run(plan, Memory(memory.states[-1] if memory.states else None))
        assert same(reference.state_dict(), resumed.state_dict()), ask
        assert other.rows == trained.rows
