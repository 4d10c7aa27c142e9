import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from driveprune.graph import flow
from driveprune.mask import everything, kept_count
from tests.nets import batch, convnet, images, mlp, same, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
DATA = [images(seed=0), images(seed=1), images(seed=2)]


def test_going_on_from_a_mask():
    net, data = convnet(), [images()]
    first = dp.prune(net, data, method="snip", sparsity=0.5)
    second = dp.prune(net, data, method="snip", sparsity=0.9, mask=first)
    assert all(not (second[name] & ~first[name]).any() for name in first)
    with pytest.raises(ValueError, match="fewer than sparsity 0.5 asks for: start from a denser mask"):
        dp.prune(net, data, method="snip", sparsity=0.5, mask=second)


def test_min_kept():
    net = convnet()
    kept = dp.prune(net, [images()], method="magnitude", sparsity=0.99, min_kept=3)
    assert all(int(k.sum()) >= 3 for k in kept.values())
    assert sum(int(k.sum()) for k in kept.values()) == 16


def test_warnings_as_errors_roll_back_too():
    net = convnet()
    before = snapshot(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(dp.CollapseWarning, match="no path"):
            dp.prune(net, [images()], method="random", sparsity=0.999)
    assert same(before, snapshot(net))


CASES = {
    "percent": ({"sparsity": 98}, "did you mean 0.98"),
    "empty": ({"batches": []}, "batches is empty"),
    "exhausted": ({"batches": iter([images()])}, "ran out after 1 batches"),
    "missing": ({"batches": None}, "pass batches"),
    "method": ({"method": "drove"}, "unknown method 'drove'"),
    "knob": ({"knobs": {"epochs": 3}}, "drive has no knob 'epochs'; it has early_epochs, cuts"),
    "pattern": ({"exclude": "*"}, "nothing to prune"),
    "mask": ({"mask": {"x": torch.ones(1, dtype=torch.bool)}}, "has no parameter 'x'"),
    "loss": ({"loss": lambda m, b: m(b[0]).sum() * float("nan")}, "the loss is nan"),
    "min_kept": ({"min_kept": 1000}, "min_kept=1000 asks for"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_names_itself_and_changes_nothing(case):
    options, message = CASES[case]
    net = convnet()
    before = snapshot(net)
    options = {"batches": [images()], "sparsity": 0.9, "method": "drive", **options}
    with pytest.raises(ValueError, match=message):
        dp.prune(net, options.pop("batches"), **options)
    assert same(before, snapshot(net))


def test_provenance():
    kept = dp.prune(mlp(), [batch()], method="drive", sparsity=0.9, seed=4, knobs={"cuts": 3})
    about = kept.provenance
    assert about["method"] == "drive"
    assert about["knobs"]["cuts"] == 3
    assert "early_epochs" not in about["knobs"]  # nothing was trained
    assert about["sparsity"] == dp.sparsity(kept) == pytest.approx(0.9)
    assert about["seed"] == 4
    assert about["versions"]["torch"] == torch.__version__


def test_data_loaders_repeat_by_seed():
    data = torch.utils.data.TensorDataset(*images(size=64))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    masks = []
    for seed in (0, 0, 1):
        torch.rand(len(masks) + 1)  # whatever else draws from the global state
        masks.append(dp.prune(convnet(), loader, sparsity=0.9, seed=seed, knobs={"cuts": 10}))
    assert same(dict(masks[0]), dict(masks[1]))
    assert not same(dict(masks[0]), dict(masks[2]))


def test_the_loss_hook_serves_other_models():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 1)

        def forward(self, *, values):
            return {"y": self.b(self.a(values).tanh())}

    def loss(model, b):
        return (model(values=b["x"])["y"].squeeze(-1) - b["y"]).square().mean()

    data = [{"x": torch.randn(8, 6), "y": torch.randn(8)}]
    for method in ("drive", "snip", "synflow", "force"):
        kept = dp.prune(Twins(), data, method=method, sparsity=0.5, loss=loss)
        assert sum(int(k.sum()) for k in kept.values()) == 14


def test_wrapped_models_are_scored_unwrapped():
    plain = dp.prune(convnet(), DATA, sparsity=0.9, knobs={"cuts": 3})
    compiled = torch.compile(convnet(), backend="eager")
    assert same(dict(plain), dict(dp.prune(compiled, DATA, sparsity=0.9, knobs={"cuts": 3})))
    parallel = nn.DataParallel(convnet())
    assert same(dict(plain), dict(dp.prune(parallel, DATA, sparsity=0.9, knobs={"cuts": 3})))


def test_autocast_does_not_score_on_old_copies_of_the_weights():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cached = dp.prune(convnet(), DATA, sparsity=0.9, knobs={"cuts": 10})
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        plain = dp.prune(convnet(), DATA, sparsity=0.9, knobs={"cuts": 10})
    assert same(dict(cached), dict(plain))


def test_a_mask_to_go_on_from_is_applied_first():
    first = dp.prune(convnet(), DATA, method="random", sparsity=0.5)
    applied = convnet()
    dp.apply(applied, first)
    for method in ("snip", "synflow", "grasp"):
        masks = [
            dp.prune(net, DATA, method=method, sparsity=0.8, mask=first)
            for net in (convnet(), copy.deepcopy(applied))
        ]
        assert same(dict(masks[0]), dict(masks[1]))
    with pytest.raises(ValueError, match="a mask says already which weights to prune"):
        dp.prune(convnet(), DATA, sparsity=0.8, mask=first, exclude="0.*")


def test_gradients_that_are_one_tensor_are_averaged_all_the_same():
    class Delta(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.delta = (nn.Parameter(torch.randn(3, 6)) for _ in range(2))

        def forward(self, x):
            return F.linear(x, self.base + self.delta)

    torch.manual_seed(0)
    net, data = Delta(), [batch(seed=0), batch(seed=1)]
    joined = [tuple(torch.cat(parts) for parts in zip(*data, strict=True))]
    options = {"method": "snip", "sparsity": 0.5, "include": ("base", "delta")}
    kept = dp.prune(copy.deepcopy(net), data, knobs={"batches_per_cut": 2}, **options)
    assert same(dict(kept), dict(dp.prune(net, joined, **options)))


def test_loaders_with_persistent_workers_and_their_epochs_are_left_alone():
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    seen = 0
    for _ in loader:
        seen += 1
        if seen == 3:
            dp.prune(mlp(), loader, sparsity=0.5, knobs={"cuts": 3})
    assert seen == 10


def test_dropout_as_a_function_is_off_while_scoring():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return self.fc(F.dropout(x, 0.5, self.training))

    torch.manual_seed(0)
    net = Dropping()
    masks = [dp.prune(copy.deepcopy(net), [batch()], method="snip", sparsity=0.5, seed=seed) for seed in (0, 1)]
    assert same(dict(masks[0]), dict(masks[1]))


def test_numbers_of_numpy():
    masks = [
        dp.prune(mlp(), [batch()], method="random", sparsity=sparsity, seed=seed)
        for sparsity, seed in ((0.5, 3), (np.float32(0.5), np.int64(3)))
    ]
    assert same(dict(masks[0]), dict(masks[1]))
    assert masks[1].provenance["seed"] == 3


def test_erk_on_top_of_a_mask_and_with_a_floor():
    first = dp.prune(convnet(), method="random", sparsity=0.5)
    kept = dp.prune(convnet(), method="erk", sparsity=0.6, mask=first)
    assert sum(int(k.sum()) for k in kept.values()) == kept_count(1624, 0.6)
    floor = dp.prune(convnet(), method="erk", sparsity=0.99, min_kept=4)
    assert all(int(k.sum()) >= 4 for k in floor.values())
    assert sum(int(k.sum()) for k in floor.values()) == 16


def test_time_first_networks_keep_their_recurrent_weights():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.lstm, self.head = nn.Embedding(9, 5), nn.LSTM(5, 6), nn.Linear(6, 9)

        def forward(self, x):
            return self.head(self.lstm(self.tokens(x))[0]).flatten(0, 1)

    x = torch.randint(9, (7, 3))
    kept = dp.prune(
        Reader(), [(x, x)], method="synflow", sparsity=0.5, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1].flatten())
    )
    assert kept["lstm.weight_hh_l0"].any()


def test_generators_of_loaders_are_put_back():
    data = torch.utils.data.TensorDataset(*images(size=64))
    generator = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=generator)
    state = generator.get_state()
    dp.prune(convnet(), loader, sparsity=0.9, knobs={"cuts": 10})
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize("method", ["drive", "grasp", "synflow", "force"])
def test_compiled_parts_are_scored_as_they_are_written(method, how):
    net = mlp()
    if how == "wrapped":
        net[2] = torch.compile(net[2], backend="aot_eager")
    else:
        net[2].compile(backend="aot_eager")
    knobs = {} if method == "grasp" else {"cuts": 3}
    plain = dp.prune(mlp(), [batch()], method=method, sparsity=0.5, knobs=knobs)
    assert same(dict(plain), dict(dp.prune(net, [batch()], method=method, sparsity=0.5, knobs=knobs)))


@pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
@pytest.mark.parametrize("method", ["drive", "snip", "synflow", "magnitude", "force", "grasp"])
def test_a_budget_of_multiply_adds_is_met_within_one_weight(method):
    net = convnet()
    costs = flow(net, everything(dp.prunable(net)), images()[0][:1]).positions
    total = sum(costs[name] * weight.numel() for name, weight in dp.prunable(net).items())
    knobs = {} if method in ("snip", "magnitude", "grasp") else {"cuts": 5}
    mask = dp.prune(net, [images()], method=method, sparsity=0.9, budget="macs", knobs=knobs)
    used = sum(costs[name] * int(kept.sum()) for name, kept in mask.items())
    assert 0.1 * total - max(costs.values()) <= used <= 0.1 * total * (1 + 1e-9)
    assert mask.provenance["budget"] == "macs"
    assert all(not net.state_dict()[name][~kept].any() for name, kept in mask.items())


def test_a_budget_of_multiply_adds_needs_to_know_them():
    net = convnet()
    with pytest.raises(ValueError, match="budget must be 'weights' or 'macs', got 'flops'"):
        dp.prune(net, [images()], sparsity=0.9, budget="flops")
    with pytest.raises(ValueError, match="needs batches"):
        dp.prune(net, method="magnitude", sparsity=0.9, budget="macs")
    with pytest.raises(ValueError, match="compete globally"):
        dp.prune(net, [images()], method="erk", sparsity=0.9, budget="macs")
