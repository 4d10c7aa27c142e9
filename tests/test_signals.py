import operator

import pytest
import torch
import torch.nn.functional as F

from driveprune.signals import gets_offset, is_offset, is_signal, mark


def signal(offset=False):
    return mark(torch.rand(2, 3), offset)


def test_marks():
    assert is_signal(signal())
    assert not is_signal(torch.rand(2))
    assert is_offset(signal(True))
    assert not is_offset(signal())


FUNCTIONS = {
    "relu": F.relu, "sigmoid": F.sigmoid, "exp": torch.exp, "sin": torch.sin, "cos": torch.cos, "neg": torch.neg,
    "softmax": lambda x: F.softmax(x, -1), "mean": lambda x: x.mean(-1, keepdim=True), "silu": F.silu,
    "pow": lambda x, n: x.pow(n), "mul": operator.mul, "add": operator.add, "sub": operator.sub,
    "div": operator.truediv, "cat": torch.cat, "maximum": torch.maximum,
    "masked_fill": lambda x, where, value: x.masked_fill(where, value), "linear": F.linear,
    "where": torch.where, "transpose": lambda x: x.t(), "clamp": lambda x, low: x.clamp(low),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *[(name, ()) for name in ("relu", "sigmoid", "exp", "sin", "cos", "neg", "softmax", "mean", "silu")],
        ("transpose", ()), ("pow", (2,)), ("pow", (0.5,)), ("pow", (0,)), ("pow", (-1,)), ("mul", (3.0,)),
        ("mul", (torch.ones(3),)), ("add", (0,)), ("add", (1.0,)), ("sub", (torch.ones(3),)),
        ("sub", (torch.zeros(3),)), ("div", (torch.full((3,), 2.0),)), ("maximum", (torch.ones(3),)),
        ("maximum", (-torch.ones(3),)), ("masked_fill", (torch.tensor([True, False, False]), 0.0)),
        ("masked_fill", (torch.tensor([True, False, False]), 1.0)), ("linear", (torch.rand(4, 3),)),
        ("linear", (torch.rand(4, 3), torch.rand(4))), ("clamp", (0.5,)),
    ],
)  # fmt: skip
def test_what_makes_something_of_zeros_gets_an_offset(name, others):
    """Where the function of zeros is not zero, it is offset; it may be called so where it is not."""
    something = bool(FUNCTIONS[name](torch.zeros(2, 3), *others).count_nonzero())
    found = gets_offset(name, (signal(), *others), {})
    assert found or not something
    assert gets_offset(name, (signal(True), *others), {})
    if name not in ("maximum", "add", "clamp"):
        assert found is something


def test_sums_joins_and_products_of_signals():
    plain, offset = signal(), signal(True)
    assert not gets_offset("add", (plain, plain), {})
    assert gets_offset("add", (plain, offset), {})
    assert not gets_offset("mul", (plain, offset), {})
    assert gets_offset("mul", (offset, offset), {})
    assert not gets_offset("div", (plain, offset), {})
    assert gets_offset("div", (offset, plain), {})
    assert gets_offset("rtruediv", (plain, 1.0), {})
    assert not gets_offset("cat", ([plain, plain], 1), {})
    assert gets_offset("cat", ([plain, torch.ones(2, 3)],), {"dim": 0})
    assert not gets_offset("where", (torch.tensor(True), plain, 0.0), {})
    assert gets_offset("where", (torch.tensor(True), plain, 2.0), {})


def test_zeros_that_training_changes_are_something():
    written, learned = torch.zeros(2, 3), torch.zeros(2, 3, requires_grad=True)
    assert not gets_offset("add", (signal(), written), {})
    assert gets_offset("add", (signal(), learned), {})
    assert not gets_offset("index_add", (written, 0, torch.tensor([0, 1]), signal()), {})
    assert gets_offset("index_add", (learned, 0, torch.tensor([0, 1]), signal()), {})


def test_attention_is_offset_as_its_values_are():
    plain, offset = signal(), signal(True)
    assert not gets_offset("scaled_dot_product_attention", (offset, offset, plain), {})
    assert gets_offset("scaled_dot_product_attention", (plain, plain), {"value": offset})


def test_unknown_functions_get_an_offset():
    assert gets_offset("made_up", (signal(),), {})
