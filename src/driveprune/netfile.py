"""The network's file: the kept values, the mask as bits, everything else as it is, and where it came from.

A safetensors file. For each masked parameter NAME it holds `NAME:kept` (the kept values in the order of their
logical indices) and `NAME:mask` (one bit a weight, the first weight in the highest bit of the first byte); all
other parameters and buffers stand under their own names. The metadata hold the format, the shapes, tied names
and the provenance as JSON, and a checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from driveprune.files import read_tensors, write_tensors
from driveprune.mask import Mask, check_fits, owners, restore

FORMAT = "driveprune-1"
_KEPT, _MASK = ":kept", ":mask"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    mask: Mapping[str, Tensor],
    *,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a pruned network to a small file: kept values, mask, buffers and provenance. No pickle.

    Args:
        path: the file, by custom with the ending .safetensors.
        model: the network; its removed weights must be zero, as `prune`, `hold` and `apply` leave them.
        mask: name -> True where the weight is kept.
        provenance: where the network comes from; by default what the mask remembers of its making.

    """
    _check_zeros(model, mask)
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    tied: dict[str, str] = {}
    first: dict[Tensor, str] = {}
    for name, tensor in _state(model).items():
        if (other := first.setdefault(tensor, name)) != name:
            tied[name] = other
        elif name in mask:
            kept = mask[name].cpu()
            tensors[name + _KEPT] = tensor.detach().cpu()[kept]
            tensors[name + _MASK] = _packed(kept)
            shapes[name] = list(tensor.shape)
        else:
            tensors[name] = tensor.detach()
    about = dict(provenance if provenance is not None else getattr(mask, "provenance", {}))
    write_tensors(
        path,
        tensors,
        {
            "format": FORMAT,
            "shapes": json.dumps(shapes),
            "tied": json.dumps(tied),
            "provenance": json.dumps(about, default=repr),
        },
    )


def load(path: str | os.PathLike[str], model: nn.Module) -> Mask:
    """Read a network's file into a freshly built model of the same kind; its mask is returned.

    The model is changed only if the whole file fits. The provenance is in the mask's `provenance`.
    """
    weights, mask = read(path)
    state = _state(model)
    _check_names(path, weights, state)
    for name, tensor in state.items():
        value = weights[name]
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(
                f"{os.fspath(path)} does not fit the model: {name} is {_kind(value)} in the file "
                f"and {_kind(tensor)} in the model"
            )
    _check_ties(path, weights, state)
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    try:
        restore(state, weights)
    except RuntimeError:  # a buffer that cannot be written to
        restore(state, {name: value for name, value in before.items() if not torch.equal(value, state[name])})
        raise
    return Mask({name: kept.to(state[name].device) for name, kept in mask.items()}, mask.provenance)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Mask]:
    """All tensors of a network's file, dense, by name, and its mask; no model is needed."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{os.fspath(path)} is not a network of this version: its format is {metadata.get('format')!r}, "
            f"not {FORMAT!r}"
        )
    try:
        return _unfolded(tensors, metadata)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {error}") from None


def _unfolded(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> tuple[dict[str, Tensor], Mask]:
    mask = Mask(provenance=json.loads(metadata["provenance"]))
    for name, shape in json.loads(metadata["shapes"]).items():
        kept = _unpacked(tensors.pop(name + _MASK), shape)
        values = tensors.pop(name + _KEPT)
        if values.shape != (int(kept.count_nonzero()),):
            raise ValueError(f"values and mask of {name} do not agree")
        mask[name] = kept
        tensors[name] = torch.zeros(shape, dtype=values.dtype).masked_scatter_(kept, values)
    for name, other in json.loads(metadata["tied"]).items():
        tensors[name] = tensors[other]
    return tensors, mask


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the unwrapped model, tied ones under each name."""
    state = {}
    for prefix, module in owners(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"{prefix or 'the model'} has an extra state, which a network's file cannot hold")
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                raise ValueError(f"{prefix + leaf} has no shape yet (a lazy module): run one forward first")
            if tensor is not None and tensor.is_meta:
                raise ValueError(
                    f"{prefix + leaf} has no values (it is on the meta device): build the model for real"
                )
            if tensor is not None and leaf not in module._non_persistent_buffers_set:
                state[prefix + leaf] = tensor
    return state


def _check_zeros(model: nn.Module, mask: Mapping[str, Tensor]) -> None:
    for name, weight in check_fits(model, mask).items():
        moved = int(weight.detach()[~mask[name].to(weight.device)].count_nonzero())
        if moved:
            raise ValueError(
                f"{moved} removed weights of {name} are not zero: hold(model, optimizer, mask) keeps them there, "
                "apply(model, mask) sets them back"
            )


def _check_names(path: str | os.PathLike[str], weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for where, names in (("file", weights.keys() - state.keys()), ("model", state.keys() - weights.keys())):
        if names:
            raise ValueError(
                f"{os.fspath(path)} does not fit the model: only the {where} has {', '.join(sorted(names)[:3])}"
            )


def _check_ties(path: str | os.PathLike[str], weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    first: dict[Tensor, str] = {}
    for name, tensor in state.items():
        other = first.setdefault(tensor, name)
        if other != name and not torch.equal(weights[name], weights[other]):
            raise ValueError(
                f"{os.fspath(path)} does not fit the model: {name} and {other} are tied in the model, not in the file"
            )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _packed(kept: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(kept.reshape(-1).numpy()))


def _unpacked(packed: Tensor, shape: list[int]) -> Tensor:
    size = prod(shape)
    if len(packed) != (size + 7) // 8:
        raise ValueError(f"{len(packed)} bytes of bits are no mask of shape {shape}")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=size).astype(np.bool_)).view(shape)
