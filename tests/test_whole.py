"""Sharded networks that are whole for a while; ranks are threads here, real processes are in test_distributed.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import driveprune as dp
from driveprune.collectives import full, is_sharded, share_of
from driveprune.gradients import cross_entropy, hessian_gradients
from driveprune.whole import whole_weights
from tests.nets import batch
from tests.threads import on_ranks

DATA = batch(size=5, dtype=torch.float64)


class Tied(nn.Module):
    """Two layers with one weight, a layer that is called twice, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.into, self.twice, self.out = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(6, 3)
        self.out.weight = self.into.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.out(self.frozen(x).tanh()) + self.twice(self.twice(self.into(x)).tanh())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.read(x.unflatten(1, (3, 2)))[0][:, -1])


def plain():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def made(build):
    torch.manual_seed(0)
    return build().double()


def each_layer(model, mesh):
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def root(model, mesh):
    fully_shard(model, mesh=mesh)


def grouped(model, mesh):
    fully_shard([model[0], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)


def columns(model, mesh):
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda weight: Shard(int(weight.shape[1:] == (6,))))


def replicated(model, mesh):
    fully_shard(model, mesh=init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("copies", "parts")))


def without_a_root(model, mesh):
    fully_shard(model[0], mesh=mesh)


def in_half_precision(model, mesh):
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


CASES = [
    (plain, each_layer, 1), (plain, each_layer, 2), (plain, each_layer, 4), (plain, each_layer, 7),
    (plain, grouped, 2), (plain, columns, 2), (plain, replicated, 4), (plain, without_a_root, 3),
    (plain, in_half_precision, 2), (Tied, root, 2), (Tied, root, 4), (Recurrent, root, 2), (Recurrent, root, 5),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shard", "ranks"), CASES)
def test_the_parts_of_a_product_are_that_of_one_process(build, shard, ranks):
    """Shards are uneven, some ranks have none; the shares of the batch are uneven, too, and may be empty."""
    model = made(build)
    names = list(dp.prunable(model, frozen=True))
    expected = hessian_gradients(model, names, iter([DATA]), loss=cross_entropy)
    models = [made(build) for _ in range(ranks)]  # threads draw from the same random numbers

    def work(rank):
        model = models[rank]
        shard(model, init_device_mesh("cpu", (ranks,)))
        own = tuple(part[share_of(len(part), (rank, ranks))] for part in DATA)
        before = state(model)
        found = hessian_gradients(model, names, iter([own]), loss=cross_entropy)
        assert state(model) == before
        for name, weight in dp.mask.parameters(model).items():
            assert name not in found or is_sharded(weight) == is_sharded(found[name])
        return {name: full(product) for name, product in found.items()}

    for found in on_ranks(ranks, work):
        for name, product in expected.items():
            torch.testing.assert_close(found[name], product, rtol=1e-10, atol=1e-14)


def state(model):
    """What must be the same objects, in the same order, before and after."""
    return [
        [id(each) for table in (m._parameters, m._forward_pre_hooks, m._forward_hooks) for each in table.values()]
        for m in model.modules()
    ]


def test_a_network_that_is_not_sharded_stays_as_it_is():
    model = plain()
    before = state(model)
    with whole_weights(model):
        assert state(model) == before


def test_tied_weights_are_one_and_the_network_works_as_sharded_afterwards():
    models = [made(Tied) for _ in range(2)]

    def work(rank):
        model = models[rank]
        root(model, init_device_mesh("cpu", (2,)))
        gone = model.register_forward_hook(lambda *_: gone.remove())
        kept = model.register_forward_hook(lambda *_: None)
        seen = []
        with pytest.raises(KeyError), whole_weights(model):
            look_and_fail(model, seen)
        assert kept.id in model._forward_hooks
        assert gone.id not in model._forward_hooks
        assert is_sharded(model.into.weight)
        torch.testing.assert_close(model(DATA[0]), seen[0])
        F.cross_entropy(model(DATA[0]), DATA[1]).backward()
        assert is_sharded(model.into.weight.grad)

    on_ranks(2, work)


def look_and_fail(model, seen):
    assert model.into.weight is model.out.weight
    assert not is_sharded(model.into.weight)
    assert not model.frozen.weight.requires_grad
    seen.append(model(DATA[0]))
    raise KeyError


def test_weights_that_are_sharded_in_another_way():
    def work(_):
        model = nn.Linear(6, 4)
        weight = distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
        model.weight = nn.Parameter(weight)
        with pytest.raises(ValueError, match="known only where `fully_shard` has sharded them"):
            hessian_gradients(model, ["weight"], iter([DATA]), loss=cross_entropy)

    on_ranks(2, work)
