"""What is kept: which weights can be pruned, masks over them, and how sparse they are."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.swa_utils import AveragedModel

from driveprune.collectives import counted, is_sharded, local, part, placed, reshard
from driveprune.kinds import OptionError, brief

Scores = dict[str, Tensor]
"""Parameter name -> score of each weight; higher is kept."""

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> scalar: the one hook for models that are not "logits of x against y"."""

_WRAPPERS = (DataParallel, DistributedDataParallel, AveragedModel)
_NEVER = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_BY_INCLUDE_ONLY = (nn.Embedding, nn.EmbeddingBag, ParametrizationList)
_PARAMETRISED = ("_g", "_v", "_orig")  # the endings that old weight_norm and torch's prune give to weights
SPARSE_MARK = "_made_by_sparsify"
_NO_WEIGHTS = ("pos", "emb", "token", "bias", "table")
_WEIGHTS = re.compile(r"weight|expert|kernel|proj|matri|filter|(^|[._])(w[qkvogi]?|[qkvor])\d*($|[._])")
"""What modules of other makes than torch's call their weights: `weight`, `gate_up_proj`, `W`, `w1`, `wq`, `q`."""


class Mask(dict[str, Tensor]):
    """Parameter name -> boolean tensor of the parameter's shape, True where the weight is kept.

    A plain dictionary works wherever a mask is asked for; this one also remembers where it came from
    (method, knobs, seed, sparsity, versions), and `driveprune.save` writes that down.
    """

    def __init__(self, kept: Mapping[str, Tensor] | None = None, provenance: Mapping[str, Any] | None = None):
        super().__init__(kept or {})
        self.provenance: dict[str, Any] = dict(provenance or getattr(kept, "provenance", {}))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers by their names in the unwrapped model, whether a state_dict has them or not."""
    return {
        prefix + leaf: buffer
        for prefix, module in owners(model)
        for leaf, buffer in module._buffers.items()
        if buffer is not None
    }


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile, DataParallel, DDP or an averaged copy.

    >>> unwrap(nn.DataParallel(net := nn.Linear(2, 2))) is net
    True
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, got {brief(model)}")
    while True:
        if "_orig_mod" in model._modules:  # torch.compile
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, _WRAPPERS):
            model = model.module
        else:
            return model


def mark_sparse(module: nn.Module) -> None:
    """Say of a module that it is a sparse network, or a layer of one."""
    module.__dict__[SPARSE_MARK] = True


def check_ordinary(model: nn.Module) -> None:
    """An error for a sparse network: what works on weights and masks needs weights of the masks' shapes."""
    for prefix, module in owners(model):
        if SPARSE_MARK in module.__dict__:
            part = f", or a part of one ({prefix.rstrip('.')})" if prefix else ""
            raise ValueError(f"this is a sparse network made by sparsify{part}: call densify(model) first")


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that train a model together, if DDP knows them."""
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def owners(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under its path in the unwrapped model; wrappers inside it leave no trace in the path."""
    model = unwrap(model)
    yield prefix, model
    for name, child in model._modules.items():
        if child is not None:
            yield from owners(child, f"{prefix}{name}.")


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once, under its first name in the unwrapped model."""
    return {names[0]: parameter for parameter, names, _ in _occurrences(model)}


def prunable(
    model: nn.Module,
    *,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    frozen: bool = False,
) -> dict[str, nn.Parameter]:
    """The weights that can be pruned, by name, each once.

    Chosen are floating-point parameters with two or more dimensions that are weights: those of torch's linear
    layers, convolutions, recurrent layers and attention projections, and in other modules those that are called
    so (`weight`, `kernel`, `gate_up_proj`, `w1`, `W`, `q`, ...). Never chosen are biases and the parameters of
    normalisation layers. Embeddings, tables of positions and tokens, tensors below a parametrisation and other
    parameters (such as Mamba's `A_log`, where a zero is no missing connection) count only if a pattern of
    `include` names them; a warning names the last kind. `exclude` leaves names out. Patterns are those of the
    shell (`"layer4.*"`). Frozen parameters are left alone unless `frozen=True`.

    >>> list(prunable(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))))
    ['0.weight', '3.weight']
    """
    check_model(model)
    include, exclude = _patterns(include), _patterns(exclude)
    chosen: dict[str, nn.Parameter] = {}
    used: set[str] = set()
    unknown: list[str] = []
    for parameter, names, modules in _occurrences(model):
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{names[0]} has no shape yet (a lazy module): run one forward first")
        if not _can_be_pruned(parameter, modules):
            continue
        named = _matching(include, names)
        unwanted = _matching(exclude, names)
        used |= unwanted
        by_default = _chosen_by_default(parameter, names, modules)
        if unwanted or not (named or by_default):
            if by_default is None and not unwanted:
                unknown.append(names[0])
            continue
        if parameter.requires_grad or frozen:
            chosen[names[0]] = parameter
            used |= named
    for option, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if pattern not in used:
                raise ValueError(
                    f"{option} pattern {pattern!r} matches no weight that can be pruned "
                    "(biases and normalisation cannot; frozen=True admits frozen weights)"
                )
    if unknown:
        _warn_of(unknown)
    if not chosen:
        raise ValueError(
            "nothing to prune: the model has no trainable floating-point weight with two or more dimensions "
            "(frozen=True admits frozen ones, include= admits embeddings)"
        )
    return chosen


def _occurrences(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[str], list[nn.Module]]]:
    """Each parameter with all its names and the modules that hold it (more than one where it is tied)."""
    check_ordinary(model)
    reshard(model)
    found: dict[nn.Parameter, tuple[list[str], list[nn.Module]]] = {}
    for prefix, module in owners(model):
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                names, modules = found.setdefault(parameter, ([], []))
                names.append(prefix + leaf)
                modules.append(module)
    for parameter, (names, modules) in found.items():
        yield parameter, names, modules


def _can_be_pruned(parameter: nn.Parameter, modules: list[nn.Module]) -> bool:
    return (
        parameter.is_floating_point()
        and parameter.dim() >= 2
        and not any(isinstance(module, _NEVER) for module in modules)
    )


def _chosen_by_default(parameter: nn.Parameter, names: list[str], modules: list[nn.Module]) -> bool | None:
    """Whether a parameter is a weight; None if it may be, for all that is known."""
    if any(isinstance(module, _BY_INCLUDE_ONLY) for module in modules):
        return False
    leaves = [_own_name(name, module) for name, module in zip(names, modules, strict=True)]
    if any("weight" in leaf and leaf.endswith(_PARAMETRISED) for leaf in leaves):
        return False
    if any(
        "weight" in leaf and type(module).__module__.startswith("torch.")
        for leaf, module in zip(leaves, modules, strict=True)
    ):
        return True
    # A parameter of a user's module: a (C, 1, 1) scale or a table of positions is no weight, whatever its name.
    is_matrix = sum(size > 1 for size in parameter.shape) >= 2
    if not is_matrix or any(leaf == "pe" or any(word in leaf for word in _NO_WEIGHTS) for leaf in leaves):
        return False
    return True if any(map(_WEIGHTS.search, leaves)) else None


def _warn_of(unknown: list[str]) -> None:
    """Name the matrices that are left out because nothing says that they are weights."""
    patterns = sorted({_pattern_of(name) for name in unknown})
    some = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
    warnings.warn(
        f"not pruned: {some}, which belong to no known kind of layer and are not called weights; if they are, say "
        f"include={patterns}, else exclude={patterns}",
        stacklevel=3,
    )


def _pattern_of(name: str) -> str:
    """A pattern for a parameter and its like in other layers: `*A_log`, or `*scales.*` in a list."""
    parts = name.split(".")
    return f"*{parts[-2]}.*" if parts[-1].isdigit() and len(parts) > 1 else f"*{parts[-1]}"


def _own_name(name: str, module: nn.Module) -> str:
    """The last part of a name, in lower case; for a list or dictionary of parameters the part that names it, too."""
    parts = 2 if isinstance(module, nn.ParameterList | nn.ParameterDict) else 1
    return ".".join(name.lower().split(".")[-parts:])


def _patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matching(patterns: tuple[str, ...], names: list[str]) -> set[str]:
    return {pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)}


def everything(weights: Mapping[str, Tensor]) -> Mask:
    """The mask that keeps every weight."""
    return Mask({name: placed(_ones(local(w)), w) for name, w in weights.items()})


def _ones(like: Tensor) -> Tensor:
    return torch.ones(like.shape, dtype=torch.bool, device=like.device)


def mask_of(
    model: nn.Module,
    *,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    frozen: bool = False,
) -> Mask:
    """The mask of the weights that are not zero: what a pruned network keeps that another program has stored.

    The arguments are those of `prunable`. A kept weight that happens to be exactly zero counts as removed.

    >>> net = nn.Linear(2, 1)
    >>> apply(net, {"weight": torch.tensor([[True, False]])})
    >>> mask_of(net)["weight"]
    tensor([[ True, False]])
    """
    weights = prunable(model, include=include, exclude=exclude, frozen=frozen)
    return Mask({name: weight.detach() != 0 for name, weight in weights.items()})


def check_sparsity(sparsity: float) -> float:
    """The sparsity itself, or an error that says what is wrong with it."""
    if isinstance(sparsity, Tensor | np.ndarray) and sparsity.ndim == 0:
        sparsity = sparsity.item()
    if isinstance(sparsity, bool) or not isinstance(sparsity, Real):
        raise TypeError(f"sparsity must be a number in [0, 1), got {sparsity!r}")
    if not 0 <= sparsity < 1:
        hint = f" (did you mean {sparsity / 100:g}?)" if 1 < sparsity < 100 else ""
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity}{hint}")
    return float(sparsity)


def kept_count(size: int, sparsity: float) -> int:
    """How many of `size` weights stay at a sparsity: round((1 - sparsity)·size), at least 1.

    >>> kept_count(1000, 0.993)
    7
    """
    return max(1, round((1 - check_sparsity(sparsity)) * size))


def check_model(model: Any, call: str = "") -> None:
    """An error if this is no network whose weights can be pruned; `call` is how the caller is called."""
    order = f" (the order is {call})" if call else ""
    if not isinstance(model, nn.Module):
        hint = ", not the model itself: build one" if isinstance(model, type) and issubclass(model, nn.Module) else ""
        raise OptionError(f"model must be a torch.nn.Module, got {brief(model)}{hint}{order}")
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            f"model must be a plain torch.nn.Module, got a {type(model).__name__}, a program in which weights and "
            "hooks are out of reach: prune the model that it was made from, and trace or script the result"
        )
    if empty := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise OptionError(
            f"{empty} has no values (it is on the meta device): build the model for real, or load it first"
        )
    shaped = [(n, p) for n, p in model.named_parameters() if not isinstance(p, nn.parameter.UninitializedParameter)]
    if frozen := next((name for name, parameter in shaped if parameter.is_inference()), None):
        raise OptionError(
            f"{frozen} was made in torch.inference_mode(), and such weights never have gradients: build or load "
            "the model outside of it"
        )


def check_mask(mask: Any, call: str = "") -> None:
    """An error if this is no mask; `call` is how the caller is called."""
    order = f" (the order is {call})" if call else ""
    if not isinstance(mask, Mapping):
        raise OptionError(
            f"mask must be parameter name -> boolean tensor, as prune() returns it, got {brief(mask)}{order}"
        )
    for name, kept in mask.items():
        if not isinstance(name, str) or not isinstance(kept, Tensor):
            raise OptionError(
                f"mask must be parameter name -> boolean tensor, got {brief(name)} -> {brief(kept)}{order}"
            )


def check_fits(model: nn.Module, mask: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters that a mask is for, or an error that names the first one that does not fit."""
    check_model(model)
    check_mask(mask)
    weights = parameters(model)
    chosen = {}
    for name, kept in mask.items():
        if name not in weights:
            raise ValueError(f"the mask does not fit the model: it has no parameter {name!r}")
        if kept.dtype != torch.bool:
            raise ValueError(f"the mask of {name} must be boolean (True = kept), got {kept.dtype}")
        if kept.shape != weights[name].shape:
            raise ValueError(
                f"the mask does not fit the model: {name} has shape {tuple(weights[name].shape)}, "
                f"its mask {tuple(kept.shape)}"
            )
        if is_sharded(kept) and not (is_sharded(weights[name]) and _placement(kept) == _placement(weights[name])):
            raise ValueError(f"the mask of {name} must be sharded as the weight is, or be a whole tensor")
        chosen[name] = weights[name]
    return chosen


