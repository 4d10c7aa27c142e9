"""The state dict of torch.nn.utils.prune: instead of a masked `weight` its values `weight_orig` and `weight_mask`.

It loads into a model to which `torch.nn.utils.prune.custom_from_mask` (or any other of its functions) was applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from driveprune.export._state import masked_state
from driveprune.files import write_atomically


def write(path: Path, model: nn.Module, mask: Mapping[str, Tensor], example: Any = None) -> None:
    """Write a safetensors file with `NAME_orig` and `NAME_mask` instead of each masked NAME."""
    found: dict[str, Tensor] = {}
    for name, value in masked_state(model, mask).items():
        if name in mask:
            found[f"{name}_orig"] = value
            found[f"{name}_mask"] = mask[name].cpu().to(value.dtype)
        else:
            found[name] = value
    plain = {name: value.clone(memory_format=torch.contiguous_format) for name, value in found.items()}
    write_atomically(path, save(plain, metadata={"format": "pt"}))
