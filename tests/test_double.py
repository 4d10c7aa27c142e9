import pytest
import torch
import torch.nn.functional as F

from driveprune.double import Double

x = torch.rand(4, 3, dtype=torch.float64) / 3


@pytest.mark.parametrize(
    "function",
    [
        x.float,
        x.half,
        lambda: x.to(torch.bfloat16),
        lambda: x.to("cpu", dtype=torch.float32),
        lambda: x.type(torch.float32),
        lambda: F.softmax(x.log(), -1, dtype=torch.float32) * x.sum(-1, keepdim=True),
        lambda: x + torch.zeros(3),
        lambda: F.linear(torch.ones(4, 3), torch.diag(x[0])) / x[0] * x,
    ],
)
def test_nothing_is_rounded(function):
    with Double():
        found = function()
    assert found.dtype == torch.float64
    assert torch.allclose(found, x, rtol=1e-15, atol=0)


def test_what_is_no_float_stays_as_it_is():
    with Double():
        assert (x > 0.1).dtype == torch.bool
        assert x.to(torch.int32).dtype == torch.int32
        assert x.view(torch.int64).dtype == torch.int64
        assert torch.ones(2).dtype == torch.float64
    assert torch.ones(2).dtype == torch.float32


def test_products_in_groups_are_those_of_each_group():
    rows, matrices = torch.randn(7, 16), torch.randn(3, 16, 8)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    bias = torch.randn(8)
    with Double():
        found = F.grouped_mm(rows.double(), matrices.double(), offs=ends)
        batched = F.grouped_mm(rows.double().expand(3, 7, 16), matrices.double()) + bias
    assert torch.allclose(found[:2], rows[:2].double() @ matrices[0].double())
    assert torch.allclose(found[2:6], rows[2:6].double() @ matrices[2].double())
    assert torch.allclose(found[:6].float(), F.grouped_mm(rows, matrices, offs=ends)[:6], atol=1e-5)
    assert torch.allclose(batched, rows.double() @ matrices.double() + bias.double())
