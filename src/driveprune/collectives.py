"""Several processes as one: sums over ranks, errors that all ranks raise, tensors of which each rank has a part.

With one process everything here is the identity. With more, all ranks do the same things in the same order.
A tensor whose parts lie on several ranks is a DTensor, as `fully_shard` makes them; here it is called *sharded*.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from driveprune import gloo  # noqa: F401  # for what it does at the end of a process

Group = dist.ProcessGroup | Literal["alone"] | None
"""With whom to work: the ranks of a process group, nobody, or (None) all ranks if there are several."""

Groups = tuple[dist.ProcessGroup, ...]
"""Over which groups, one after the other, to sum so that all parts of a sharded tensor are in the sum."""

Box = tuple[tuple[int, int], ...]
"""The part of a tensor that a rank has: from and to in each dimension."""

Numbers = np.ndarray[Any, np.dtype[Any]]
_T = TypeVar("_T")
_current: ContextVar[Group] = ContextVar("group", default=None)


class RankError(RuntimeError):
    """Another rank has failed, so this one cannot go on either."""


# With whom.


@contextmanager
def among(group: Group) -> Iterator[None]:
    """Work with the ranks of a group for a while; None changes nothing."""
    token = _current.set(_current.get() if group is None else group)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the processes that torchrun has started, if it has: gloo on a CPU, nccl on GPUs, one for each rank."""
    if launched() == 1 or dist.is_initialized():
        yield
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def launched() -> int:
    """How many processes torchrun has started; 1 if it has not."""
    is_launched = dist.is_available() and dist.is_torchelastic_launched()
    return int(os.environ["WORLD_SIZE"]) if is_launched else 1


def ranks() -> dist.ProcessGroup | None:
    """The group to work with; None if this process works alone."""
    group = _current.get()
    if group == "alone" or not dist.is_available() or not dist.is_initialized():
        return None
    found = dist.group.WORLD if group is None else group
    return found if found is not None and found.size() > 1 else None


def size() -> int:
    """How many processes work together.

    >>> size()
    1
    """
    group = ranks()
    return 1 if group is None else group.size()


def rank() -> int:
    """Which of them this one is, counted from 0."""
    group = ranks()
    return 0 if group is None else group.rank()


def is_first() -> bool:
    """Whether this is the process that writes and speaks."""
    return rank() == 0


