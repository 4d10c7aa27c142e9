"""Several real processes: torchrun, gloo, DDP and fully_shard, against one process with the batches of all."""

import pytest
import torch
from safetensors.torch import load_file

import driveprune as dp
from tests.nets import convnet, images, mlp
from tests.ranks import OPTIONS, launch, trained, whole

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


def both(folder, name):
    """What two ranks wrote, which must be the same bits."""
    first, second = (load_file(folder / f"{name}-{rank}") for rank in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    return first


def assert_same_as(found, mask, model):
    for name, kept in mask.items():
        assert torch.equal(found[f"mask.{name}"], kept), name
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[f"net.{name}"], weight.detach(), rtol=1e-7, atol=1e-9)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def followed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    launch("follow_plans", folder, request.param)
    return folder


@pytest.mark.parametrize("method", dp.methods.names())
def test_every_plan_ends_as_in_one_process_with_all_batches(followed, method):
    model = mlp(dtype=torch.float64)
    pruner = trained(model, method, [whole(0), whole(1)], [1.0, 1.0])
    assert_same_as(both(followed, method), pruner.mask, model)


@pytest.fixture(scope="module", params=["plain", "ddp", "fsdp"])
def cut_with_options(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"options-{request.param}")
    launch("prune_with_options", folder, request.param)
    return folder


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_gives_the_mask_of_one_process(cut_with_options, name):
    method, options = OPTIONS[name]
    model = mlp(dtype=torch.float64)
    kept = dp.prune(model, [whole(0), whole(1)], method=method, sparsity=0.8, progress=False, **options)
    assert_same_as(both(cut_with_options, name), kept, model)


def test_batch_statistics_are_those_of_a_batch_that_is_split_alike(tmp_path):
    launch("prune_with_batch_statistics", tmp_path)
    x, y = images(16, dtype=torch.float64)
    halves = list(zip(x.split(8), y.split(8), strict=True))
    model = convnet(dtype=torch.float64)
    kept = dp.prune(model, halves, method="drive", sparsity=0.9, knobs={"cuts": 5, "batches_per_cut": 2})
    assert_same_as(both(tmp_path, "bn"), kept, model)


@pytest.mark.parametrize(("ranks", "examples"), [(2, 30), pytest.param(4, 150, marks=pytest.mark.slow)])
def test_sharded_scores_are_chosen_as_whole_ones(ranks, examples):
    launch("choose_at_random", examples, ranks=ranks, seconds=400)


def test_no_rank_ever_has_all_scores(tmp_path):
    launch("hold_no_more_than_a_share", tmp_path)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_fails_on_one_rank_raises_on_all(kind):
    launch("fail_on_one_rank", kind)


@pytest.mark.parametrize("work", ["nan_in_scores_of_one_rank", "differ", "random_numbers"])
def test_on_two_ranks(work):
    launch(work)
