import copy

import pytest
import torch

import driveprune as dp
from tests.methods import literal
from tests.nets import batch, convnet, images, mlp


@pytest.mark.parametrize(("build", "draw"), [(mlp, batch), (convnet, images)])
@pytest.mark.parametrize("seed", range(5))
def test_masks_are_bit_equal_to_the_papers_equations_in_float64(build, draw, seed):
    net, data = build(seed, torch.float64), [draw(dtype=torch.float64)]
    expected = literal.iterate(copy.deepcopy(net), data, 0.9, 1, literal.snip_metric)[-1]
    kept = dp.prune(net, data, method="snip", sparsity=0.9)
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


@pytest.mark.parametrize("seed", range(5))
def test_masks_in_float32_are_within_099(seed):
    exact = literal.iterate(convnet(seed, torch.float64), [images(dtype=torch.float64)], 0.9, 1, literal.snip_metric)
    kept = dp.prune(convnet(seed), [images()], method="snip", sparsity=0.9)
    assert literal.overlap(kept, exact[-1]) >= 0.99


def test_by_hand():
    """One weight a class, L = (w·x - y)²: g = 2x(w·x - y)."""
    net = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
    x = torch.tensor([[1.0, 1.0, 4.0]])
    # output 1 - 2 + 2 = 1, target 0: g = 2·1·x = (2, 2, 8); |w·g| = (2, 4, 4): the tie goes to the earlier weight.
    kept = dp.prune(net, [x], method="snip", sparsity=2 / 3, loss=lambda m, b: m(b).square().sum())
    assert kept["weight"].tolist() == [[False, True, False]]
