"""A state belongs to a mask: one of another mask is not loaded, nowhere and not in part."""

import copy
import io

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import driveprune as dp
from driveprune.sparse.pattern import pattern
from tests.nets import same
from tests.sparse.literal import Residual, assert_near, floats, masked, random_mask, spoken


def other_mask(mask, name):
    """The same, but that one layer keeps as many weights at other places."""
    return {key: kept.flip(0) if key == name else kept for key, kept in mask.items()}


class Branching(nn.Module):
    """A network that torch.fx does not follow, with a layer that the kernels do not know."""

    def __init__(self):
        super().__init__()
        self.known, self.lines = nn.Linear(6, 8), nn.Conv1d(1, 3, 3)

    def forward(self, x):
        y = self.known(x) if float(x.detach().sum()) > 0 else self.known(-x)
        return self.lines(y[:, None]).flatten(1)


def pair(make, name, example):
    """Two sparse networks of the same weights, whose masks differ in one layer."""
    net = make()
    mask = {key: floats(*weight.shape, seed=1) > 0.2 for key, weight in net.named_parameters() if weight.dim() > 1}
    assert not torch.equal(mask[name], mask[name].flip(0))
    nets = [dp.sparsify(net, each, example, layers="sparse") for each in (mask, other_mask(mask, name))]
    return nets, mask


CASES = [
    (lambda: spoken(Residual().eval()), "side.weight", floats(1, 3, 8, 8)),
    (lambda: spoken(Residual().eval()), "head.weight", floats(1, 3, 8, 8)),
    (Branching, "known.weight", floats(1, 6)),
    (Branching, "lines.weight", floats(1, 6)),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("make", "name", "example"), CASES)
def test_a_foreign_state_is_an_error_and_nothing_is_loaded(make, name, example, strict):
    (one, other), _ = pair(make, name, example)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(1)
    assert [key for key, _ in one.state_dict().items()] == [key for key, _ in other.state_dict().items()]
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(RuntimeError, match=rf"{name} keeps other places here.*sparsify\(model, mask, example\)"):
        one.load_state_dict(other.state_dict(), strict=strict)
    assert same(one.state_dict(), before)
    path = name.removesuffix(".weight")
    with pytest.raises(RuntimeError, match="weight keeps other places here"):
        one.get_submodule(path).load_state_dict(other.get_submodule(path).state_dict(), strict=strict)
    assert same(one.state_dict(), before)


def test_parts_whose_masks_agree_are_loaded():
    (one, other), _ = pair(lambda: spoken(Residual().eval()), "side.weight", floats(1, 3, 8, 8))
    with torch.no_grad():
        other.stem.weight.add_(1)
    one.stem.load_state_dict(other.stem.state_dict())
    assert torch.equal(one.stem.weight, other.stem.weight)


def test_the_same_mask_is_loaded_by_any_way():
    net = spoken(Residual().eval())
    mask = random_mask(net, 0.8)
    one = dp.sparsify(net, mask, floats(1, 3, 8, 8), layers="sparse")
    other = dp.sparsify(spoken(Residual().eval(), seed=3), mask, floats(1, 3, 8, 8), layers="sparse")
    x = floats(9, 3, 8, 8)
    carries = dict, lambda state: load(save(state)), _saved, lambda state: dict(reversed(state.items()))
    for carry in carries:
        with torch.no_grad():
            for weight in one.parameters():
                weight.mul_(1.5)
        state = one.state_dict()
        assert all(isinstance(value, torch.Tensor) for value in state.values())
        before = dict(state)
        assert not any(other.load_state_dict(carry(state)))
        assert state.keys() == before.keys()
        assert torch.equal(one(x), other(x))


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_wrapped_networks_compare_too():
    (one, other), _ = pair(lambda: spoken(Residual().eval()), "side.weight", floats(1, 3, 8, 8))
    wrapped = [nn.Sequential(nn.Identity(), each) for each in (one, other)]
    with pytest.raises(RuntimeError, match=r"1\.side\.weight keeps other places"):
        wrapped[0].load_state_dict(wrapped[1].state_dict())
    averaged = torch.optim.swa_utils.AveragedModel(one)
    averaged.update_parameters(one)
    again = torch.optim.swa_utils.AveragedModel(one)
    again.load_state_dict(averaged.state_dict())
    with pytest.raises(RuntimeError, match="side.weight keeps other places"):
        again.load_state_dict(torch.optim.swa_utils.AveragedModel(other).state_dict())


