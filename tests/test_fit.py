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


def pictures(count=64):
    """Images as pixels in [0, 1], and the same ones as a `Data`."""
    x, y = DIGITS.train.x[:count], DIGITS.train.y[:count]
    return x.float() / 255, y, dp.Images(x, y)


@pytest.mark.parametrize("share", [(0, 1), (1, 3)])
@pytest.mark.parametrize(("padding", "flip"), [(2, True), (0, True), (3, False), (0, False)])
def test_images_as_tensors_are_cropped_and_flipped_as_a_data_set_is(padding, flip, share):
    x, y, data = pictures()
    recipe = replace(recipes.get("strong-general"), padding=padding, flip=flip, batch=20)
    found, _ = sources((x, y), recipe, holdout=0, seed=3, device="cpu")
    found = replace(found, share=share)
    expected = dp.Batches(data, size=20, padding=padding, flip=flip, seed=3, share=share)
    for start in (0, 2):
        pairs = list(zip(found.epoch(1, 4, start), expected.epoch(1, 4, start), strict=True))
        assert len(pairs) == 4 - start
        for (a, first), (b, second) in pairs:
            torch.testing.assert_close(a, b)
            assert torch.equal(first, second)
    torch.testing.assert_close(next(iter(found))[0], next(iter(expected))[0])  # to score with


def test_held_out_tensors_are_neither_cropped_nor_flipped():
    x, y, _ = pictures()
    recipe = replace(recipes.get("strong-general"), padding=2, flip=True)
    _, tests = sources((x, y), recipe, holdout=20, seed=0, device="cpu")
    assert (tests["holdout"].padding, tests["holdout"].flip) == (0, False)


def test_crops_and_flips_of_what_is_no_image_are_refused():
    x, y = examples()
    with pytest.raises(dp.OptionError, match=r"padding=4, flip=True, crops and flips of images.*shape \(200, 8\)"):
        dp.fit(mlp(), (x, y), sparsity=0.5, recipe="strong-vgg16-cifar10", epochs=1, progress=False)
    some = replace(recipes.get("strong-general"), images=100)
    with pytest.raises(dp.OptionError, match="the recipe has images=100, so many images of its data set"):
        dp.fit(mlp(), (x, y), sparsity=0.5, recipe=some, epochs=1, progress=False)


def test_what_a_named_recipe_says_in_vain_beside_a_loader_is_told():
    x, y = examples()
    loader = DataLoader(TensorDataset(x, y), 32)
    for data, size in ((loader, 32), ([(x[:50], y[:50])] * 2, 50)):
        with pytest.warns(dp.RecipeWarning, match=rf"batch=128 .the loader's batches have {size} examples"):
            dp.fit(mlp(), data, sparsity=0.5, recipe="strong-general", epochs=1, progress=False)
    with pytest.warns(dp.RecipeWarning, match=r"no use for padding=4, flip=True"):
        dp.fit(
            mlp(), DataLoader(TensorDataset(x, y), 128), sparsity=0.5, recipe="strong-vgg16-cifar10", epochs=1,
            progress=False,
        )  # fmt: skip
    with pytest.warns(dp.RecipeWarning, match=r"label_smoothing=0.1 .the loss is yours"):
        dp.fit(
            mlp(), (x, y), sparsity=0.5, recipe="strong-general", epochs=1, progress=False,
            loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]),
        )  # fmt: skip
    fitting = replace(recipes.get("strong-general"), batch=32)
    dp.fit(mlp(), loader, sparsity=0.5, recipe=fitting, epochs=1, progress=False)  # nothing to tell
    dp.fit(mlp(), loader, sparsity=0.5, epochs=1, progress=False)  # the default recipe


