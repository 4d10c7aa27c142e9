"""A layer with the normalisation that follows it, as weights and a bias: for inference."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from driveprune.sparse.blocked import check_kind
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.memory import Floats
from driveprune.sparse.tiling import Ints
from driveprune.sparse.version import Version

Source = tuple[Mapping[str, Tensor | None], str]
"""A module's tensors, and the name of one."""


def found(sources: list[Source]) -> list[Tensor]:
    """The tensors that are there now."""
    return [tensor for tensors, name in sources if (tensor := tensors.get(name)) is not None]


class Folded:
    """A layer and a normalisation in evaluation mode, of which either may be missing."""

    def __init__(self, layer: nn.Module | None, norm: nn.Module | None, channels: int = 0) -> None:
        assert layer is None or isinstance(layer, SparseLayer)
        assert norm is None or isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        self.layer, self.norm = layer, norm
        self._channels = channels if layer is None else layer.kernel.layer.outputs
        self._known: tuple[Version, tuple[Tensor, Tensor]] | None = None

    @cached_property
    def sources(self) -> list[Source]:
        """Where the tensors are that the result depends on."""
        modules = [each for each in (self.layer, self.norm) if each is not None]
        places = [place for each in modules for place in (each._parameters, each._buffers)]
        return [(place, name) for place in places for name in place if name != "num_batches_tracked"]

    @torch.no_grad()
    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """What the normalisation does to each channel."""
        norm = self.norm
        if norm is None:
            ones = torch.ones(self._channels, dtype=torch.float32)
            return ones, torch.zeros_like(ones)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight
        shift = -norm.running_mean * scale
        return scale, shift if norm.bias is None else shift + norm.bias

    @torch.no_grad()
    def weights(self) -> tuple[Tensor, Tensor]:
        """The values and the bias of the layer with the normalisation in them."""
        tensors = found(self.sources)
        if self._known is None or not self._known[0].is_of(tensors):
            assert self.layer is not None
            version = Version(tensors)
            check_kind(self.layer.weight)
            scale, shift = self.scale_and_shift()
            outputs = torch.from_numpy(self.layer.kernel.layer.places[:, 0])
            bias = shift if self.layer.bias is None else self.layer.bias * scale + shift
            self._known = version, (self.layer.weight * scale[outputs], bias.contiguous())
        return self._known[1]

    def fill(self, weights: Floats, slots: Ints, bias: Floats) -> None:
        """Write the values into the slots of an array, and the bias; without a layer, shift and then scale."""
        if self.layer is None:
            scale, shift = self.scale_and_shift()
            bias[:] = np.concatenate([shift.numpy(), scale.numpy()])
        else:
            values, given = self.weights()
            weights[slots], bias[:] = values.numpy(), given.numpy()


class Weights:
    """The folded weights of a region in two arrays, kept up to date."""

    def __init__(self, folds: list[tuple[Folded, Ints, slice]], values: int, bias: int) -> None:
        self._folds = folds
        """Each with the slots of its values, and its part of the biases."""
        self._sources = [source for folded, _, _ in folds for source in folded.sources]
        self.values: Floats = torch.zeros(values, dtype=torch.float32).numpy()
        self.bias: Floats = torch.zeros(bias, dtype=torch.float32).numpy()
        self._version: Version | None = None

    def refresh(self) -> None:
        """Take over what has changed."""
        tensors = found(self._sources)
        if self._version is None or not self._version.is_of(tensors):
            version = Version(tensors)
            for folded, slots, bias in self._folds:
                folded.fill(self.values, slots, self.bias[bias])
            self._version = version