def share_of(count: int, place: tuple[int, int]) -> slice:
    """The share of `count` examples that rank `place[0]` of `place[1]` has; shares differ by one at most.

    >>> [share_of(5, (rank, 2)) for rank in range(2)]
    [slice(0, 2, None), slice(2, 5, None)]
    """
    number, of = place
    return slice(count * number // of, count * (number + 1) // of)


# Sums and agreement.


def total(*numbers: float) -> list[float]:
    """The sum of each number over all ranks.

    >>> total(2, 3)
    [2.0, 3.0]
    """
    found = torch.tensor(numbers, dtype=torch.float64)
    return [float(number) for number in summed(found)]


def summed(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, the same bits on each; a new tensor if there are several."""
    group = ranks()
    return tensor if group is None else _reduced(tensor, group)


def mean(tensors: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
    """The mean of tensors over all ranks, in which this rank has a weight."""
    if ranks() is None:
        return dict(tensors)
    (whole,) = total(weight)
    share = weight / whole
    return {name: summed(t * share if share else torch.zeros_like(t)) for name, t in tensors.items()}


def _reduced(tensor: Tensor, group: dist.ProcessGroup, how: Any = dist.ReduceOp.SUM) -> Tensor:
    moved = tensor.detach().to(_device(group, tensor)).clone(memory_format=torch.contiguous_format)
    with _expecting(group):
        dist.all_reduce(moved, how, group=group)
    return moved.to(tensor.device)


@contextmanager
def _expecting(group: dist.ProcessGroup) -> Iterator[None]:
    """If the other ranks do not come in time, an error says what may be the reason."""
    try:
        yield
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        late = RankError(
            f"the other {group.size() - 1} ranks did not answer in time: all ranks must make the same calls; "
            'a rank that prunes for itself passes group="alone"'
        )
        late.known_to_ranks = True  # type: ignore[attr-defined]  # as far as can be: nobody waits for them again
        raise late from error


def _device(group: dist.ProcessGroup, tensor: Tensor) -> torch.device:
    """Where a group can sum: nccl only on GPUs."""
    needs_gpu = dist.get_backend(group) == "nccl" and tensor.device.type == "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if needs_gpu else tensor.device


@contextmanager
def together() -> Iterator[None]:
    """Work at which any rank may fail: if one does, all raise, and none waits for it in vain.

    The rank that failed raises its own error, the others a `RankError` that tells which one it was and why.
    """
    group = ranks()
    if group is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        if getattr(found, "known_to_ranks", False):
            raise
        error = found
    _raise_everywhere(error, group)


def _raise_everywhere(error: Exception | None, group: dist.ProcessGroup) -> None:
    flag = torch.tensor(error is not None, dtype=torch.int64)
    if not int(_reduced(flag, group, dist.ReduceOp.MAX)):
        return
    said: list[str | None] = [None] * group.size()
    dist.all_gather_object(said, error and f"{type(error).__name__}: {error}", group=group)
    place, why = next((place, why) for place, why in enumerate(said) if why)
    failure = error or RankError(f"rank {place} failed with {why}")
    failure.known_to_ranks = True  # type: ignore[attr-defined]
    raise failure


def from_first(make: Callable[[], _T]) -> _T:
    """What the first rank makes, on every rank; the others make nothing."""
    group = ranks()
    if group is None:
        return make()
    box: list[Any] = [None]
    with together():
        if group.rank() == 0:
            box = [make()]
    dist.broadcast_object_list(box, group=group, group_src=0)
    found: _T = box[0]
    return found


def is_same(*numbers: int) -> bool:
    """Whether every rank has the same whole numbers."""
    group = ranks()
    if group is None:
        return True
    both = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64)
    largest = _reduced(both, group, dist.ReduceOp.MAX)
    return torch.equal(largest, both)


@torch.no_grad()
def copy_first(tensors: Sequence[Tensor]) -> None:
    """Give tensors the values that they have on the first rank."""
    group = ranks()
    for tensor in tensors if group is not None else ():
        moved = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(moved, group=group, group_src=0)
        tensor.copy_(moved)


# Parts of tensors. Nothing can be sharded before torch's own module for it was imported, which takes a while.


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor: this rank may have only a part of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has: all of it, unless it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        found: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return found


def placed(part: Tensor, like: Tensor) -> Tensor:
    """A tensor of which this rank has `part`, sharded as another one is."""
    if not is_sharded(like):
        return part
    known: Any = like
    found: Tensor = type(known).from_local(
        part, known.device_mesh, known.placements, run_check=False, shape=known.shape, stride=_strides(known.shape)
    )
    return found


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return tuple(strides) if shape else ()


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """The rank's own part of a tensor that is sharded as another one, or that every rank has as a whole."""
    if is_sharded(tensor) or not is_sharded(like):
        return local(tensor)
    return tensor[tuple(slice(start, end) for start, end in box_of(like))]


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    if not is_sharded(tensor):
        return tensor
    found: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return found


def box_of(tensor: Tensor) -> Box:
    """Which part of a tensor this rank has."""
    if not is_sharded(tensor):
        return tuple((0, length) for length in tensor.shape)
    known: Any = tensor
    mesh = known.device_mesh
    splits = [(placement.dim, mesh.get_local_rank(axis), mesh.size(axis)) for axis, placement in _sharding_of(known)]
    return split_box(tensor.shape, splits)


def split_box(shape: Sequence[int], splits: Sequence[tuple[int, int, int]]) -> Box:
    """The box of a rank after splits (dimension, number of the part, parts), each as `torch.chunk` does it.

    >>> split_box((5, 2), [(0, 1, 2)])
    ((3, 5), (0, 2))
    """
    box = [(0, length) for length in shape]
    for dim, number, parts in splits:
        start, end = box[dim]
        step = -(-(end - start) // parts)
        box[dim] = min(end, start + number * step), min(end, start + (number + 1) * step)
    return tuple(box)


def _sharding_of(tensor: Any) -> list[tuple[int, Any]]:
    """(dimension of the mesh, placement) where a DTensor is split; an error if its parts are no boxes."""
    found = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise ValueError(f"a weight placed as {placement} cannot be pruned: its parts must be whole blocks")
        found.append((axis, placement))
    return found


def groups_of(tensor: Tensor) -> Groups:
    """The groups to sum over so that every part of a tensor is counted once: none if every rank has all of it."""
    if not is_sharded(tensor):
        return ()
    known: Any = tensor
    return tuple(known.device_mesh.get_group(axis) for axis, _ in _sharding_of(known))


def sum_over(counts: Numbers, groups: Groups) -> Numbers:
    """Numbers summed over groups."""
    for group in groups:
        counts = _reduced(torch.from_numpy(counts), group).numpy()
    return counts


def summed_over_parts(own: Mapping[str, float], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Numbers that each rank knows of its parts of tensors, summed over all parts, by the tensors' names."""
    found = dict(own)
    for groups, names in _by_groups(tensors).items():
        sums = sum_over(np.array([own[name] for name in names]), groups)
        found |= dict(zip(names, sums.tolist(), strict=True))
    return found


def counted(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How many places of each tensor are not zero, in all its parts.

    >>> counted({"a": torch.tensor([True, False, True])})
    {'a': 2}
    """
    own = {name: int(local(tensor).count_nonzero()) for name, tensor in tensors.items()}
    return {name: int(count) for name, count in summed_over_parts(own, tensors).items()}


def _by_groups(tensors: Mapping[str, Tensor]) -> dict[Groups, list[str]]:
    """The names of tensors by the groups that their parts are summed over."""
    found: dict[Groups, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(groups_of(tensor), []).append(name)
    return found


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that `fully_shard` has gathered for a forward pass without a backward pass."""
    module = sys.modules.get("torch.distributed.fsdp")
    for each in model.modules() if module is not None else ():
        if isinstance(each, module.FSDPModule):  # type: ignore[union-attr]
            each.reshard()
