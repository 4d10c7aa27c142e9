"""What each rank does in the tests with several processes: `launch` starts torchrun, which runs this file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import warnings
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import driveprune as dp
from driveprune import collectives, datasets, selection, train
from driveprune.collectives import full, local
from driveprune.files import read_json
from driveprune.fit import Tensors
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec
from tests.nets import batch, convnet, images, mlp
from tests.patience import PATIENCE

KNOBS = {
    "imp": {"cycles": 2, "cycle_epochs": 1.0},
    "gmp": {"cuts": 3},
    "drive": {"early_epochs": 1.0, "cuts": 4},
    "driveflow": {"early_epochs": 1.0, "cuts": 4},
    "synflow": {"cuts": 4},
    "force": {"cuts": 4},
    "grasp": {"temperature": 1.0},
}
SIZES = (10, 6)
"""Examples of a batch on the first rank and on the second: ranks need not have equal shares."""

Ended = subprocess.CompletedProcess[str]


def launch(work: str, *args: object, ranks: int = 2, seconds: float = PATIENCE) -> str:
    """Run a function of this file on several ranks; what they printed."""
    done = torchrun("tests.ranks", work, *map(str, args), ranks=ranks, seconds=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(module: str | None, *args: str, ranks: int = 2, seconds: float = PATIENCE) -> Ended:
    """Run a module, or (None) the script that is the first argument, on several ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, *(() if module is None else ("-m", module)), *args], capture_output=True, text=True,
        timeout=seconds, check=False, cwd=Path(__file__).parent.parent, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def net(kind: str) -> nn.Module:
    """The same network in float64 on every rank: as it is, in DDP, or sharded."""
    model = mlp(dtype=torch.float64)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def whole(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of all ranks together."""
    return batch(sum(SIZES), seed=number, dtype=torch.float64)


def share(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of it that a rank has."""
    x, y = (part.split(SIZES)[rank] for part in whole(number))
    return x, y


def trained(model: nn.Module, method: str, batches: list, weights: list[float], **options) -> dp.Pruner:
    """Four epochs of two steps by the plan of a method; a rank's loss counts by its weight."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    pruner = dp.Pruner(
        model, optimizer, batches, method=method, sparsity=0.9, epochs=4, steps_per_epoch=2,
        knobs=KNOBS.get(method), progress=False, **options,
    )  # fmt: skip
    for _ in range(pruner.epochs):
        for (x, y), weight in zip(batches, weights, strict=True):
            (weight * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            pruner.step()
    return pruner


def write(path: Path, mask: dict, model: nn.Module) -> None:
    tensors = {f"mask.{name}": full(kept) for name, kept in mask.items()}
    tensors |= {f"net.{name}": full(w.detach()) for name, w in dp.mask.parameters(model).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def all_of(folder: str, kind: str) -> None:
    """All that is compared with one process, in one go: starting processes takes the most time."""
    follow_plans(folder, kind)
    fail_on_one_rank(kind)
    prune_with_options(folder, kind)


def follow_plans(folder: str, kind: str) -> None:
    """Every method, from the first step to the last."""
    rank = dist.get_rank()
    share_of_rank = SIZES[rank] * len(SIZES) / sum(SIZES)
    for method in dp.methods.names():
        model = net(kind)
        batches = [share(0, rank), share(1, rank)]
        pruner = trained(model, method, batches, [share_of_rank] * 2)
        write(Path(folder) / f"{method}-{rank}", pruner.mask, model)


OPTIONS = {
    "min_kept": ("snip", {"min_kept": 20}),
    "macs": ("snip", {"budget": "macs"}),
    "squares": ("drive", {"knobs": {"cuts": 3, "batches_per_cut": 2, "combine": "squares"}}),
    "batches": ("snip", {"knobs": {"batches_per_cut": 2}}),
    "iterative": ("force", {"knobs": {"cuts": 5, "revive": False}}),
    "excluded": ("magnitude", {"exclude": "0.*"}),
    "hessian": ("grasp", {"knobs": {"temperature": 1.0, "batches_per_cut": 2}}),
    "temperature": ("grasp", {"exclude": "2.*"}),
}


def prune_with_options(folder: str, kind: str) -> None:
    rank = dist.get_rank()
    for name, (method, options) in OPTIONS.items():
        model = net(kind)
        kept = dp.prune(
            model, [share(0, rank), share(1, rank)], method=method, sparsity=0.8, progress=False, **options
        )
        write(Path(folder) / f"{name}-{rank}", kept, model)


def prune_with_batch_statistics(folder: str) -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(convnet(dtype=torch.float64))
    x, y = images(16, dtype=torch.float64)
    own = (x.split(8)[rank], y.split(8)[rank])
    before = {name: b.clone() for name, b in model.module.named_buffers()}
    kept = dp.prune(model, [own], method="drive", sparsity=0.9, knobs={"cuts": 5}, progress=False)
    assert all(torch.equal(b, before[name]) for name, b in model.module.named_buffers())
    write(Path(folder) / f"bn-{rank}", kept, model)


def run_until_killed(root: str, spec: str, steps: str) -> None:
    """A run in which the second rank dies, by SIGKILL, after so many steps and once there is a checkpoint."""
    wanted = Spec.from_json(read_json(spec))
    step, left = train._Training._step, [int(steps)]

    def deadly(training, batch):
        step(training, batch)
        left[0] -= 1
        if left[0] < 0 and dist.get_rank() == 1 and list((Path(root) / wanted.id).glob("checkpoint-*")):
            os.kill(os.getpid(), signal.SIGKILL)

    train._Training._step = deadly
    carry_out(Path(root), wanted, datasets.load(wanted.recipe.data), every=0.0)


def fit_with_norm(folder: str) -> None:
    """Batch statistics stay the same on all ranks, and are kept in one network."""
    x, y = images(21)
    torch.manual_seed(dist.get_rank())  # ranks begin with other weights, and take those of the first
    model = convnet(seed=dist.get_rank())
    trained = dp.fit(model, ((x, y), (x, y)), sparsity=0.8, method="snip", epochs=2, progress=False)
    tensors = {f"mask.{name}": kept for name, kept in trained.mask.items()}
    tensors |= {f"net.{name}": value.contiguous() for name, value in model.state_dict().items()}
    tensors["test"] = torch.tensor([row["test"] for row in trained.rows])
    save_file(tensors, Path(folder) / f"norm-{dist.get_rank()}")
    for wrong, said in ((DistributedDataParallel(convnet()), "inside the DDP"), (net("fsdp"), "Pruner")):
        with pytest.raises(ValueError, match=said):
            dp.fit(wrong, ((x, y), (x, y)), sparsity=0.8, progress=False)


def small_things(folder: str) -> None:
    choose_at_random("8")
    prune_with_options(folder, "plain")
    nan_in_scores_of_one_rank()
    differ()
    random_numbers()
    agree()
    prune_with_batch_statistics(folder)
    fit_with_norm(folder)
    hold_no_more_than_a_share()
    shuffle_and_reinitialise()
    prune_without_the_other()


def prune_without_the_other() -> None:
    """A rank whose fellow does not come is told why it waited."""
    group = dist.new_group()  # for which both have time; what is short is the time to wait for an answer
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(collectives.RankError, match='a rank that prunes for itself passes group="alone"'):
            dp.prune(net("plain"), [share(0, 0)], method="snip", sparsity=0.9, group=group)
    dist.barrier()


def agree() -> None:
    rank = dist.get_rank()
    assert collectives.total(rank, 2) == [1.0, 4.0]
    assert collectives.from_first(lambda: f"from {rank}") == "from 0"
    assert collectives.is_same(7)
    assert not collectives.is_same(7, rank)
    assert collectives.mean({"a": torch.tensor([1.0 + rank])}, weight=1 + 2 * rank)["a"].item() == 1.75
    with collectives.among("alone"):
        assert (collectives.size(), collectives.rank(), collectives.total(rank)) == (1, 0, [float(rank)])
    tensor = torch.full((2, 3, 2, 2), float(rank)).to(memory_format=torch.channels_last)
    collectives.copy_first([tensor])
    assert not tensor.any()
    with pytest.raises(collectives.RankError if rank else KeyError):
        fail_on_the_first(rank)
    assert collectives.total(1) == [2.0]  # nobody is left waiting


def fail_on_the_first(rank: int) -> None:
    with collectives.together(), collectives.together():
        if rank == 0:
            raise KeyError("first")


def shuffle_and_reinitialise() -> None:
    """The sanity checks: a shuffled mask is that of one process; new weights are an error."""
    kept = dp.prune(net("fsdp"), [share(0, dist.get_rank())], method="magnitude", sparsity=0.9)
    with pytest.raises(ValueError, match="needs the whole model and the whole mask"):
        dp.save("net.safetensors", net("fsdp"), kept)
    shuffled = dp.pruner._shuffled(kept, 3)
    expected = dp.pruner._shuffled(dp.Mask({name: full(each) for name, each in kept.items()}), 3)
    assert all(torch.equal(full(shuffled[name]), each) for name, each in expected.items())
    with pytest.raises(ValueError, match="cannot draw new weights"):
        dp.pruner._reinitialise(net("fsdp"), 0)


def choose_at_random(examples: str) -> None:
    """keep_top of scores that are sharded in all kinds of ways, against one process with all scores."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2)) if world > 2 else None
    for seed in range(int(examples)):
        choose = random.Random(seed)
        torch.manual_seed(seed)
        scores, mask, parts, part_masks = {}, {}, {}, {}
        for name in "abc"[: choose.randint(1, 3)]:
            shape = choose.choice([(1, 5), (2, 9), (3, 4), (7, 3, 2), (13, 1), (16, 3), (1, 1)])
            scores[name] = torch.randn(shape, dtype=choose.choice([torch.float32, torch.float64]))
            scores[name] = scores[name].round() if choose.random() < 0.6 else scores[name]
            mask[name] = torch.rand(shape) < choose.choice([0.5, 0.9, 2.0])
            ways = [(flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Replicate()]), None]
            if square is not None:
                ways += [(square, [Shard(0), Shard(0)]), (square, [Replicate(), Shard(0)]),
                         (square, [Shard(0), Shard(1)])]  # fmt: skip
            way = choose.choice(ways)
            parts[name] = scores[name] if way is None else sharded(scores[name], *way)
            part_masks[name] = mask[name] if way is None else sharded(mask[name], *way)
        for sparsity in (0.0, 0.4, 0.8):
            for options in ({}, {"revive": True}, {"min_kept": 1}, {"scope": "layer"},
                            {"costs": {"a": 1.0, "b": 2.5, "c": 3.0}}):  # fmt: skip
                compare(scores, mask, parts, part_masks, sparsity, options, f"seed {seed}")


