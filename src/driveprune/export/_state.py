"""The state of a network with its removed weights at zero."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from driveprune.mask import unwrap


def masked_state(model: nn.Module, mask: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, on the CPU; the model itself is not changed."""
    found = {}
    for name, value in unwrap(model).state_dict().items():
        plain = value.detach().cpu()
        found[name] = plain.where(mask[name].cpu(), 0) if name in mask else plain
    return found
