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
from math import isfinite, prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from driveprune.collectives import is_sharded
from driveprune.container import Kind, checked_shape
from driveprune.files import TensorFile, parsed_json, read_file, write_tensors
from driveprune.gaps import Gaps, checked, common, decode, encode, entropy_bits
from driveprune.kinds import OptionError, brief, check_path
from driveprune.mask import Mask, check_fits, check_mask, check_model, check_ordinary, owners

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
    follow: bool = True,
) -> Saved:
    """Write a pruned network to a small file: kept values, mask, buffers and provenance. No pickle.

    Args:
        path: the file, by custom with the ending .safetensors.
        model: the network; its removed weights must be zero, as `prune`, `hold` and `apply` leave them.
        mask: name -> True where the weight is kept.
        values: "exact" keeps every bit; "fp16" rounds the kept values to half precision, and the error is returned
            and written into the provenance.
        provenance: where the network comes from; by default what the mask remembers of its making.
        follow: write to where a link points; without, the file takes the link's place.

    """
    check_model(model, "save(path, model, mask)")
    check_mask(mask, "save(path, model, mask)")
    check_path(path, "save(path, model, mask)")
    if provenance is not None and not isinstance(provenance, Mapping):
        raise OptionError(f"provenance must be names and values, got {brief(provenance)}")
    if not isinstance(values, str) or values not in {"exact", "fp16"}:
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
    metadata = {name: json.dumps(_plain(fact), allow_nan=False) for name, fact in facts.items()}
    write_tensors(path, tensors, {"format": FORMAT, **metadata}, follow=follow)
    return Saved(os.stat(path).st_size, _dense_bytes(first), _bound(tensors, layers), rounding.error)


def _plain(value: Any) -> Any:
    """What JSON knows as it is; everything else, infinity and NaN among it, as Python prints it."""
    if isinstance(value, Mapping):
        return {name if isinstance(name, str) else str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    known = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value))
    return value if known else repr(value)


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
    and its mask no more is in memory than the bytes of the file and one dense tensor.
    """
    check_model(model, "load(path, model)")
    check_path(path, "load(path, model)")
    state = _state(model)
    found = _content(path)
    _check_kinds(found.path, found.kinds, state)
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
        found.forget(name)
    return mask


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Mask]:
    """All tensors of a network's file, dense, by name, and its mask; no model is needed.

    An error if they are beyond what the bytes of the file make likely: see `Outline.check_size`.
    """
    found = _content(path)
    found.outline().check_size()
    weights, mask = {}, Mask(provenance=found.provenance)
    for name in found.own_names():
        weights[name], kept = found.dense(name)
        if kept is not None:
            mask[name] = kept
    return weights | {name: weights[other] for name, other in found.tied.items()}, mask


def provenance(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Where the network of a file comes from."""
    return outline(path).provenance


@dataclass(frozen=True)
class Outline:
    """What a file holds, as numbers: nothing of it was made dense."""

    path: str
    kinds: dict[str, Kind]
    """Of all tensors as the model has them, tied ones under each name."""
    kept: dict[str, int]
    """Of each layer with a mask: how many of its weights are kept."""
    tied: dict[str, str]
    provenance: dict[str, Any]
    bytes: int
    """Of the file."""

    @property
    def dense_bytes(self) -> int:
        """All weights and buffers, dense."""
        return sum(kind.bytes for name, kind in self.kinds.items() if name not in self.tied)

    def check_size(self) -> None:
        """An error if the dense network is so large that the file should not be believed without a model.

        A layer without kept weights takes no bytes, however large it is. What is made after the word of a file alone
        is therefore bounded by the file: 64 MB, and 1024 bytes for each of its bytes, which is a network with one
        weight in 1,400 kept.
        """
        claimed = sum(kind.bytes for kind in self.kinds.values())  # tied ones, too: the model may have them apart
        if claimed > _FREE_BYTES + _BYTES_EACH * self.bytes:
            raise ValueError(
                f"{self.path} says that its network has {claimed:,} bytes, but is a file of {self.bytes:,}: "
                "so much is made only for a model that you name or build yourself"
            )

    def check_model(self, model: nn.Module) -> None:
        """An error if this is not the file of such a model, which may be on the meta device."""
        _check_kinds(self.path, self.kinds, _state(model, values=False))


