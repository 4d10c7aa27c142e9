import pytest
import torch
import torch.nn.functional as F

import driveprune as dp
from tests.nets import batch, convnet, images, mlp, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


def loop(net, data, optimizer, pruner):
    """Yields after every step; a change of `pruner.cycle` shows a rewind."""
    for _ in range(pruner.epochs):
        for x, y in data:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            pruner.step()
            yield


def start(net, data, **knobs):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    pruner = dp.Pruner(
        net, optimizer, data, method="imp", sparsity=0.9, epochs=5, steps_per_epoch=len(data), scheduler=scheduler,
        knobs={"cycles": 3, "cycle_epochs": 2, **knobs},
    )  # fmt: skip
    return optimizer, scheduler, pruner


def test_returns_bit_exactly_to_the_initial_weights_under_its_mask():
    net, data = convnet(), [images(seed=0), images(seed=1)]
    initial = snapshot(net)
    optimizer, scheduler, pruner = start(net, data)
    cycle = 0
    for _ in loop(net, data, optimizer, pruner):
        if pruner.cycle != cycle:
            cycle = pruner.cycle
            for name, value in snapshot(net).items():
                kept = pruner.mask.get(name)
                assert torch.equal(value, initial[name] if kept is None else torch.where(kept, initial[name], 0.0))
            assert not optimizer.state
            assert optimizer.param_groups[0]["lr"] == 0.1
            assert scheduler.last_epoch == 0
            assert pruner.cycle_step == 0
    assert cycle == 3
    assert pruner.done
    assert scheduler.last_epoch == 5


def test_the_smallest_trained_weights_go():
    net, data = mlp(), [batch()]
    optimizer, _, pruner = start(net, data, cycles=1)
    before = None
    for _ in loop(net, data, optimizer, pruner):
        if pruner.cycle:
            break
        before = {name: w.detach().clone() for name, w in dp.prunable(net).items()}
    # The step that leads to the cut is made again by hand on the weights before it.
    twin = mlp()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for lr in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = lr
        F.cross_entropy(twin(data[0][0]), data[0][1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = dp.prune(twin, method="magnitude", sparsity=0.9)
    assert before is not None
    assert all(torch.equal(pruner.mask[name], expected[name]) for name in expected)


def test_rewinding_to_an_early_step():
    net, data = mlp(), [batch(seed=0), batch(seed=1)]
    optimizer, scheduler, pruner = start(net, data, rewind_epochs=1)
    cycle, at_one = 0, None
    for _ in loop(net, data, optimizer, pruner):
        if pruner.cycle == 0 and pruner.cycle_step == 2:
            at_one = snapshot(net)
        if pruner.cycle != cycle:
            cycle = pruner.cycle
            assert pruner.cycle_step == 2
            assert scheduler.last_epoch == 1
            for name, kept in pruner.mask.items():
                assert torch.equal(net.state_dict()[name], torch.where(kept, at_one[name], 0.0))
    assert cycle == 3


def test_the_plan_of_the_paper():
    plan = dp.methods.make_plan("imp", 0.9, 150, 1)
    assert len(plan) == 151
    assert plan[0] == dp.Train(20)
    assert plan[1].path == (1 - 0.1 ** (1 / 50),)
    assert plan[2] == dp.Rewind(0)
    assert plan[-3].path == (0.9,)
    assert plan[-1] == dp.Train(150)