def sharded(tensor: torch.Tensor, mesh, placements) -> DTensor:
    return torch.distributed.tensor.distribute_tensor(tensor, mesh, placements)


def compare(scores, mask, parts, part_masks, sparsity, options, about) -> None:
    try:
        expected = dp.keep_top(scores, mask, sparsity, **options)
    except ValueError:
        with pytest.raises(ValueError):
            dp.keep_top(parts, part_masks, sparsity, **options)
        return
    found = dp.keep_top(parts, part_masks, sparsity, **options)
    for name, kept in expected.items():
        assert torch.equal(full(found[name]), kept), (about, sparsity, options, name)


def hold_no_more_than_a_share() -> None:
    """No rank ever has more scores than its share, and nothing is gathered, but weights for GraSP."""
    seen: list[int] = []
    of = selection._Layer.of

    def noted(name, score, candidates):
        layer = of(name, score, candidates)
        seen.append(layer.score.numel())
        return layer

    selection._Layer.of = noted
    whole_again = DTensor.full_tensor
    for method in ("drive", "snip", "synflow", "force", "random", "erk", "magnitude", "grasp"):
        DTensor.full_tensor = whole_again if method == "grasp" else None
        model = net("fsdp")
        weights = dp.prunable(model)
        share_of_rank = sum(local(w).numel() for w in weights.values())
        seen.clear()
        knobs = {name: value for name, value in KNOBS.get(method, {}).items() if name != "early_epochs"}
        dp.prune(
            model, [share(0, dist.get_rank())], method=method, sparsity=0.9, progress=False, knobs=knobs
        )  # fmt: skip
        cuts = len(seen) // len(weights)
        assert cuts >= 1
        assert sum(seen) == cuts * share_of_rank
        assert share_of_rank < 0.6 * sum(w.numel() for w in weights.values())
    selection._Layer.of, DTensor.full_tensor = of, whole_again