_FREE_BYTES, _BYTES_EACH = 1 << 26, 1 << 10


def outline(path: str | os.PathLike[str]) -> Outline:
    """What a file holds, in numbers: counted from the lists of kept weights, with no more memory than they take."""
    return _content(path, values=False).outline()


@dataclass(frozen=True)
class Shared:
    """What the masks of two files have in common in a layer."""

    weights: int
    first: int
    second: int
    both: int


def shared(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> dict[str, Shared]:
    """Layer by layer, how many weights each of two files keeps, and how many both; no mask is made."""
    one, other = (_content(path, values=False) for path in (first, second))
    if odd := sorted(one.layers.keys() ^ other.layers.keys()):
        raise ValueError(f"these masks belong to different networks: only one of them has {odd[0]}")
    found = {}
    for name in one.layers:
        if (mine := one.kinds[name].shape) != (theirs := other.kinds[name].shape):
            raise ValueError(f"{name} has shape {mine} in one mask and {theirs} in the other")
        found[name] = _shared(one.gaps(name), other.gaps(name))
    return found


def _shared(first: Gaps, second: Gaps) -> Shared:
    """By counting the places that both list; where one lists the removed weights, what it lists is taken away."""
    listed = common(first, second)
    if first.inverted and second.inverted:
        both = first.size - first.listed - second.listed + listed
    elif first.inverted or second.inverted:
        both = (second.listed if first.inverted else first.listed) - listed
    else:
        both = listed
    return Shared(first.size, first.kept, second.kept, both)


@dataclass(frozen=True)
class _Content:
    """What a file says that it holds, found to be consistent."""

    path: str
    file: TensorFile
    kinds: dict[str, Kind]
    layers: dict[str, dict[str, Any]]
    tied: dict[str, str]
    provenance: dict[str, Any]

    def own_names(self) -> list[str]:
        """All tensors but those that are another one under a second name; layers in the order of the mask."""
        return [*self.layers, *(name for name in self.kinds if name not in self.layers and name not in self.tied)]

    def outline(self) -> Outline:
        """Its numbers."""
        kept = {name: self.gaps(name).kept for name in self.layers}
        return Outline(self.path, self.kinds, kept, self.tied, self.provenance, self.file.bytes)

    def gaps(self, name: str) -> Gaps:
        """Where the kept weights of a layer are."""
        facts = self.layers[name]
        high, low = (self.file.tensors[name + end].numpy() for end in (_HIGH, _LOW))
        return Gaps(self.kinds[name].size, facts["listed"], facts["inverted"], facts["k"], high, low)

    def forget(self, name: str) -> None:
        """Let go of the bytes of a tensor, once it is where it belongs."""
        for end in ("", _KEPT, _HIGH, _LOW):
            self.file.tensors.pop(name + end, None)

    def dense(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A tensor as the model has it, and its mask if it has one."""
        if name not in self.layers:
            return self.file.tensors[name], None
        kind = self.kinds[name]
        gaps = self.gaps(name)
        kept = np.full(gaps.size, gaps.inverted)
        for places in decode(gaps):
            kept[places] = not gaps.inverted
        mask = torch.from_numpy(kept).view(kind.shape)
        values = self.file.tensors[name + _KEPT].to(kind.dtype)
        return torch.zeros(kind.shape, dtype=kind.dtype).masked_scatter_(mask, values), mask


def _content(path: str | os.PathLike[str], *, values: bool = True) -> _Content:
    """The content of a file, each number checked against the others; an error if one does not fit.

    Without `values` only the places of the kept weights are read into memory.
    """
    file = read_file(path, lambda name: values or name.endswith((_HIGH, _LOW)))
    if file.metadata.get("format") != FORMAT:
        raise ValueError(
            f"{os.fspath(path)} is not a network of this version: its format is {file.metadata.get('format')!r}, "
            f"not {FORMAT!r}"
        )
    try:
        layers, tied = (_names(parsed_json(file.metadata[name], name), name) for name in ("layers", "tied"))
        about = _names(parsed_json(file.metadata["provenance"], "the provenance", numbers=True), "provenance")
        streams = {name + end for name in layers for end in (_KEPT, _HIGH, _LOW)}
        kinds = {name: kind for name, kind in file.kinds.items() if name not in streams}
        found = _Content(os.fspath(path), file, kinds, layers, tied, about)
        for name in layers:
            _check_layer(found, name)
        for name, other in tied.items():
            if name in kinds or name in streams or not isinstance(other, str) or other in tied:
                raise ValueError(f"{name} is stored, or tied to what is tied itself")
            kinds[name] = kinds[other]
    except (KeyError, TypeError, ValueError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{os.fspath(path)} is damaged: {said}") from None
    return found


def _names(content: Any, what: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise TypeError(f"{what} are no names and values")
    return content


def _check_layer(found: _Content, name: str) -> None:
    """An error if the places and the values of a layer do not agree, before anything is made of them."""
    facts = _names(found.layers[name], f"the facts of {name}")
    if name in found.kinds:
        raise ValueError(f"{name} is stored twice, with a mask and without")
    if type(facts["inverted"]) is not bool or any(type(facts[key]) is not int for key in ("listed", "k")):
        raise TypeError(f"the numbers of {name} are no whole numbers")
    dtype = getattr(torch, facts["dtype"], None) if isinstance(facts["dtype"], str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is of an unknown kind, {facts['dtype']!r:.40}")
    found.kinds[name] = Kind(dtype, checked_shape(name, facts["shape"]))
    values, *streams = (found.file.kinds[name + end] for end in (_KEPT, _HIGH, _LOW))
    if any(stream.dtype != torch.uint8 or len(stream.shape) != 1 for stream in streams):
        raise TypeError(f"the places of {name} are no bytes")
    if values.dtype not in {dtype, torch.float16} or (values.dtype != dtype and not dtype.is_floating_point):
        raise TypeError(f"the values of {name} are {values.dtype}")
    gaps = found.gaps(name)
    if values.shape != (gaps.kept,):
        raise ValueError(f"values and mask of {name} do not agree")
    if gaps.inverted and gaps.listed > gaps.size // 2:
        raise ValueError(f"the mask of {name} makes no sense")
    checked(gaps)


def _state(model: nn.Module, *, values: bool = True) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the unwrapped model, tied ones under each name."""
    check_ordinary(model)
    state = {}
    for prefix, module in owners(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"{prefix or 'the model'} has an extra state, which a network's file cannot hold")
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                raise ValueError(f"{prefix + leaf} has no shape yet (a lazy module): run one forward first")
            if tensor is not None and tensor.is_meta and values:
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


def _check_kinds(path: str, kinds: Mapping[str, Kind], state: Mapping[str, Tensor]) -> None:
    for where, names in (("file", kinds.keys() - state.keys()), ("model", state.keys() - kinds.keys())):
        if names:
            raise ValueError(f"{path} does not fit the model: only the {where} has {', '.join(sorted(names)[:3])}")
    for name, tensor in state.items():
        if kinds[name] != (kind := Kind(tensor.dtype, tuple(tensor.shape))):
            raise ValueError(
                f"{path} does not fit the model: {name} is {_kind(kinds[name])} in the file and {_kind(kind)} in the "
                "model"
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


def _kind(kind: Kind) -> str:
    return f"{str(kind.dtype).removeprefix('torch.')} of shape {kind.shape}"
