"""Operations on blocked tensors against torch's own, forward and back."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driveprune.sparse import blocked
from driveprune.sparse.blocked import (
    Kernel,
    convolve,
    convolve_and_pass,
    dropout,
    flatten,
    normalise,
    pack,
    pooled,
    unpack,
)
from driveprune.sparse.code import LANES
from tests.sparse.literal import assert_near, convolved, floats, layer_of


@pytest.mark.parametrize("count", [1, LANES - 1, LANES, LANES + 1, 3 * LANES])
def test_pack_and_unpack(count):
    x = floats(count, 3, 4, 5)
    packed = pack(x)
    assert packed.shape == (-(-count // LANES), 3, 4, 5, LANES)
    assert torch.equal(unpack(packed, count, 4), x)
    assert torch.equal(pack(x.to(memory_format=torch.channels_last)), packed)
    rest = packed.movedim(-1, 1).reshape(-1, 3, 4, 5)[count:]
    assert not rest.any()
    assert torch.equal(unpack(pack(x[:, :, 0, 0]), count, 2), x[:, :, 0, 0])


def test_gradients_of_lanes_that_fill_up_are_zero():
    x = pack(floats(3, 2, 4, 4)).requires_grad_()
    unpack(x, 3, 4).sum().backward()
    assert torch.equal(x.grad[..., :3], torch.ones_like(x.grad[..., :3]))
    assert not x.grad[..., 3:].any()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_convolve(relu, bias):
    kept = torch.rand(5, 4, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.3
    layer = layer_of(kept, padding=(1, 1))
    given = [floats(11, 4, 6, 6), floats(int(kept.sum()), seed=1), floats(5, seed=2) if bias else None]
    found = [None if each is None else each.clone().requires_grad_() for each in given]
    exact = [None if each is None else each.double().requires_grad_() for each in given]
    out = unpack(convolve(pack(found[0]), found[1], found[2], Kernel(layer), relu=relu), 11, 4)
    expected = convolved(exact[0], kept, exact[1], exact[2], layer)
    expected = expected.relu() if relu else expected
    assert_near(out, expected)
    slope = floats(*expected.shape, seed=3)
    out.backward(slope)
    expected.backward(slope.double())
    for a, b in zip(found, exact, strict=True):
        if a is not None:
            assert_near(a.grad, b.grad)


@pytest.mark.parametrize("density", [0.0, 0.4])
def test_gradients_of_others_come_back_through_a_layer(density):
    kept = torch.rand(3, 4, 3, 3, generator=torch.Generator().manual_seed(0)) < density
    kernel, values = Kernel(layer_of(kept, stride=(2, 2), padding=(1, 1))), floats(int(kept.sum()), seed=1)
    given = floats(11, 4, 6, 6)
    found, exact = given.clone().requires_grad_(), given.double().requires_grad_()
    out, passed = convolve_and_pass(pack(found), values, None, kernel)
    (unpack(passed, 11, 4).square().sum() + unpack(out, 11, 4).sum()).backward()
    (exact.square().sum() + convolved(exact, kept, values.double(), None, kernel.layer).sum()).backward()
    assert_near(found.grad, exact.grad)
    alone = given.clone().requires_grad_()
    unpack(convolve_and_pass(pack(alone), values, None, kernel)[1], 11, 4).sum().backward()  # nobody uses the output
    assert torch.equal(alone.grad, torch.ones_like(alone))


@pytest.mark.parametrize("relu", [False, True])
def test_a_layer_without_weights_is_its_bias(relu):
    kernel = Kernel(layer_of(torch.zeros(3, 2, 3, 3, dtype=torch.bool), padding=(1, 1)))
    x, bias, plus = pack(floats(9, 2, 5, 5)).requires_grad_(), floats(3, seed=1).requires_grad_(), floats(9, 3, 5, 5)
    values = torch.zeros(0, requires_grad=True)
    expected = bias.detach().view(1, 3, 1, 1).expand(9, 3, 5, 5)
    out = convolve(x, values, bias, kernel, relu=relu)
    assert torch.equal(unpack(out, 9, 4), expected.relu() if relu else expected)
    found = kernel.output(x.detach(), values, bias, plus=pack(plus), relu=relu)
    assert_near(unpack(found, 9, 4), (expected + plus).relu() if relu else expected + plus)
    unpack(out, 9, 4).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert values.grad.shape == (0,)
    assert torch.equal(bias.grad, 9 * 25 * ((bias > 0) | (not relu)).float())


def test_only_wanted_gradients_are_computed(monkeypatch):
    kept = torch.ones(2, 2, 1, 1, dtype=torch.bool)
    kernel, called = Kernel(layer_of(kept)), []
    for name in ("input_gradient", "weight_gradient"):
        original = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *a, n=name, f=original, **k: called.append(n) or f(*a, **k))
    values = floats(4).requires_grad_()
    convolve(pack(floats(2, 2, 1, 1)), values, None, kernel).sum().backward()
    assert called == ["weight_gradient"]


def without_shift(norm):
    norm.bias = None
    return norm


def norms(channels):
    return {
        "plain": nn.BatchNorm2d(channels),
        "without scale": nn.BatchNorm2d(channels, affine=False),
        "without shift": without_shift(nn.BatchNorm2d(channels)),
        "without statistics": nn.BatchNorm2d(channels, track_running_stats=False),
        "cumulative": nn.BatchNorm2d(channels, momentum=None),
        "slow": nn.BatchNorm2d(channels, momentum=0.01, eps=0.1),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", norms(1))
def test_normalise(name, training):
    for relu, with_plus in ((False, False), (True, False), (False, True), (True, True)):
        check_norm(norms(3)[name], training, relu, with_plus, count=LANES + 3)
        check_norm(norms(3)[name], training, relu, with_plus, count=LANES)


def check_norm(norm, training, relu, with_plus, count):
    for weight in norm.parameters():
        nn.init.uniform_(weight, -1, 1)
    norm.train(training)
    exact = copy.deepcopy(norm).double()
    for step in range(3):  # the statistics follow
        x, other = floats(count, 3, 4, 5, seed=step) * 2 + 5, floats(count, 3, 4, 5, seed=step + 9)
        found_x, exact_x = x.clone().requires_grad_(), x.double().requires_grad_()
        found_p, exact_p = other.clone().requires_grad_(), other.double().requires_grad_()
        out = unpack(
            normalise(pack(found_x), norm, count, plus=pack(found_p) if with_plus else None, relu=relu), count, 4
        )
        expected = exact(exact_x) + (exact_p if with_plus else 0)
        sure = expected.abs() > 1e-4  # where rounding does not decide on which side of zero a value is
        expected = expected.relu() if relu else expected
        assert_near(out, expected)
        slope = floats(*x.shape, seed=step + 20) * sure
        out.backward(slope)
        expected.backward(slope.double())
        assert_near(found_x.grad, exact_x.grad, 1e-4)
        if with_plus:
            assert_near(found_p.grad, exact_p.grad)
    for a, b in zip(norm.state_dict().values(), exact.state_dict().values(), strict=True):
        assert_near(a, b)
    for a, b in zip(norm.parameters(), exact.parameters(), strict=True):
        assert_near(a.grad, b.grad, 1e-4)


def test_one_value_for_each_channel_is_an_error():
    for norm in (nn.BatchNorm2d(2), nn.BatchNorm2d(2, track_running_stats=False)):
        with pytest.raises(ValueError, match="more than one value"):
            normalise(pack(floats(1, 2, 1, 1)), norm, 1)
    with pytest.raises(ValueError, match="normalisation of 2 channels was given 3"):
        normalise(pack(floats(4, 3, 1, 1)), nn.BatchNorm2d(2), 4)


def test_a_large_mean_does_not_hurt_the_variance():
    norm = nn.BatchNorm2d(1, momentum=1.0)
    x = floats(20, 1, 8, 8) + 1000
    normalise(pack(x), norm, 20)
    assert_near(norm.running_var, x.double().var().view(1), 1e-4)


@settings(max_examples=20)
@given(
    st.integers(1, 20),
    st.sampled_from([nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d((2, 3)), nn.AdaptiveMaxPool2d(2)]),
)
def test_pools_by_torch(count, pool):
    x = floats(count, 3, 7, 6)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = unpack(blocked.as_images(pack(a), pool), count, 4), pool(b)
    assert_near(found, expected, 1e-6)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_near(a.grad, b.grad)


def test_flatten_keeps_torchs_order():
    x = floats(5, 3, 2, 4)
    assert torch.equal(unpack(flatten(pack(x)), 5, 2), x.flatten(1))


@pytest.mark.parametrize("module", [nn.Dropout(0.3), nn.Dropout2d(0.4)])
def test_dropout_draws_the_same_numbers(module):
    x = floats(LANES + 2, 4, 3, 3)
    torch.manual_seed(5)
    expected = module(x)
    after = torch.rand(1)
    torch.manual_seed(5)
    found = unpack(dropout(pack(x), module, len(x), 4), len(x), 4)
    assert torch.equal(found, expected)
    assert torch.equal(torch.rand(1), after)


def test_dropout_of_features_draws_the_same_numbers():
    x = floats(LANES + 2, 12)
    torch.manual_seed(5)
    expected = nn.Dropout(0.3)(x)
    torch.manual_seed(5)
    assert torch.equal(unpack(dropout(pack(x), nn.Dropout(0.3), len(x), 2), len(x), 2), expected)


def test_a_window_that_is_too_large_is_an_error():
    assert pooled((5, 6), (2, 3), (2, 2), (0, 1)) == (2, 3)
    with pytest.raises(ValueError, match="does not fit 3×9"):
        pooled((3, 9), (4, 4), (4, 4), (0, 0))


def test_tables_are_made_once():
    layer = layer_of(torch.ones(2, 2, 1, 1, dtype=torch.bool))
    kernel = Kernel(layer)
    made = [kernel.tiling(blocked.forward, 4, width, 1) for width in (4, 4, 5)]
    assert made[0] is made[1]
    assert made[0] is not made[2]
    assert copy.deepcopy(kernel) is kernel


def test_tables_of_many_sizes_are_not_all_kept():
    kernel = Kernel(layer_of(torch.ones(2, 2, 1, 1, dtype=torch.bool)))
    made = [kernel.tiling(blocked.forward, 4, width, 1) for width in range(1, blocked.TILINGS_KNOWN + 10)]
    assert len(kernel._tilings) == blocked.TILINGS_KNOWN
    assert kernel.tiling(blocked.forward, 4, blocked.TILINGS_KNOWN + 9, 1) is made[-1]
