"""A plain dense state dict: what any loader of safetensors takes, zeros and all."""

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
    """Write all parameters and buffers under their own names; tied ones under each name."""
    state = masked_state(model, mask)
    plain = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    write_atomically(path, save(plain, metadata={"format": "pt"}))
