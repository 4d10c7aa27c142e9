import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

import driveprune as dp
from driveprune import collectives
from tests.threads import on_ranks


def test_one_process_is_the_identity():
    tensor = torch.rand(3)
    assert collectives.ranks() is None
    assert (collectives.size(), collectives.rank(), collectives.launched()) == (1, 0, 1)
    assert collectives.summed(tensor) is tensor
    assert collectives.local(tensor) is collectives.full(tensor) is collectives.part(tensor, tensor) is tensor
    assert collectives.mean({"a": tensor}, 3.0)["a"] is tensor
    assert collectives.from_first(lambda: 5) == 5
    assert collectives.is_same(1, 2)
    assert collectives.groups_of(tensor) == ()
    collectives.reshard(nn.Linear(2, 2))
    with pytest.raises(KeyError), collectives.together():
        raise KeyError


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_all_of_it_and_differ_by_one_at_most(count, ranks):
    shares = [list(range(count))[collectives.share_of(count, (rank, ranks))] for rank in range(ranks)]
    assert [number for share in shares for number in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 20), st.integers(1, 9))
def test_boxes_are_those_of_torch_chunk(length, parts):
    whole = torch.arange(length)
    boxes = [collectives.split_box((length,), [(0, number, parts)])[0] for number in range(parts)]
    found = [whole[start:end] for start, end in boxes]
    expected = [*whole.chunk(parts), *[whole[:0]] * parts][:parts]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@settings(max_examples=25)
@given(
    st.integers(1, 7), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=3),
    st.sampled_from([0, 1]), st.floats(0, 0.95), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_any_number_of_ranks_chooses_what_one_process_does(ranks, shapes, dim, sparsity, ties, seed):
    draw = torch.Generator().manual_seed(seed)
    scores = {str(number): torch.randn(shape, generator=draw) for number, shape in enumerate(shapes)}
    scores = {name: score.round() if ties else score for name, score in scores.items()}
    costs = {name: random.Random(seed).choice([1.0, 2.5]) for name in scores}

    def work(rank):
        mesh = init_device_mesh("cpu", (ranks,))
        parts = {name: shard(score, mesh, dim, rank, ranks) for name, score in scores.items()}
        return [
            {name: kept.to_local() for name, kept in dp.keep_top(parts, None, sparsity, costs=given).items()}
            for given in (None, costs)
        ]

    found = on_ranks(ranks, work)
    for number, given_costs in enumerate((None, costs)):
        for name, kept in dp.keep_top(scores, None, sparsity, costs=given_costs).items():
            assert torch.equal(torch.cat([each[number][name] for each in found], dim), kept)


def shard(tensor, mesh, dim, rank, ranks):
    box = collectives.split_box(tensor.shape, [(dim, rank, ranks)])
    own = tensor[tuple(slice(*edges) for edges in box)].contiguous()
    return DTensor.from_local(own, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def test_sums_that_are_not_made_yet_cannot_be_pruned():
    def work(_):
        mesh = init_device_mesh("cpu", (2,))
        return collectives.groups_of(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))

    with pytest.raises(ValueError, match="cannot be pruned: its parts must be whole blocks"):
        on_ranks(2, work)


def test_a_mask_must_be_sharded_as_its_weight():
    def work(rank):
        mesh = init_device_mesh("cpu", (2,))
        kept = shard(torch.ones(2, 2, dtype=torch.bool), mesh, 0, rank, 2)
        with pytest.raises(ValueError, match="must be sharded as the weight is"):
            dp.apply(nn.Linear(2, 2), {"weight": kept})

    on_ranks(2, work)
