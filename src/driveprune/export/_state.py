"""The state of a network with its removed weights at zero."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from driveprune.mask import unwrap


def masked_state(model: nn.Module, mask: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, on the CPU; the model itself is not changed."""
    found = {}
    state = unwrap(model).state_dict(keep_vars=True)
    kept_by_tensor = {id(state[name]): kept.cpu() for name, kept in mask.items()}  # a tied weight has several names
    for name, value in state.items():
        kept, plain = kept_by_tensor.get(id(value)), value.detach().cpu()
        found[name] = plain if kept is None else plain.where(kept, 0)
    return found
