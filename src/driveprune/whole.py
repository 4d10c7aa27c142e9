"""A sharded network whose weights are whole for a while: torch can differentiate it twice then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from driveprune.collectives import full, is_sharded, part, placed, summed
from driveprune.mask import parameters


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Every rank has all weights for a while, as ordinary parameters, and `fully_shard` does nothing.

    The model computes in the precision of its parameters. What happens to the whole weights is forgotten afterwards.
    A network that is not sharded stays as it is.
    """
    sharded = [weight for weight in parameters(model).values() if is_sharded(weight)]
    if not sharded:
        yield
        return
    if not any(map(_is_of_fsdp, _hooks(model))):
        raise ValueError("second derivatives of sharded weights are known only where `fully_shard` has sharded them")
    whole = {weight: nn.Parameter(full(weight.detach()), weight.requires_grad) for weight in sharded}
    with _without_fsdp(model), _swapped(model, whole):
        yield


def summed_part(tensor: Tensor, like: Tensor) -> Tensor:
    """The sum over ranks of a tensor that each of them has as a whole; sharded as another one is."""
    return placed(part(summed(tensor), like).clone(), like) if is_sharded(like) else summed(tensor)


@contextmanager
def _swapped(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Other parameters in the places of some; one that is tied has the same other one everywhere."""
    places = [
        (module, leaf, weight)
        for module in model.modules()
        for leaf, weight in module._parameters.items()
        if weight is not None and weight in others
    ]
    try:
        for module, leaf, weight in places:
            setattr(module, leaf, others[weight])
        yield
    finally:
        for module, leaf, weight in places:
            setattr(module, leaf, weight)


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """The hooks by which `fully_shard` gathers weights are taken out for a while; each comes back in its place."""
    tables: list[dict[int, Any]] = [
        table for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)
    ]
    before = [dict(table) for table in tables]
    try:
        for table, hooks in zip(tables, before, strict=True):
            _fill(table, {key: hook for key, hook in hooks.items() if not _is_of_fsdp(hook)})
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            left = dict(table)  # without those that have removed themselves
            _fill(table, {key: hook for key, hook in hooks.items() if key in left or _is_of_fsdp(hook)} | left)


def _fill(table: dict[int, Any], hooks: Mapping[int, Any]) -> None:
    table.clear()
    table.update(hooks)


def _hooks(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from module._forward_pre_hooks.values()


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
