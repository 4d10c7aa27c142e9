import pytest
import torch

import driveprune as dp
from driveprune.gradients import cross_entropy
from driveprune.integrations._guest import Guest, Length, Order
from driveprune.methods import magnitude
from tests.nets import batch, mlp


def begun(plan, sparsity, steps):
    net = mlp()
    guest = Guest(Order(sparsity, plan, None, (), (), False, 0, "weights", 0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guest.begin(net, [optimizer], [], [batch()], loss=cross_entropy, length=Length(steps, 2), state=None)
    return guest


def test_a_plan_of_ones_own_may_end_before_the_training_does():
    plan = [dp.Train(2), dp.Prune(magnitude.score, (0.5,)), dp.Train(6)]
    guest = begun(plan, 0.5, steps=10)
    for _ in range(10):
        guest.step()
    assert guest.pruner.done
    assert guest.sparsity == 0.5
    guest.end()
    with pytest.raises(ValueError, match="takes at least 6 steps"):
        begun(plan, 0.5, steps=5)
    with pytest.raises(dp.OptionError, match="the plan cuts to sparsity 0.5, so sparsity=0.9 would do nothing"):
        begun(plan, 0.9, steps=10)
