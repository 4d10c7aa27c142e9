"""The network's file: the kept values, where they are, everything else as it is, and where it came from.

A safetensors file; docs/file-format.md describes every byte. For each masked parameter NAME it holds `NAME:kept` (the
kept values in the order of their logical indices), `NAME:high` and `NAME:low` (their places, see gaps.py); all other
parameters and buffers stand under their own names. The metadata hold the format, the layers, tied names and the
provenance as JSON, and a checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from driveprune.collectives import is_sharded
from driveprune.files import TensorFile, open_tensors, write_tensors
from driveprune.gaps import Gaps, decode, encode, entropy_bits
from driveprune.mask import Mask, check_fits, check_ordinary, owners

FORMAT = "driveprune-2"
_KEPT, _HIGH, _LOW = ":kept", ":high", ":low"


@dataclass(frozen=True)
class Saved:
    """What a file came to."""

    bytes: int
    dense_bytes: int
    """All weights and buffers, dense, without a file's head."""
    bound_bytes: int
    """The entropy of the masks (by the density of each tensor), the kept values and everything else."""
    error: float
    """How far the stored values are from the true ones, root mean square, relative; 0 unless rounded to fp16."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    mask: Mapping[str, Tensor],
    *,
    values: Literal["exact", "fp16"] = "exact",
    provenance: Mapping[str, Any] | None = None,
) -> Saved:
    """Write a pruned network to a small file: kept values, mask, buffers and provenance. No pickle.

    Args:
        path: the file, by custom with the ending .safetensors.
        model: the network; its removed weights must be zero, as `prune`, `hold` and `apply` leave them.
        mask: name -> True where the weight is kept.
        values: "exact" keeps every bit; "fp16" rounds the kept values to half precision, and the error is returned
            and written into the provenance.
        provenance: where the network comes from; by default what the mask remembers of its making.

    """
    if values not in {"exact", "fp16"}:
        raise ValueError(f"values must be 'exact' or 'fp16', got {values!r}")
    if any(map(is_sharded, mask.values())):
        raise ValueError("the mask is sharded over ranks: a file needs the whole model and the whole mask")
    _check_zeros(model, mask)
    tensors: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    tied: dict[str, str] = {}
    first: dict[Tensor, str] = {}
    rounding = _Rounding()
    for name, tensor in _state(model).items():
        if (other := first.setdefault(tensor, name)) != name:
            tied[name] = other
        elif name in mask:
            kept = mask[name].cpu()
            found = tensor.detach().cpu()[kept]
            places = encode(kept.reshape(-1).numpy())
            tensors[name + _KEPT] = rounding.half(name, found) if values == "fp16" else found
            tensors[name + _HIGH] = torch.from_numpy(places.high)
            tensors[name + _LOW] = torch.from_numpy(places.low)
            layers[name] = _facts(tensor, places)
        else:
            tensors[name] = tensor.detach()
    about = dict(provenance if provenance is not None else getattr(mask, "provenance", {}))
    if values == "fp16":
        about["values"] = {"stored_as": "fp16", "relative_error": rounding.error}
    facts = {"layers": layers, "tied": tied, "provenance": about}
    metadata = {name: json.dumps(fact, default=repr) for name, fact in facts.items()}
    write_tensors(path, tensors, {"format": FORMAT, **metadata})
    return Saved(os.stat(path).st_size, _dense_bytes(first), _bound(tensors, layers), rounding.error)


def _facts(tensor: Tensor, places: Gaps) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "listed": places.listed,
        "inverted": places.inverted, "k": places.k,
    }  # fmt: skip


class _Rounding:
    """Rounds to half precision, and adds up how much is lost."""

    def __init__(self) -> None:
        self._lost = self._all = 0.0

    def half(self, name: str, values: Tensor) -> Tensor:
        rounded = values.half()
        if bool((rounded.isinf() & values.isfinite()).any()):
            largest = float(values[values.isfinite()].abs().max())
            raise ValueError(f"{name} holds {largest:g}, too large for fp16: save it with values='exact'")
        finite = values.isfinite()
        self._lost += float((rounded - values)[finite].double().square().sum())
        self._all += float(values[finite].double().square().sum())
        return rounded

    @property
    def error(self) -> float:
        return float((self._lost / self._all) ** 0.5) if self._all else 0.0


def _dense_bytes(state: Mapping[Tensor, str]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state)


def _bound(tensors: Mapping[str, Tensor], layers: Mapping[str, Mapping[str, Any]]) -> int:
    streams = {name + end for name in layers for end in (_HIGH, _LOW)}
    plain = sum(t.numel() * t.element_size() for name, t in tensors.items() if name not in streams)
    return plain + round(sum(entropy_bits(f["listed"], prod(f["shape"])) for f in layers.values()) / 8)


def load(path: str | os.PathLike[str], model: nn.Module) -> Mask:
    """Read a network's file into a freshly built model of the same kind; its mask is returned.

    The model is changed only if the whole file fits. The provenance is in the mask's `provenance`. Beside the model
    and its mask no more than one tensor of the file is in memory at a time.
    """
    state = _state(model)
    with open_tensors(path) as file:
        found = _content(path, file)
        _check_names(path, found.kinds, state)
        for name, tensor in state.items():
            if found.kinds[name] != (tensor.dtype, tuple(tensor.shape)):
                raise ValueError(
                    f"{os.fspath(path)} does not fit the model: {name} is {_kind(*found.kinds[name])} in the file "
                    f"and {_kind(tensor.dtype, tensor.shape)} in the model"
                )
        _check_ties(path, found, state)
        _check_writable(state)
        mask = Mask(provenance=found.provenance)
        copies = {name: [n for n, other in found.tied.items() if other == name] for name in found.own_names()}
        for name, others in copies.items():
            value, kept = found.dense(name)
            with torch.no_grad():
                for each in (name, *others):
                    state[each].copy_(value)
            if kept is not None:
                mask[name] = kept.to(state[name].device)
    return mask


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Mask]:
    """All tensors of a network's file, dense, by name, and its mask; no model is needed."""
    with open_tensors(path) as file:
        found = _content(path, file)
        weights, mask = {}, Mask(provenance=found.provenance)
        for name in found.own_names():
            weights[name], kept = found.dense(name)
            if kept is not None:
                mask[name] = kept
    return weights | {name: weights[other] for name, other in found.tied.items()}, mask