def test_states_without_patterns():
    """Those of an ordinary network, or of an older version, are errors that say what to do."""
    net = spoken(Residual().eval())
    fast = dp.sparsify(net, random_mask(net, 0.8), floats(1, 3, 8, 8), layers="sparse")
    state = {key: value * 2 for key, value in fast.state_dict().items() if not key.endswith("_pattern")}
    before = copy.deepcopy(fast.state_dict())
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"has no stem.weight_pattern.*\{\*\*fast.state_dict\(\), \*\*state\}"):
            fast.load_state_dict(state, strict=strict)
        with pytest.raises(RuntimeError, match="before sparsify"):
            fast.load_state_dict(net.state_dict(), strict=strict)
    assert same(fast.state_dict(), before)
    fast.load_state_dict({**fast.state_dict(), **state})
    assert torch.equal(fast.stem.weight, state["stem.weight"])
    fast.load_state_dict({"norm.bias": torch.ones(8)}, strict=False)  # says nothing of a masked weight
    assert fast.norm.bias.eq(1).all()


def test_states_that_people_compute_with():
    """Averages, multiples and rounded copies of states belong to their mask; mixtures of two masks to none."""
    (one, other), _ = pair(lambda: spoken(Residual().eval()), "side.weight", floats(1, 3, 8, 8))
    state, foreign = one.state_dict(), other.state_dict()
    twin = copy.deepcopy(one)
    for made in (
        {key: value * 2 for key, value in state.items()},
        {key: value / 3 for key, value in state.items()},
        {key: (value + 2 * value) / 3 for key, value in state.items()},
        {key: value.bfloat16() for key, value in state.items()},
        {key: value + 0.3 * (value - 0.9 * value) for key, value in state.items()},
    ):
        twin.load_state_dict(made)
        assert_near(twin.stem.weight, made["stem.weight"].float(), 1e-2)
    for made in (
        {key: (value + foreign[key]) / 2 for key, value in state.items()},
        {key: value - value for key, value in state.items()},
    ):
        with pytest.raises(RuntimeError, match="keeps other places"):
            twin.load_state_dict(made)


def test_a_damaged_pattern_is_an_error():
    net = nn.Sequential(nn.Linear(4, 4))
    fast = dp.sparsify(net, random_mask(net, 0.5), floats(1, 4), layers="sparse")
    value = fast.state_dict()["0.weight_pattern"]
    nearly = torch.cat([value[:15], -value[15:]])
    for damaged in (torch.zeros(16), torch.full((16,), torch.nan), torch.zeros(3), torch.tensor(1.0), "text", nearly):
        with pytest.raises(RuntimeError, match="keeps other places"):
            fast.load_state_dict({**fast.state_dict(), "0.weight_pattern": damaged})


def test_patterns_are_small_and_tell_shapes_and_places():
    kept = torch.tensor([[True, False, False], [False, False, True]])
    assert pattern(kept).shape == (16,)
    assert pattern(kept).dtype == torch.float32
    others = [kept.flip(0), kept.view(3, 2), kept[:1], ~kept, torch.zeros(0, 3, dtype=torch.bool)]
    assert len({tuple(pattern(each).tolist()) for each in (kept, *others)}) == 6
    assert torch.equal(pattern(kept), pattern(kept.t().contiguous().t()))


def test_the_optimiser_and_the_parameters_are_as_before():
    net = spoken(Residual().train())
    fast = dp.sparsify(net, random_mask(net, 0.8), floats(2, 3, 8, 8), layers="sparse")
    assert [key for key, _ in fast.named_parameters()] == [key for key, _ in net.named_parameters()]
    assert [key for key, _ in fast.named_buffers()] == [key for key, _ in net.named_buffers()]


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
def test_copies_keep_their_zeros():
    """What the kernels do not know is held at zero in a copy, too, and stays so when a state is loaded."""
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 4))
    mask = {"0.weight": floats(4, 2, 3, 3) > 0, "2.weight": floats(4, 4) > 0}
    fast = dp.sparsify(net, mask, floats(1, 4, 3, 3), layers="sparse")
    for twin in (copy.deepcopy(fast), _reloaded(fast), copy.deepcopy(copy.deepcopy(fast))):
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            twin(floats(5, 4, 3, 3)).square().sum().backward()
            optimizer.step()
        assert not twin[0].weight[~mask["0.weight"]].any()
        assert twin[0].weight[mask["0.weight"]].ne(fast[0].weight[mask["0.weight"]]).all()
        state = twin.state_dict()
        state["0.weight"] = torch.ones_like(state["0.weight"])
        twin.load_state_dict(state)
        assert torch.equal(twin[0].weight != 0, mask["0.weight"])
        twin.load_state_dict(twin.state_dict(), assign=True)
        twin.zero_grad()
        twin(floats(5, 4, 3, 3)).square().sum().backward()
        assert torch.equal(twin[0].weight.grad != 0, mask["0.weight"])
        assert_near(twin(floats(5, 4, 3, 3)), masked(dp.densify(twin), mask)(floats(5, 4, 3, 3)))


def _reloaded(fast):
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
