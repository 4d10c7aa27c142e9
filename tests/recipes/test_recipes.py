import json

import pytest
import torch

from driveprune import datasets, methods, models, recipes
from driveprune.recipes import Recipe, scaled

# The table of settings: epochs, batch, optimiser, rate, and the rate at some epochs.
PAPER = {
    "paper-alexnet-cifar10": (50, 256, "adam", 1e-4, {0: 1e-4, 49: 1e-4}),
    "paper-vgg16-cifar10": (150, 128, "sgd", 0.01, {29: 0.01, 30: 0.002, 60: 4e-4, 90: 8e-5, 149: 1.6e-5}),
    "paper-resnet18-cifar10": (200, 128, "sgd", 0.01, {0: 0.01, 100: 0.005, 200: 0.0}),
    "paper-vgg16-cifar100": (200, 128, "sgd", 0.01, {59: 0.01, 60: 0.002, 120: 4e-4, 160: 8e-5}),
    "paper-resnet18-cifar100": (200, 128, "sgd", 0.01, {79: 0.01, 80: 1e-3, 120: 1e-4, 199: 1e-4}),
    "paper-vgg16-tiny-imagenet": (100, 128, "sgd", 0.01, {29: 0.01, 30: 1e-3, 60: 1e-4, 80: 1e-5}),
    "paper-resnet18-tiny-imagenet": (100, 128, "sgd", 0.01, {29: 0.01, 30: 1e-3, 60: 1e-4, 80: 1e-5}),
    "paper-resnet18-imagenet32": (100, 256, "sgd", 0.1, {29: 0.1, 30: 0.01, 60: 1e-3, 80: 1e-4}),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings(name):
    recipe = recipes.get(name)
    epochs, batch, optimizer, rate, rates = PAPER[name]
    assert (recipe.epochs, recipe.batch, recipe.optimizer, recipe.rate) == (epochs, batch, optimizer, rate)
    assert {epoch: recipe.rate_at(epoch) for epoch in rates} == pytest.approx(rates)
    small = "imagenet" in name
    assert recipe.knobs["drive"] == {"early_epochs": 1.0 if small else 5.0, "cuts": 100}
    assert recipe.knobs["imp"] == {"cycles": 50, "cycle_epochs": 20.0, "rewind_epochs": 0.0}
    assert recipe.knobs["synflow"] == {"cuts": 100}
    assert recipe.padding == (8 if "tiny" in name else 4)
    assert recipe.flip
    assert recipe.sparsities == ((0.7, 0.8, 0.9, 0.95) if "imagenet32" in name else (0.9, 0.95, 0.98, 0.993))
    if optimizer == "sgd":
        assert (recipe.momentum, recipe.weight_decay, recipe.nesterov) == (0.9, 5e-4, False)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_complete(name):
    recipe = recipes.get(name)
    assert recipes.describe(name).endswith(".")
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert recipe.data == "own" or recipe.model in models.names()
    assert recipe.data in {"own", "folder", *datasets.names()}
    for method, knobs in recipe.knobs.items():
        assert methods.make_plan(method, 0.9, recipe.epochs * 100, 100, knobs)
    net = torch.nn.Linear(2, 2)
    optimizer = recipe.make_optimizer(net)
    scheduler = recipe.make_scheduler(optimizer)
    for epoch in range(3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(recipe.rate_at(epoch))
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith("small-")])
def test_small_recipes_keep_the_papers_proportions(name):
    small, paper = recipes.get(name), recipes.get(name.replace("small", "paper"))
    factor = small.epochs / paper.epochs
    assert small.knobs["drive"]["early_epochs"] == pytest.approx(paper.knobs["drive"]["early_epochs"] * factor)
    assert small.knobs["imp"]["cycles"] == 50
    assert small.knobs["imp"]["cycle_epochs"] == pytest.approx(20 * factor)
    assert [epoch for epoch, _ in small.drops] == pytest.approx([epoch * factor for epoch, _ in paper.drops])
    assert small.rate_at(small.epochs * 0.9) / small.rate == pytest.approx(
        paper.rate_at(paper.epochs * 0.9) / paper.rate
    )
    assert small.width < 1
    assert small.images


def test_the_strong_set():
    recipe = recipes.get("strong-resnet18-cifar100")
    assert (recipe.epochs, recipe.nesterov, recipe.weight_decay, recipe.label_smoothing) == (160, True, 5e-4, 0.1)
    assert [recipe.rate_at(epoch) for epoch in (59, 60, 120)] == pytest.approx([0.1, 0.01, 0.001])


def test_find_by_data_and_model():
    assert recipes.find("cifar10", "vgg16") == recipes.get("paper-vgg16-cifar10")
    assert recipes.find("cifar10", "vgg16", "small") == recipes.get("small-vgg16-cifar10")
    with pytest.raises(ValueError, match="no recipe for alexnet on cifar100; there are paper-"):
        recipes.find("cifar100", "alexnet")


def test_a_recipe_of_ones_own_by_dotted_name():
    assert recipes.get("driveprune.recipes.demo.digits") == recipes.get("demo-digits")
    with pytest.raises(ValueError, match="unknown recipe 'nothing'"):
        recipes.get("nothing")


def test_errors():
    with pytest.raises(ValueError, match="epochs must be a whole number of at least 1, got 0"):
        scaled(recipes.get("demo-digits"), epochs=0)
    content = recipes.get("demo-digits").to_json()
    with pytest.raises(ValueError, match="no setting 'epoch'"):
        Recipe.from_json({**content, "epoch": 3})
