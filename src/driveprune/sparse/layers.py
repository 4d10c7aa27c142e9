"""Layers whose parameters are the kept weights alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from driveprune.sparse.blocked import Kernel, convolve, pack, unpack
from driveprune.sparse.decay import known_as_values
from driveprune.sparse.tiling import Layer
from driveprune.sparse.version import VersionOfOne

Way = Literal["sparse", "dense", "channels last"]
"""Who computes: the sparse kernels; or torch, with zeros filled in, in one of two memory formats."""


@dataclass
class Ways:
    """Who computes the layers of a network, in inference and where gradients are wanted; one for all its layers."""

    inference: Way = "sparse"
    training: Way = "sparse"

    def now(self) -> Way:
        """The way of a pass that begins now."""
        return self.training if torch.is_grad_enabled() else self.inference


_SETTLED = frozenset(
    """
    in_channels out_channels in_features out_features kernel_size stride padding dilation groups padding_mode geometry
    shape
    """.split()
)


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
        known_as_values(self.weight)
        self.register_parameter("bias", None)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self._kept: tuple[VersionOfOne, bool, Tensor] | None = None
        self._written: _Written | None = None
        self.dense = False
        """Whether the layer is computed with zeros filled in whatever the network does, because that is faster."""
        self.ways = Ways()
        full = kept.view(*kept.shape, *[1] * (4 - kept.dim()))
        self.kernel = Kernel(
            Layer(full.shape[0], full.shape[1], (full.shape[2], full.shape[3]), *geometry, full.nonzero().numpy())
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTLED and name in self.__dict__:
            raise AttributeError(
                f"{name} of a sparse layer cannot be changed: densify, change it in the network, sparsify again"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file needs: no full weights."""
        return {**self.__dict__, "_kept": None, "_written": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        known_as_values(self.weight)

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
        if self.dense or not x.numel() or self.ways.now() != "sparse":
            return self.forward_dense(x)
        if x.dim() == self.dims == 4 or self.dims == 2:
            rows = x.reshape(-1, x.shape[-1]) if self.dims == 2 else x
            out = unpack(convolve(pack(rows), self.weight, self.bias, self.kernel), len(rows), self.dims)
            return out.view(*x.shape[:-1], out.shape[-1]).to(x.dtype) if self.dims == 2 else out.to(x.dtype)
        return self.forward(x[None])[0]  # one image without a batch

    def forward_dense(self, x: Tensor, values: Tensor | None = None) -> Tensor:
        """The same by torch's own operation, with other values than the layer's own if they are given."""
        weight = self._filled() if values is None else self.full(values)
        bias = self._parameters["bias"]
        if len(self.shape) == 2:
            return F.linear(x, weight, bias)
        return F.conv2d(x, weight, bias, *self.geometry)

    def _filled(self) -> Tensor:
        """The full weight; for inference it is kept until the values change."""
        weight: Any = self._parameters["weight"]  # not as an attribute, which takes longer than a small layer
        last = self.ways.now() == "channels last" and len(self.shape) == 4
        if torch.is_grad_enabled() and weight.requires_grad:
            if torch.compiler.is_compiling():
                return self.full(weight)
            if self._written is None or not self._written.is_for(weight, last):
                self._written = _Written(self, last)
            found: Tensor = _Fill.apply(weight, self._written)  # type: ignore[no-untyped-call]
            return found
        kept = self._kept  # another thread may write to it
        if kept is None or kept[1] != last or not kept[0].is_of(weight):
            self._kept = kept = VersionOfOne(weight), last, _formatted(self.full(weight.detach()), last)
        return kept[2]

    def extra_repr(self) -> str:
        """For printing the network."""
        sparsity = 1 - self.weight.numel() / max(1, math.prod(self.shape))
        shape = "×".join(map(str, self.shape))
        return f"{shape}, {self.weight.numel():,} kept, sparsity={sparsity:.4f}, dense={self.dense}"


def _formatted(weight: Tensor, last: bool) -> Tensor:
    return weight.to(memory_format=torch.channels_last) if last else weight


class _Written:
    """A layer's full weight for training, to be used again and again: only kept places are ever written to."""

    def __init__(self, layer: SparseLayer, last: bool) -> None:
        self.full = _formatted(torch.zeros(layer.shape, dtype=layer.weight.dtype, device=layer.weight.device), last)
        self.places = layer.places()
        self._last = last
        if last:
            order = torch.empty_like(self.full, dtype=torch.int64)
            in_memory(order, last).copy_(torch.arange(order.numel()))
            self.places = order.reshape(-1)[self.places]
        self._values: Tensor | None = None

    def is_for(self, values: Tensor, last: bool) -> bool:
        """Whether it can take these values, in a memory format."""
        return (self._last, self.full.dtype, self.full.device) == (last, values.dtype, values.device)

    def write(self, values: Tensor) -> Tensor:
        """The full weight with these values; not written to if they are there, as autograd may still need it."""
        if self._values is None or not torch.equal(self._values, values):
            in_memory(self.full, self._last).index_copy_(0, self.places, values)
            self._values = values.clone()
        return self.full.detach()

    def kept(self, full: Tensor) -> Tensor:
        """The kept entries of a tensor of the layer's shape."""
        return in_memory(full, self._last).index_select(0, self.places)


def in_memory(full: Tensor, last: bool) -> Tensor:
    """A tensor's entries in the order of its memory, in either format; a view if it is in that format."""
    return full.movedim(1, -1).reshape(-1) if last else full.reshape(-1)


class _Fill(Function):
    """Kept values as a full weight."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, written: _Written) -> Tensor:
        ctx.written = written
        return written.write(values.detach())

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return ctx.written.kept(slope), None


Geometry = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Stride, padding and dilation."""

_POINT: Geometry = ((1, 1), (0, 0), (1, 1))


def sparse_layer(module: nn.Module, kept: Tensor) -> SparseLayer | None:
    """A layer with the kept weights of a module alone, or None if the module is no layer that the kernels know."""
    if type(module) is nn.Linear:
        return _with_attributes(module, SparseLayer(kept, module.weight, module.bias, _POINT))
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
        padding = _padding(module)
        if padding is not None:
            stride: Any = module.stride
            dilation: Any = module.dilation
            geometry: Geometry = stride, padding, dilation
            return _with_attributes(module, SparseLayer(kept, module.weight, module.bias, geometry))
    return None


def _with_attributes(module: nn.Module, layer: SparseLayer) -> SparseLayer:
    """A layer with the numbers that people ask a layer for: channels, features, stride, ..."""
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in vars(layer):
            layer.__dict__[name] = value
    return layer


def _padding(module: nn.Conv2d) -> tuple[int, int] | None:
    """The padding in numbers, if it is the same on both sides."""
    if module.padding == "valid":
        return 0, 0
    if module.padding == "same":
        total = [gap * (kernel - 1) for gap, kernel in zip(module.dilation, module.kernel_size, strict=True)]
        return (total[0] // 2, total[1] // 2) if total[0] % 2 == total[1] % 2 == 0 else None
    padding: Any = module.padding
    return padding[0], padding[1]
