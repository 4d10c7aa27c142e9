"""A network with its removed weights at zero: a copy, or its state."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from driveprune.mask import apply, unwrap


def masked_copy(model: nn.Module, mask: Mapping[str, Tensor]) -> nn.Module:
    """A copy on the CPU, in evaluation mode, with removed weights at zero."""
    plain = copy.deepcopy(unwrap(model)).cpu().eval()
    apply(plain, {name: kept.cpu() for name, kept in mask.items()})
    return plain


def masked_state(model: nn.Module, mask: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, on the CPU; the model itself is not changed."""
    found = {}
    state = unwrap(model).state_dict(keep_vars=True)
    kept_by_tensor = {id(state[name]): kept.cpu() for name, kept in mask.items()}  # a tied weight has several names
    for name, value in state.items():
        kept, plain = kept_by_tensor.get(id(value)), value.detach().cpu()
        found[name] = plain if kept is None else plain.where(kept, 0)
    return found
