from functools import partial

import pytest
import torch

import driveprune as dp
from driveprune.gradients import check_loss, cross_entropy
from driveprune.integrations._guest import Guest, Length, Order, called_as
from driveprune.kinds import qualified
from driveprune.methods import magnitude
from tests.nets import batch, mlp


def begun(plan, sparsity, steps):
    net = mlp()
    guest = Guest(Order(sparsity, plan, None, (), (), False, 0, "weights", 0, None, None, None))
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


def test_a_pruner_that_comes_as_a_guest_is_told_the_users_own_loss():
    def calling(model, batch):
        return own(model, batch)

    assert qualified(called_as(own, calling)) == "tests.integrations.test_guest.own"
    assert qualified(called_as(partial(own, scale=2.0), calling)) == "tests.integrations.test_guest.own(scale=2.0)"
    check_loss(called_as(own, calling))


def own(model, batch, *, scale=1.0):
    """A loss of one's own."""
    return scale * cross_entropy(model, batch)


def test_a_plan_of_ones_own_needs_no_sparsity():
    plan = [dp.Train(2), dp.Prune(magnitude.score, (0.5,)), dp.Train(6)]
    guest = begun(plan, None, steps=6)
    with pytest.warns(UserWarning, match="the sparsity is 0 and not 0.5"):
        guest.end()