def _placement(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(kept: Tensor, like: Tensor) -> Tensor:
    """The mask as integers of `like`'s element size and layout: all ones where kept, zero where removed.

    `zero_removed` combines them with the weights bit by bit, which is as fast as multiplying by a float mask
    and leaves exactly +0.0 behind, whatever was there: -3.0, inf or NaN.
    """
    kept = kept.to(like.device)
    ones = torch.empty_like(like, dtype=_BITS[like.element_size()])
    return ones.copy_(kept).neg_()


@torch.no_grad()
def zero_removed(tensor: Tensor, keep_bits: Tensor) -> None:
    """Set to +0.0, in place, what `bits` says is removed."""
    tensor.view(keep_bits.dtype).bitwise_and_(keep_bits)


def apply(model: nn.Module, mask: Mapping[str, Tensor]) -> None:
    """Set the removed weights of a model to exactly zero, in place. Nothing keeps them there: see `hold`.

    >>> net = nn.Linear(2, 1)
    >>> apply(net, {"weight": torch.tensor([[True, False]])})
    >>> net.weight[0, 1].item()
    0.0
    """
    for name, weight in check_fits(model, mask).items():
        own = local(weight.data)
        zero_removed(own, bits(part(mask[name], weight), own))


@contextmanager
def masked(model: nn.Module, mask: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with its removed weights at zero, for a while; afterwards their values are back."""
    weights = check_fits(model, mask)
    values = {name: weight.detach().clone() for name, weight in weights.items()}
    try:
        apply(model, mask)
        yield
    finally:
        restore(weights, values)


@torch.no_grad()
def restore(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values back into the weights of the same names."""
    for name, value in values.items():
        weights[name].copy_(value)


def kept_weights(mask: Mapping[str, Tensor]) -> int:
    """How many weights a mask keeps."""
    check_mask(mask)
    return sum(counted(mask).values())


def all_weights(mask: Mapping[str, Tensor]) -> int:
    """How many weights a mask speaks of, kept or not."""
    return sum(kept.numel() for kept in mask.values())


def sparsity(mask: Mapping[str, Tensor]) -> float:
    """The fraction of weights that a mask removes.

    >>> sparsity({"w": torch.tensor([True, False, False, False])})
    0.75
    """
    return 1 - kept_weights(mask) / max(1, all_weights(mask))


def empty_layers(mask: Mapping[str, Tensor]) -> list[str]:
    """The names of the layers of which nothing is left."""
    return [name for name, count in counted(mask).items() if not count]
