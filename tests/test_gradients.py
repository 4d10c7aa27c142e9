import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from driveprune.gradients import batch_size, cross_entropy, endless, gradients, scoring
from tests.nets import Recurrent, batch, convnet, images, mlp, sequences


def test_one_iterator_lives_until_it_ends_and_starts_again():
    stream = endless([1, 2, 3])
    assert [next(stream) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_one_batch_may_serve_any_number_of_cuts():
    stream = endless([1])
    assert {next(stream) for _ in range(100)} == {1}


@pytest.mark.parametrize("empty", [[], iter([])])
def test_no_batches(empty):
    with pytest.raises(ValueError, match="batches is empty"):
        next(endless(empty))


def test_a_one_shot_iterator_that_runs_out():
    stream = endless(iter([1, 2]))
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ValueError, match="ran out after 2 batches.*list or a data loader"):
        next(stream)


def test_batches_that_are_missing_or_a_single_one():
    with pytest.raises(ValueError, match="pass batches"):
        next(endless(None))
    with pytest.raises(ValueError, match=r"pass \[\(x, y\)\]"):
        next(endless(batch()))


@pytest.mark.parametrize("bad", [torch.zeros(3), (torch.zeros(3),), {"x": 1}, "xy"])
def test_the_default_loss_says_what_it_takes(bad):
    with pytest.raises(ValueError, match="a batch must be a pair of tensors.*pass loss="):
        cross_entropy(mlp(), bad)


def test_batch_sizes():
    assert batch_size(batch(7)) == 7
    assert batch_size({"input": torch.zeros(5, 2), "n": 3}) == 5
    assert batch_size([{"a": torch.zeros(4)}]) == 4
    assert batch_size("text") == 1
    assert batch_size(torch.tensor(1.0)) == 1


def test_unused_and_frozen_weights():
    net = mlp()
    net[0].weight.requires_grad_(False)
    unused = nn.Linear(2, 2)
    both = nn.ModuleList([net, unused])
    found = gradients(
        both, ["0.0.weight", "1.weight"], iter([batch()]), loss=lambda m, b: F.cross_entropy(m[0](b[0]), b[1])
    )
    assert found["0.0.weight"].any()
    assert not found["1.weight"].any()
    assert not net[0].weight.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_where_they_are_switched_off(context):
    net, data = mlp(), batch()
    with context():
        found = gradients(net, ["0.weight"], iter([data]), loss=cross_entropy)
    assert found["0.weight"].any()


def test_half_precision_is_combined_in_float32():
    net = mlp(dtype=torch.bfloat16)
    data = [batch(seed=s, dtype=torch.bfloat16) for s in range(2)]
    assert gradients(net, ["0.weight"], iter(data), loss=cross_entropy, count=2)["0.weight"].dtype == torch.float32


def test_a_loss_that_is_no_scalar():
    with pytest.raises(ValueError, match=r"scalar tensor, got a tensor of shape \(16, 3\)"):
        gradients(mlp(), ["0.weight"], iter([batch()]), loss=lambda m, b: m(b[0]))


def test_a_loss_that_is_not_finite_names_the_cause():
    net = mlp()
    with torch.no_grad():
        net[2].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the loss is nan .*weights of 2.weight hold NaN"):
        gradients(net, ["0.weight"], iter([batch()]), loss=cross_entropy)
    x, y = batch()
    with pytest.raises(ValueError, match="first layer with such an output is 0"):
        gradients(mlp(), ["0.weight"], iter([(x * float("inf"), y)]), loss=cross_entropy)
    with pytest.raises(ValueError, match="the loss is inf on a scoring batch; its layers are finite"):
        gradients(mlp(), ["0.weight"], iter([batch()]), loss=lambda m, b: m(b[0]).sum() * 0 + float("inf"))


def test_scoring_is_training_without_dropout():
    net = convnet().eval()
    with scoring(net, 0) as plain:
        assert plain[1].training
        a, b = plain(images()[0]), plain(images()[0])
        assert torch.equal(a, b)
    assert not any(module.training for module in net.modules())


def test_recurrent_dropout_is_off_while_scoring():
    net = Recurrent()
    with scoring(net, 0):
        assert torch.equal(net(sequences()[0]), net(sequences()[0]))
    assert net.lstm.dropout == 0.3


class Checkpointed(nn.Module):
    """Dropout as a module and as a function, inside what is computed again in the backward pass."""

    def __init__(self, checkpointed):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))
        self.checkpointed = checkpointed

    def _forward(self, x):
        return F.dropout(self.net(x).tanh(), 0.5, self.training)

    def forward(self, x):
        return checkpoint(self._forward, x, use_reentrant=False) if self.checkpointed else self._forward(x)


def test_dropout_is_off_in_what_checkpointing_computes_again():
    nets = [Checkpointed(False), Checkpointed(True)]
    nets[1].load_state_dict(nets[0].state_dict())
    found = []
    for net in nets:
        with scoring(net, seed=0) as plain:
            found.append(gradients(plain, ["net.0.weight"], iter([batch()]), loss=cross_entropy)["net.0.weight"])
    assert torch.equal(*found)


def test_replaced_buffers_come_back():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return x

    net = Counter()
    before = net.count
    with scoring(net, 0):
        net(torch.zeros(1))
    assert net.count is before
    assert net.count == 0