def provenance(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Where the network of a file comes from."""
    with open_tensors(path) as file:
        return _content(path, file).provenance


@dataclass(frozen=True)
class _Content:
    """What a file says that it holds, found to be consistent."""

    file: TensorFile
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    layers: dict[str, dict[str, Any]]
    tied: dict[str, str]
    provenance: dict[str, Any]

    def own_names(self) -> list[str]:
        """All tensors but those that are another one under a second name; layers in the order of the mask."""
        return [*self.layers, *(name for name in self.kinds if name not in self.layers and name not in self.tied)]

    def gaps(self, name: str) -> Gaps:
        """Where the kept weights of a layer are."""
        facts = self.layers[name]
        high, low = (self.file.tensor(name + end).numpy() for end in (_HIGH, _LOW))
        return Gaps(prod(facts["shape"]), facts["listed"], facts["inverted"], facts["k"], high, low)

    def dense(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A tensor as the model has it, and its mask if it has one."""
        if name not in self.layers:
            return self.file.tensor(name), None
        dtype, shape = self.kinds[name]
        gaps = self.gaps(name)
        kept = np.full(gaps.size, gaps.inverted)
        for places in decode(gaps):
            kept[places] = not gaps.inverted
        mask = torch.from_numpy(kept).view(shape)
        values = self.file.tensor(name + _KEPT).to(dtype)
        return torch.zeros(shape, dtype=dtype).masked_scatter_(mask, values), mask


def _content(path: str | os.PathLike[str], file: TensorFile) -> _Content:
    """The content of a file, each number checked against the others; an error if one does not fit."""
    if file.metadata.get("format") != FORMAT:
        raise ValueError(
            f"{os.fspath(path)} is not a network of this version: its format is {file.metadata.get('format')!r}, "
            f"not {FORMAT!r}"
        )
    try:
        layers, tied, about = (json.loads(file.metadata[name]) for name in ("layers", "tied", "provenance"))
        found = _Content(file, {}, layers, tied, about)
        streams = {name + end for name in layers for end in (_KEPT, _HIGH, _LOW)}
        for name in file.names:
            if name not in streams:
                tensor = file.tensor(name)
                found.kinds[name] = (tensor.dtype, tuple(tensor.shape))
        for name, facts in layers.items():
            found.kinds[name] = (getattr(torch, facts["dtype"]), tuple(facts["shape"]))
            _check_layer(found, name)
        for name, other in tied.items():
            if name in found.kinds or other in tied:
                raise ValueError(f"{name} is stored, and tied to {other} as well")
            found.kinds[name] = found.kinds[other]
        if not isinstance(about, dict):
            raise TypeError("the provenance is no list of names and values")
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {error}") from None
    return found


def _check_layer(found: _Content, name: str) -> None:
    """An error if the places and the values of a layer do not agree, before anything is made of them."""
    facts = found.layers[name]
    whole = [*facts["shape"], facts["listed"], facts["k"]]
    if type(facts["inverted"]) is not bool or any(type(number) is not int for number in whole):
        raise TypeError(f"the numbers of {name} are no whole numbers")
    gaps, values = found.gaps(name), found.file.tensor(name + _KEPT)
    if not isinstance(found.kinds[name][0], torch.dtype) or not all(side >= 0 for side in found.kinds[name][1]):
        raise ValueError(f"{name} has no shape or kind")
    if values.dtype not in {found.kinds[name][0], torch.float16}:
        raise TypeError(f"the values of {name} are {values.dtype}")
    if values.shape != (gaps.size - gaps.listed if gaps.inverted else gaps.listed,):
        raise ValueError(f"values and mask of {name} do not agree")
    if gaps.inverted and gaps.listed > gaps.size // 2:
        raise ValueError(f"the mask of {name} makes no sense")
    for _ in decode(gaps):
        pass


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the unwrapped model, tied ones under each name."""
    check_ordinary(model)
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


def _check_names(path: str | os.PathLike[str], weights: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    for where, names in (("file", weights.keys() - state.keys()), ("model", state.keys() - weights.keys())):
        if names:
            raise ValueError(
                f"{os.fspath(path)} does not fit the model: only the {where} has {', '.join(sorted(names)[:3])}"
            )


def _check_ties(path: str | os.PathLike[str], found: _Content, state: Mapping[str, Tensor]) -> None:
    """What is one tensor in the model must be one in the file, or the same values twice."""
    first: dict[Tensor, str] = {}
    for name, tensor in state.items():
        other = first.setdefault(tensor, name)
        ours, theirs = found.tied.get(name, name), found.tied.get(other, other)
        if ours != theirs and not torch.equal(found.dense(ours)[0], found.dense(theirs)[0]):
            raise ValueError(
                f"{os.fspath(path)} does not fit the model: {name} and {other} are tied in the model, not in the file"
            )


def _check_writable(state: Mapping[str, Tensor]) -> None:
    """An error, before anything is changed, if a tensor cannot be written to."""
    for name, tensor in state.items():
        if any(stride == 0 and side > 1 for stride, side in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{name} cannot be written to: it is an expanded tensor, many places of one value")


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
