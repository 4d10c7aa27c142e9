import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from driveprune.ties import _values
from tests.nets import batch, convnet, images, mlp, same, snapshot


def detached(model, b):
    return F.cross_entropy(model(b[0]).detach(), b[1])


def of_the_bias(model, b):
    return F.cross_entropy(model(b[0]).detach() + model[4].bias, b[1])


@pytest.mark.parametrize("method", ["drive", "snip", "force", "grasp"])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (detached, "the loss has no gradient.*without .detach"),
        (of_the_bias, "all scores are 0.*Does the loss use the model's output, with its gradient"),
    ],
)
def test_a_loss_without_gradient_is_refused_and_nothing_has_changed(method, loss, message):
    net = mlp()
    before = snapshot(net)
    with pytest.raises(ValueError, match=message):
        dp.prune(net, [batch()], method=method, sparsity=0.9, loss=loss)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        dp.Pruner(
            net, optimizer, [batch()], sparsity=0.9, epochs=9, steps_per_epoch=1, loss=loss,
            method=dp.methods.make_plan(method, 0.9, 9, 1, {"early_epochs": 0}),
        )  # fmt: skip
    assert same(before, snapshot(net))


def test_equal_scores_of_the_whole_network_are_refused():
    net = mlp()
    for weight in dp.prunable(net).values():
        nn.init.constant_(weight, 0.5)
    with pytest.raises(ValueError, match="all scores are 0.5.*Are all weights equal"):
        dp.prune(net, method="magnitude", sparsity=0.9)
    assert dp.sparsity(dp.prune(net, method="magnitude", sparsity=0.0)) == 0  # nothing to choose
    first = dp.prune(mlp(), [batch()], method="snip", sparsity=0.5)
    with pytest.raises(ValueError, match="all scores are 1,"):
        dp.prune(mlp(), [batch()], method=ones, sparsity=0.9, mask=first)


def ones(model, mask, batches, *, loss, generator):
    return {name: torch.where(kept, 1.0, 7.0 * torch.rand(kept.shape)) for name, kept in mask.items()}


def test_a_layer_whose_scores_are_equal_is_named_if_the_cut_splits_it():
    net = mlp()
    nn.init.constant_(net[2].weight, 0.05)
    with pytest.warns(dp.ScoreWarning, match=r"all scores of 2.weight are equal, and some of these weights were rem"):
        dp.prune(net, method="magnitude", sparsity=0.7)
    net = mlp()
    nn.init.constant_(net[2].weight, 10.0)  # all stay
    dp.prune(net, method="magnitude", sparsity=0.05)
    for method in ("random", "erk"):
        dp.prune(net, method=method, sparsity=0.5)
    dp.prune(net, [batch()], method="snip", sparsity=0.5)


def test_a_layer_that_starts_at_zero_is_named():
    net = mlp()
    nn.init.zeros_(net[0].weight)
    with pytest.warns(dp.ScoreWarning, match=r"all scores of 0.weight are equal.*initialised to a constant"):
        dp.prune(net, [batch()], method="magnitude", sparsity=0.1)


def test_what_dies_of_pruning_is_no_news():
    """Late cuts of a path, dead branches, layers that end up empty: as quiet as the network is connected."""
    for method in ("drive", "force", "snip", "synflow", "grasp", "magnitude", "random", "erk"):
        for sparsity in (0.5, 0.9, 0.98):
            with warnings.catch_warnings():
                warnings.simplefilter("error", dp.ScoreWarning)
                warnings.simplefilter("ignore", dp.CollapseWarning)
                dp.prune(convnet(), [images(seed=n) for n in range(3)], method=method, sparsity=sparsity)


def first_then_nothing():
    cuts = []

    def score(model, mask, batches, *, loss, generator):
        cuts.append(1)
        return {n: torch.rand(k.shape, generator=generator) if len(cuts) < 3 else 0.0 * k for n, k in mask.items()}

    return score


@pytest.mark.filterwarnings("ignore:nothing is left of")
def test_scores_that_vanish_on_the_way_are_said_once():
    with pytest.warns(dp.CollapseWarning, match="from cut 3 of 4 on, all scores are 0: no gradient comes through"):
        mask = dp.prune(mlp(), method=[dp.Prune(first_then_nothing(), (0.1, 0.3, 0.5, 0.6))])
    assert dp.sparsity(mask) == pytest.approx(0.6)


def test_sampling_in_pieces_misses_nothing():
    score = torch.zeros(3000, 100)
    kept = torch.ones(3000, 100, dtype=torch.bool)
    assert _values(score, kept) == (0.0,)
    score[2999, 99] = 1.0
    assert _values(score, kept) == (0.0, 1.0)
    assert _values(score, None) == (0.0, 1.0)
    kept[2999, 99] = False
    assert _values(score, kept) == (0.0,)
    assert _values(score, torch.zeros_like(kept)) == ()
    assert _values(-score * 0, None) == (0.0,)
    assert _values(torch.tensor([[1, 1], [1, 2]]), None) == (1.0, 2.0)


DATASET = torch.utils.data.TensorDataset(*batch())


@pytest.mark.parametrize("method", ["drive", "random"])
@pytest.mark.parametrize("data", [DATASET, torch.utils.data.Subset(DATASET, [0, 1]), batch(), batch()[0], "data", 3])
def test_what_is_no_collection_of_batches_is_refused(method, data):
    net = mlp()
    before = snapshot(net)
    with pytest.raises((ValueError, TypeError), match="batches must be a collection of batches"):
        dp.prune(net, data, method=method, sparsity=0.5)
    with pytest.raises((ValueError, TypeError), match="batches must be a collection of batches"):
        dp.Pruner(net, None, data, method=method, sparsity=0.5, epochs=9, steps_per_epoch=1)
    assert same(before, snapshot(net))


def test_a_data_loader_around_a_dataset_and_a_stream_are_fine():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([batch(seed=0), batch(seed=1)])

    for data in (torch.utils.data.DataLoader(DATASET, 8), Stream(), [batch()], (batch(), batch())):
        dp.prune(mlp(), data, method="snip", sparsity=0.5)