def net_of_images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_channels_last_is_the_format_of_tensors_and_of_loaders_batches(kind):
    x, y, _ = pictures()
    x = x.repeat(1, 3, 1, 1)  # with one channel both formats are one
    seen = []

    def loss(model, b):
        seen.append(b[0].is_contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(model(b[0]), b[1])

    net = net_of_images()
    net[0] = nn.Conv2d(3, 4, 3)
    data = (x, y) if kind == "tensors" else [(x[:32], y[:32]), (x[32:], y[32:])]
    dp.fit(net, (data, data), sparsity=0.5, epochs=1, loss=loss, channels_last=True, progress=False)
    assert seen
    assert all(seen)


class Kept:
    """States in memory."""

    state = None

    def load(self):
        return self.state

    def save(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels_last": True}, "channels_last=True would do nothing"),
        ({"every": 5.0}, "every=5.0 would do nothing without checkpoints"),
        ({"measure": lambda model, b: model(b[0])}, "measure would do nothing without test data"),
        ({"checkpoints": "folder"}, r"checkpoints must have load\(\) and save"),
        ({"every": -1.0, "checkpoints": Kept()}, "every must be a number of at least 0, got -1.0"),
        ({"every": float("nan")}, "every must be a number, got nan"),
        ({"holdout": 2.5}, "holdout must be a whole number, got 2.5"),
        ({"holdout": True}, "holdout must be a whole number, got True"),
        ({"epochs": 2.5}, "epochs must be a whole number, got 2.5"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"channels_last": "yes"}, "channels_last must be true or false, got 'yes'"),
        ({"progress": 1}, "progress must be true or false, got 1"),
        ({"precision": ["fp32"]}, "precision must be fp32, bf16, fp16"),
        ({"engine": "fast"}, "engine must be dense, sparse, auto, got 'fast'"),
        ({"recipe": 3}, "recipe must be a Recipe or the name of one, got 3"),
        ({"min_kept": 2.5}, "min_kept must be a whole number, got 2.5"),
        ({"seed": 1.7}, "seed must be a whole number, got 1.7"),
        ({"frozen": "no"}, "frozen must be true or false, got 'no'"),
        ({"include": 3}, "include must be a pattern of parameter names, or several, got 3"),
        ({"budget": "flops"}, "budget must be 'weights' or 'macs', got 'flops'"),
        ({"loss": nn.CrossEntropyLoss()}, "loss must be a function of .* is one of outputs and targets"),
        ({"loss": lambda output, target: 0}, r"loss must be .* is one of \(output, target\): write loss="),
        ({"measure": nn.CrossEntropyLoss(), "holdout": 5}, "measure must be a function of .* is one of outputs and"),
        ({"measure": 3, "holdout": 5}, "measure must be a function of .* got 3"),
        ({"watch": 3}, "watch must be a function, got 3"),
        ({"stop": True}, "stop must be a function, got True"),
        ({"beginning": "folder"}, r"beginning must have load\(\) and save"),
        ({"engine": "auto", "precision": "bf16"}, "computes in fp32, so engine='auto' cannot act with 'bf16'"),
        ({"sparsity": None}, "sparsity must be given"),
    ],
)
def test_options_that_cannot_act_or_be_are_refused_before_anything_happens(options, message):
    net = mlp()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=message):
        dp.fit(net, examples(), **{"sparsity": 0.5, "epochs": 2, "progress": False, **options})
    assert same(before, net.state_dict())


def test_a_plan_of_ones_own_says_how_long_and_how_sparse():
    from driveprune.methods import magnitude

    x, y = examples()
    plan = [dp.Train(4), dp.Prune(magnitude.score, (0.5,)), dp.Train(6)]
    trained = dp.fit(mlp(), ((x, y), (x, y)), method=plan, progress=False)  # 2 batches an epoch
    assert [row["epoch"] for row in trained.rows] == [1, 2, 3]
    assert trained.mask.provenance["sparsity"] == dp.sparsity(trained.mask) == 0.5
    assert dp.fit(mlp(), (x, y), method=plan, sparsity=0.5, epochs=3, progress=False).rows
    with pytest.raises(dp.OptionError, match=r"the plan ends at step 6, which is in epoch 3, and the recipe has 7"):
        dp.fit(mlp(), (x, y), method=plan, epochs=7, progress=False)
    with pytest.raises(dp.OptionError, match=r"the plan cuts to sparsity 0.5, so sparsity=0.9 would do nothing"):
        dp.fit(mlp(), (x, y), method=plan, sparsity=0.9, progress=False)
    with pytest.raises(dp.OptionError, match=r"engine='sparse' would do nothing"):
        dp.fit(mlp(), (x, y), method=[dp.Train(6)], engine="sparse", progress=False)
