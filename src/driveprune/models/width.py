"""Width multipliers and initial weights, shared by the families."""

from __future__ import annotations

from torch import nn


def scaled(channels: int, width: float) -> int:
    """The number of channels at a width, at least 1.

    >>> scaled(64, 0.25)
    16
    """
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return max(1, round(channels * width))


class KaimingNet(nn.Sequential):
    """A sequence whose convolutions start from Kaiming-normal weights (fan out, ReLU)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear | nn.BatchNorm2d):
                module.reset_parameters()
