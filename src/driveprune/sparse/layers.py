"""Layers whose parameters are the kept weights alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driveprune.sparse.blocked import Kernel, convolve, pack, unpack
from driveprune.sparse.tiling import Layer
from driveprune.sparse.version import Version


class SparseLayer(nn.Module):
    """A convolution or a linear layer with few weights.

    `weight` holds the kept values, in the order of their places in the full tensor. Called like the layer that it
    replaces; a network made by `sparsify` uses it in the layout of its kernels.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, kept: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
        super().__init__()
        self.shape, self.geometry = tuple(kept.shape), geometry
        self.weight = nn.Parameter(weight.detach()[kept].clone(), requires_grad=weight.requires_grad)
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self._kept: tuple[Version, Tensor] | None = None
        self.dense = False
        """Whether the layer is computed with zeros filled in, because that is faster."""
        self.channels_last = False
        """Whether it is then computed in that memory format, in which torch convolves faster."""
        full = kept.view(*kept.shape, *[1] * (4 - kept.dim()))
        self.kernel = Kernel(
            Layer(full.shape[0], full.shape[1], (full.shape[2], full.shape[3]), *geometry, full.nonzero().numpy())
        )

    @property
    def dims(self) -> int:
        """Dimensions of its input: 4 for a convolution, 2 for a linear layer."""
        return len(self.shape)

    def places(self) -> Tensor:
        """Where the kept values are in the flattened full tensor."""
        o, c, y, x = torch.from_numpy(self.kernel.layer.places).unbind(1)
        height, width = self.kernel.layer.kernel
        return ((o * self.kernel.layer.inputs + c) * height + y) * width + x

    def full(self, values: Tensor) -> Tensor:
        """Values of the kept weights as a full tensor, zero elsewhere."""
        zeros = torch.zeros(math.prod(self.shape), dtype=values.dtype, device=values.device)
        return zeros.index_copy(0, self.places(), values).view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        """What the layer with zeros in it would compute."""
        if self.dense or not x.numel():
            return self.forward_dense(x)
        if x.dim() == self.dims == 4 or self.dims == 2:
            rows = x.reshape(-1, x.shape[-1]) if self.dims == 2 else x
            out = unpack(convolve(pack(rows), self.weight, self.bias, self.kernel), len(rows), self.dims)
            return out.view(*x.shape[:-1], out.shape[-1]).to(x.dtype) if self.dims == 2 else out.to(x.dtype)
        return self.forward(x[None])[0]  # one image without a batch

    def forward_dense(self, x: Tensor, values: Tensor | None = None) -> Tensor:
        """The same by torch's own operation, with other values than the layer's own if they are given."""
        weight = self._filled() if values is None else self.full(values)
        if self.dims == 2:
            return F.linear(x, weight, self.bias)
        return F.conv2d(x, weight, self.bias, *self.geometry)

    def _filled(self) -> Tensor:
        """The full weight; for inference it is kept until the values change."""
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return self._formatted(self.full(self.weight))
        if self._kept is None or not self._kept[0].is_of([self.weight]):
            self._kept = Version([self.weight]), self._formatted(self.full(self.weight.detach()))
        return self._kept[1]

    def _formatted(self, weight: Tensor) -> Tensor:
        last = self.channels_last and weight.dim() == 4
        return weight.contiguous(memory_format=torch.channels_last) if last else weight

    def extra_repr(self) -> str:
        """For printing the network."""
        sparsity = 1 - self.weight.numel() / max(1, math.prod(self.shape))
        shape = "×".join(map(str, self.shape))
        return f"{shape}, {self.weight.numel():,} kept, sparsity={sparsity:.4f}, dense={self.dense}"


Geometry = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Stride, padding and dilation."""

_POINT: Geometry = ((1, 1), (0, 0), (1, 1))


def sparse_layer(module: nn.Module, kept: Tensor) -> SparseLayer | None:
    """A layer with the kept weights of a module alone, or None if the module is no layer that the kernels know."""
    if type(module) is nn.Linear:
        return SparseLayer(kept, module.weight, module.bias, _POINT)
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
        padding = _padding(module)
        if padding is not None:
            stride: Any = module.stride
            dilation: Any = module.dilation
            return SparseLayer(kept, module.weight, module.bias, (stride, padding, dilation))
    return None


def _padding(module: nn.Conv2d) -> tuple[int, int] | None:
    """The padding in numbers, if it is the same on both sides."""
    if module.padding == "valid":
        return 0, 0
    if module.padding == "same":
        total = [gap * (kernel - 1) for gap, kernel in zip(module.dilation, module.kernel_size, strict=True)]
        return (total[0] // 2, total[1] // 2) if total[0] % 2 == total[1] % 2 == 0 else None
    padding: Any = module.padding
    return padding[0], padding[1]