def fail_on_one_rank(kind: str) -> None:
    """Whatever goes wrong on the second rank only, both raise, and the model is as before."""
    rank = dist.get_rank()
    x, y = share(0, rank)
    cases = [
        ([(x * float("nan"), y)] if rank else [(x, y)], dp.gradients.cross_entropy),
        (iter([(x, y)]) if rank else [(x, y)], dp.gradients.cross_entropy),
        ([(x, y)], failing if rank else dp.gradients.cross_entropy),
    ]
    error, said = (ValueError, "") if rank else (collectives.RankError, "rank 1 failed with ValueError")
    orders = [("drive", {"cuts": 3}), ("grasp", {"batches_per_cut": 2})]
    for (batches, loss), (method, knobs) in product(cases, orders):
        model = net(kind)
        before = {key: full(w.detach()).clone() for key, w in dp.mask.parameters(model).items()}
        with pytest.raises(error, match=said):
            dp.prune(model, batches, method=method, loss=loss, sparsity=0.9, knobs=knobs, progress=False)
        after = {key: full(w.detach()) for key, w in dp.mask.parameters(model).items()}
        assert all(torch.equal(after[key], before[key]) for key in before)


def failing(model, batch):
    F.cross_entropy(model(batch[0]), batch[1])
    raise ValueError("this rank cannot")


