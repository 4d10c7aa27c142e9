"""What the sparse engine must agree with: masked dense layers and networks, in float64; and networks to try it on."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import driveprune as dp
from driveprune.sparse.tiling import Layer


def layer_of(kept: Tensor, stride=(1, 1), padding=(0, 0), dilation=(1, 1)) -> Layer:
    """A mask of four dimensions as a layer."""
    outputs, inputs, *kernel = kept.shape
    return Layer(outputs, inputs, tuple(kernel), stride, padding, dilation, kept.nonzero().numpy())


def convolved(x: Tensor, kept: Tensor, values: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
    """A convolution with zeros filled in, in float64."""
    weight = torch.zeros(kept.shape, dtype=torch.float64)
    weight = weight.masked_scatter(kept, values.double())
    return F.conv2d(
        x.double(), weight, None if bias is None else bias.double(), layer.stride, layer.padding, layer.dilation
    )


def random_mask(model: nn.Module, sparsity: float, seed: int = 0) -> dict[str, Tensor]:
    """A mask of all prunable weights with about so many removed."""
    generator = torch.Generator().manual_seed(seed)
    names = dp.prunable(model)
    return {
        name: torch.rand(weight.shape, generator=generator) >= sparsity
        for name, weight in model.named_parameters()
        if name in names
    }


def masked(model: nn.Module, mask) -> nn.Module:
    """A copy with zeros at removed places."""
    net = copy.deepcopy(model)
    dp.apply(net, mask)
    return net


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-5, scale: float = 1e-30) -> None:
    """Equal up to a share of the largest number, or of a scale that is larger."""
    assert found.shape == expected.shape
    if expected.numel():
        scale = max(float(expected.detach().abs().max()), scale)
        worst = float((found.detach().double() - expected.detach().double()).abs().max())
        assert worst <= tolerance * scale, f"{worst} of {scale}"


def assert_same_gradients(sparse: nn.Module, dense: nn.Module, mask, tolerance: float = 1e-4) -> None:
    """Gradients of the kept values, and of all else, are those of the dense network.

    A gradient that is zero but for rounding (a bias before a normalisation) is measured by the others.
    """
    found = {name: weight.grad for name, weight in sparse.named_parameters() if weight.grad is not None}
    expected = {name: weight.grad for name, weight in dense.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys()
    largest = max(float(slope.abs().max()) for slope in expected.values())
    for name, slope in expected.items():
        full = slope * mask[name] if name in mask else slope
        wanted = full if found[name].shape == slope.shape else full[mask[name]]
        assert_near(found[name], wanted, tolerance, 0.01 * largest)


class Softly(nn.Module):
    """tanh instead of ReLU: no gradient jumps where rounding moves a value over zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Residual(nn.Module):
    """A residual block whose two branches are layers, a stride and a concatenation."""

    def __init__(self, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.left_norm = nn.BatchNorm2d(12)
        self.right = nn.Conv2d(8, 12, 1, stride=2, bias=False)
        self.act = act()
        self.side = nn.Conv2d(12, 4, 5, padding=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = self.act(self.left_norm(self.left(x)) + self.right(x))
        x = torch.cat([x, self.act(self.side(x))], 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def spoken(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random statistics, scales and biases, so that nothing is hidden by zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.dim() == 1:
                values = torch.randn(tensor.shape, generator=generator) * 0.3
                tensor.data.copy_(values.abs() + 0.5 if leaf in {"running_var", "weight"} else values)
    return model


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def halves(count: int, seed: int = 0):
    return np.random.default_rng(seed).integers(-4, 5, count).astype(np.float32) / 2


WIDTHS = (4, 8, 16)
"""Vectors that machines may have."""


def aligned(array):
    """A copy at an address that is a multiple of any vector's size."""
    return torch.from_numpy(array).clone().numpy()
