from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import driveprune as dp
from driveprune import datasets, recipes
from driveprune.fit import Loader, Tensors, sources
from tests.nets import batch, same

DIGITS = datasets.load("digits")
QUICK = recipes.scaled(recipes.get("demo-digits"), epochs=4)


def digits_fit(seed=0, **options):
    torch.manual_seed(0)
    net = dp.models.digits_net(width=0.5)
    given = {"sparsity": 0.9, "recipe": QUICK, "seed": seed, "progress": False, **options}
    return net, dp.fit(net, DIGITS, **given)


@pytest.mark.parametrize(
    ("method", "knobs"), [("drive", {"early_epochs": 1}), ("imp", {"cycles": 2, "cycle_epochs": 1})]
)
def test_drive_and_imp_learn_digits_end_to_end(method, knobs):
    net, trained = digits_fit(method=method, knobs=knobs)
    assert dp.sparsity(trained.mask) == pytest.approx(0.9, abs=1e-4)
    assert trained.last() > 0.9
    weights = dp.prunable(net)
    assert all(not weights[name][~kept].any() for name, kept in trained.mask.items())


def test_the_same_seed_gives_the_same_bits_and_another_one_others():
    nets = [digits_fit(seed, epochs=1, knobs={"cuts": 3})[0] for seed in (0, 0, 1)]
    assert same(nets[0].state_dict(), nets[1].state_dict())
    assert not same(nets[0].state_dict(), nets[2].state_dict())


def test_the_recipes_knobs_count_and_the_users_come_first():
    assert digits_fit(epochs=1, method="synflow")[1].mask.provenance["knobs"]["cuts"] == 100
    assert digits_fit(epochs=1, method="synflow", knobs={"cuts": 3})[1].mask.provenance["knobs"]["cuts"] == 3


def test_held_out_images_choose_the_best_epoch():
    _, trained = digits_fit(holdout=200)
    assert {"test", "holdout"} <= trained.rows[0].keys()
    chosen = max((row for row in trained.rows if row["sparsity"] > 0), key=lambda row: row["holdout"])
    assert trained.best() == chosen["test"]


def test_channels_last_keeps_zeros_and_learns():
    net, trained = digits_fit(channels_last=True)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert trained.last() > 0.9


def examples(count=200):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def mlp(outputs=2):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, outputs))


def test_tensors_and_loaders_of_the_users_own():
    x, y = examples()
    for training, test in [
        ((x, y), (x, y)),
        (DataLoader(TensorDataset(x, y), 32, shuffle=True), DataLoader(TensorDataset(x, y), 100)),
        ([(x[:100], y[:100]), (x[100:], y[100:])], [(x, y)]),
    ]:
        trained = dp.fit(mlp(), (training, test), sparsity=0.8, epochs=40, progress=False)
        assert trained.last() > 0.8
    assert dp.fit(mlp(), (x, y), sparsity=0.8, epochs=1, progress=False).last() is None


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"generator": torch.Generator()}])
def test_a_shuffling_loader_gives_the_same_bits_each_time(options):
    x, y = examples()
    nets = []
    for state in (5, 6):
        nets.append(mlp())
        loader = DataLoader(TensorDataset(x, y), 32, shuffle=True, **options)
        torch.manual_seed(state)  # whatever state the caller is in
        dp.fit(nets[-1], loader, sparsity=0.5, epochs=2, progress=False)
    assert same(nets[0].state_dict(), nets[1].state_dict())


def test_a_loader_resumes_in_the_middle_of_an_epoch():
    x, y = examples()
    loader = Loader(DataLoader(TensorDataset(x, y), 32, shuffle=True), seed=0)
    whole = list(loader.epoch(0, 3))
    rest = list(loader.epoch(0, 3, start=2))
    assert same(dict(enumerate(b[0] for b in whole[2:])), dict(enumerate(b[0] for b in rest)))


def test_a_regression_with_its_own_loss_and_measure():
    x, _ = examples()
    y = x[:, :1] * 2
    trained = dp.fit(
        mlp(1), ((x, y), (x, y)), sparsity=0.5, epochs=20, progress=False,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        measure=lambda model, batch: -(model(batch[0]) - batch[1]).square(),
    )  # fmt: skip
    assert trained.last() > -0.5


def test_tensors_cover_all_examples_in_an_order_of_the_epoch():
    data = Tensors(torch.arange(10), torch.arange(10), size=4, seed=1)
    epochs = [torch.cat([x for x, _ in data.epoch(0, number)]).tolist() for number in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == list(range(10))
    assert [x.tolist() for x, _ in data.epoch(0, 0, start=1)] == [epochs[0][4:8], epochs[0][8:]]
    assert [x.tolist() for x, _ in Tensors(torch.arange(3), torch.arange(3), 2, None).epoch(0, 0)] == [[0, 1], [2]]


def test_errors_name_the_value():
    x, y = examples()
    with pytest.raises(ValueError, match="sparsity must be in"):
        dp.fit(mlp(), (x, y), sparsity=98, progress=False)
    with pytest.raises(ValueError, match="unknown recipe 'papre'"):
        dp.fit(mlp(), (x, y), sparsity=0.9, recipe="papre")
    with pytest.raises(TypeError, match="again and again, got generator"):
        dp.fit(mlp(), (b for b in [(x, y)]), sparsity=0.9)
    with pytest.raises(ValueError, match="as many inputs as targets, got 200 and 3"):
        dp.fit(mlp(), (x, y[:3]), sparsity=0.9)
    with pytest.raises(ValueError, match="holdout must be at least 0 and less than the 200"):
        dp.fit(mlp(), (x, y), sparsity=0.9, holdout=200)
    with pytest.raises(TypeError, match="a Dataset has single examples"):
        dp.fit(mlp(), TensorDataset(x, y), sparsity=0.9)
    with pytest.raises(ValueError, match="at least one batch"):
        dp.fit(mlp(), ((x, y), []), sparsity=0.9)
    with pytest.raises(ValueError, match="precision must be fp32, bf16, fp16, got 'half'"):
        dp.fit(mlp(), (x, y), sparsity=0.9, precision="half")
    with pytest.raises(ValueError, match="holdout needs data as tensors"):
        dp.fit(mlp(), [(x, y)], sparsity=0.9, holdout=20)


def test_sources_of_a_data_set():
    training, tests = sources(DIGITS, QUICK, holdout=37, seed=0, device="cpu")
    assert len(training) == -(-1400 // 64)
    assert sum(len(y) for _, y in tests["holdout"].epoch(0, 0)) == 37
    assert sum(len(y) for _, y in tests["test"].epoch(0, 0)) == 360


def test_the_shares_of_ranks_are_the_batches_of_one_process():
    x, y = batch(11)
    loader = [(x[:6], {"y": y[:6], "weight": 0.5}), (x[6:], {"y": y[6:], "weight": 0.5})]
    for source in (Tensors(x, y, 4, seed=3), Loader(loader, seed=3)):
        shares = [replace(source, share=(rank, 3)) for rank in range(3)]
        assert [len(each) for each in shares] == [len(source)] * 3
        for whole, *parts in zip(source.epoch(0, 1), *(each.epoch(0, 1) for each in shares), strict=True):
            assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])
            assert {type(part[1]) for part in parts} == {type(whole[1])}
        for whole, *parts in zip(source, *shares, strict=True):
            assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])
