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


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to a share of the largest number."""
    assert found.shape == expected.shape
    scale = max(float(expected.detach().double().abs().max()), 1e-30) if expected.numel() else 1.0
    worst = (found.detach().double() - expected.detach().double()).abs().max() if expected.numel() else 0.0
    assert float(worst) <= tolerance * scale, f"{float(worst)} of {scale}"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same_gradients(sparse: nn.Module, dense: nn.Module, mask, tolerance: float = 1e-4) -> None:
    """Gradients of the kept values, and of all else, are those of the dense network."""
    found, expected = gradients(sparse), gradients(dense)
    assert found.keys() == expected.keys()
    for name, slope in expected.items():
        wanted = slope if slope.shape == found[name].shape else slope[mask[name]]
        if name in mask and slope.shape == found[name].shape:
            wanted = slope * mask[name] if slope.dim() == mask[name].dim() == found[name].dim() else slope
        assert_near(found[name], wanted, tolerance)


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
