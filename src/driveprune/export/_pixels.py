"""How the pixels of an image become the input of a network: whoever runs it elsewhere must do the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Pixels:
    """A pixel from 0 to 255 becomes (pixel/255 - mean) / deviation; one value of each, or one for each channel.

    >>> Pixels(mean=(0.5,), deviation=(0.25,)).normalised(torch.tensor([[[[255]]]], dtype=torch.uint8))
    tensor([[[[2.]]]])
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    classes: tuple[str, ...] = ()
    """The names of the outputs, in their order."""

    def __post_init__(self) -> None:
        numbers = (*self.mean, *self.deviation)
        if not all(type(value) in {int, float} and isfinite(value) for value in numbers):
            raise ValueError(f"mean and deviation must be finite numbers, got {numbers}")
        if not self.mean or not self.deviation or min(self.deviation) <= 0:
            raise ValueError(f"there must be a mean, and deviations above 0, got {self.mean} and {self.deviation}")
        if not all(isinstance(name, str) for name in self.classes):
            raise ValueError(f"the names of classes must be words, got {self.classes}")

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Pixels:
        """What `to_json` has written, as a network's file has it."""
        lists = (content.get(name, []) for name in ("mean", "deviation", "classes"))
        return cls(*(tuple(value) if isinstance(value, list) else (value,) for value in lists))

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {"mean": list(self.mean), "deviation": list(self.deviation), "classes": list(self.classes)}

    def factors(self) -> tuple[Tensor, Tensor]:
        """What pixels are multiplied by, and what is then subtracted: the very numbers of a training."""
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.deviation))
        return 1 / (255 * deviation), mean / deviation

    def normalised(self, images: Tensor) -> Tensor:
        """Images as a network takes them."""
        scale, shift = self.factors()
        return images.float() * scale - shift


class Normalised(nn.Module):
    """A network that takes images as they are: (N, C, H, W), bytes from 0 to 255."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, pixels: Pixels) -> None:
        super().__init__()
        self.network = network
        scale, shift = pixels.factors()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, image: Tensor) -> Any:
        """What the network gives for images that are normalised here."""
        return self.network(image.float() * self.scale - self.shift)


def described(example: Tensor | None, pixels: Pixels | None, inside: bool) -> dict[str, str]:
    """What whoever runs the network must know, for the metadata of a file; the first line is for people."""
    shape = "" if example is None else f" of shape (N, {', '.join(map(str, example.shape[1:]))})"
    if pixels is None:
        kind = "as the network was trained on" if example is None else f"{str(example.dtype)[6:]}{shape}"
        return {"input": f"{kind}; how it was normalised in training is not known here", "preprocessing": "unknown"}
    said = "bytes from 0 to 255" if inside else "float32, (pixel/255 - mean) / deviation with pixels from 0 to 255"
    return {
        "input": f"images, {said}{shape}",
        "preprocessing": "in the graph" if inside else "not in the graph",
        "layout": "NCHW",
        "mean": json.dumps(pixels.mean),
        "deviation": json.dumps(pixels.deviation),
        **({"classes": json.dumps(pixels.classes, ensure_ascii=False)} if pixels.classes else {}),
    }