def nan_in_scores_of_one_rank() -> None:
    mesh = init_device_mesh("cpu", (2,))
    score = torch.rand(4, 3)
    score[3, 1] = float("nan")
    with pytest.raises((ValueError, collectives.RankError), match="NaN"):
        dp.keep_top({"a": sharded(score, mesh, [Shard(0)])}, None, 0.5)


class HarmedShare:
    """Batches of which one, on the second rank, holds NaN."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __iter__(self):
        return iter(self.source)

    def epoch(self, cycle, number, start=0):
        for place, (x, y) in enumerate(self.source.epoch(cycle, number, start), start):
            harmed = (number, place, dist.get_rank()) == (1, 1, 1)
            yield torch.full_like(x, float("nan")) if harmed else x, y


def nan_in_a_batch_of_one_rank() -> None:
    """All ranks stop at the step; the one that had the batch says where it was, and the others say which it is."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 10, generator=generator)
    source = HarmedShare(Tensors(x, (x.sum(1) > 0).long(), 8, 0, share=(dist.get_rank(), 2)))
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"sparsity": 0.5, "epochs": 3, "steps_per_epoch": 4, "method": "magnitude"}
    said = r"not finite at step 6 \(epoch 2, batch 2\): the batch itself holds NaN, in batch\[0\], example 0"
    kind = (collectives.RankError, FloatingPointError)[dist.get_rank()]
    with pytest.raises(kind, match=said):
        train.train(model, optimizer, source, lambda _, tell: dp.Pruner(model, optimizer, source, **settings))


def own_scores(model, mask, batches, *, loss, generator):
    """A method that forgets the other ranks."""
    value = loss(model, next(batches))
    weights = [dp.mask.parameters(model)[name] for name in mask]
    return dict(zip(mask, (g.abs() for g in torch.autograd.grad(value, weights)), strict=True))


def differ() -> None:
    """Masks that would differ are an error; a rank that works alone may have its own."""
    rank = dist.get_rank()
    with pytest.raises(RuntimeError, match="different weights"):
        dp.prune(net("plain"), [share(0, rank)], method=own_scores, sparsity=0.9)
    kept = dp.prune(net("plain"), [share(0, rank)], method="snip", sparsity=0.9, group="alone")
    expected = dp.prune(mlp(dtype=torch.float64), [share(0, rank)], method=own_snip, sparsity=0.9, group="alone")
    assert all(torch.equal(kept[name], expected[name]) for name in kept)


def own_snip(model, mask, batches, *, loss, generator):
    g = own_scores(model, mask, batches, loss=loss, generator=generator)
    return {name: dp.mask.parameters(model)[name].detach().abs() * each for name, each in g.items()}


def random_numbers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for shape in ((5, 7), (1, 9), (4, 3, 2)):
        for dim in (0, 1):
            like = sharded(torch.ones(shape), mesh, [Shard(dim)])
            dp.seeds._PIECE = 6
            found = dp.seeds.uniform(like, dp.seeds.generator_for(3))
            assert torch.equal(full(found), torch.rand(shape, generator=dp.seeds.generator_for(3)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dp.CollapseWarning)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()
