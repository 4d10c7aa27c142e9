"""The network as paths from input to output: effective sparsity, cut networks, multiply-adds.

A weight matters if a path of kept weights leads from the input through it to the output. To find out, a copy of the
network is run once, in float64, with the arithmetic of `driveprune.twin`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from driveprune.collectives import is_sharded
from driveprune.gradients import eager, evaluating, same_buffers, seeded
from driveprune.mask import (
    Loss,
    Mask,
    all_weights,
    check_fits,
    empty_layers,
    everything,
    owners,
    parameters,
    sparsity,
    unwrap,
)
from driveprune.signals import mark
from driveprune.twin import Twin

_LARGEST = 1 << 28  # weights: above, a float64 copy only for a warning is too much to ask for


class CollapseWarning(UserWarning):
    """The mask leaves a layer without weights, or the network without a path from input to output."""


@dataclass(frozen=True)
class Inputs:
    """What the model's forward is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Flow:
    """What a run of the twin network shows."""

    effective: Mask
    """The kept weights that lie on a path from input to output."""
    connected: bool
    """Whether any path is left."""
    positions: dict[str, float]
    """How often each weight of a layer is multiplied for this input."""
    uncounted: tuple[str, ...]
    """Layers that are used in a way whose multiply-adds are not counted."""

    def macs(self, mask: Mapping[str, Tensor]) -> int | None:
        """Multiply-adds of the kept weights for this input; None where they cannot be counted."""
        if self.uncounted:
            return None
        return round(sum(self.positions.get(name, 0) * int(kept.count_nonzero()) for name, kept in mask.items()))


class _Captured(Exception):  # noqa: N818  (no error: it stops the forward pass)
    pass


def example_of(model: nn.Module, batch: Any, loss: Loss) -> Inputs:
    """What the loss gives to the model for a batch, cut down to the first example if that can be taken alone.

    It can if all tensors of the batch are as long, and the model's output for the first example is the same alone as
    beside the second one. Of a graph, whose matrix of edges is as long as its list of nodes, nothing is cut off.
    """
    model = unwrap(model)
    seen: list[Inputs] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Inputs(args, kwargs))
        raise _Captured

    hook = model.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        loss(model, batch)
    except _Captured:
        pass
    finally:
        hook.remove()
    if not seen:
        raise ValueError("the loss does not call the model itself, so its input is not known")
    sizes = {len(leaf) if leaf.dim() else 0 for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    time_first = any(getattr(module, "batch_first", None) is False for module in model.modules())
    if len(sizes) != 1 or time_first:
        return seen[0]
    size = sizes.pop()
    return _first(seen[0], size, 1) if _is_by_example(model, seen[0], size) else seen[0]


def _first(inputs: Inputs, size: int, count: int) -> Inputs:
    """The first examples of inputs whose tensors have `size` examples."""

    def cut(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf

    return Inputs(*tree_map(cut, (inputs.args, inputs.kwargs)))


_BY_EXAMPLE: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()
"""What was found of a network and inputs of a shape: methods of a hundred cuts ask a hundred times."""


def _is_by_example(model: nn.Module, inputs: Inputs, size: int) -> bool:
    """Whether a network treats each example by itself. A sharded one, of which a rank has a part, is not tried."""
    if size < 2 or any(map(is_sharded, model.parameters())):
        return True
    leaves, shape = tree_flatten((inputs.args, inputs.kwargs))
    key = (size, str(shape), *(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves))
    known = _BY_EXAMPLE.setdefault(model, {})
    if key not in known:
        known[key] = _is_the_same_alone(model, _first(inputs, size, 1), _first(inputs, size, 2))
    return known[key]


def _is_the_same_alone(model: nn.Module, one: Inputs, two: Inputs) -> bool:
    """Whether the output for the first example is the same alone as beside another one.

    Of a network that draws random numbers in evaluation mode, only the shapes can be compared.
    """
    try:
        alone, beside, again = (_output(model, given, seed) for given, seed in ((one, 0), (two, 0), (two, 1)))
    except Exception:  # the first examples are no input of this network
        return False
    if not len(alone) == len(beside) == len(again):
        return False
    rows = [b if a.shape == b.shape else b[:1] for a, b in zip(alone, beside, strict=True)]
    if any(a.shape != row.shape for a, row in zip(alone, rows, strict=True)):
        return False
    is_random = not all(_near(a, b) for a, b in zip(beside, again, strict=True))
    return is_random or all(_near(a, row) for a, row in zip(alone, rows, strict=True))


@torch.no_grad()
def _output(model: nn.Module, given: Inputs, seed: int) -> list[Tensor]:
    with evaluating(model), eager(model), same_buffers(model), seeded(model, seed):
        return [leaf.detach().clone() for leaf in _floats(model(*given.args, **given.kwargs)) if leaf.dim()]


def _near(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding."""
    scale = float(b.abs().nan_to_num(posinf=0.0).max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=min(0.05, 1000 * torch.finfo(b.dtype).eps) * scale, equal_nan=True)


def inputs_of(example: Any) -> Inputs:
    """An example input as the user gives it: a tensor, a tuple of arguments or a dictionary of them."""
    if isinstance(example, Inputs):
        return example
    if isinstance(example, Mapping):
        return Inputs((), dict(example))
    return Inputs(tuple(example), {}) if isinstance(example, tuple | list) else Inputs((example,), {})


def effective_sparsity(model: nn.Module, mask: Mapping[str, Tensor], example: Any) -> float:
    """The sparsity when weights on no path from input to output count as removed, too.

    `example` is an input of the model, such as `x[:1]`; of floating tensors only the shape counts.

    >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    >>> mask = {"0.weight": torch.tensor([[True], [False]]), "1.weight": torch.tensor([[False, True]])}
    >>> effective_sparsity(net, mask, torch.ones(1, 1))
    1.0
    """
    return sparsity(flow(model, mask, example).effective)


def flow(model: nn.Module, mask: Mapping[str, Tensor], example: Any) -> Flow:
    """Run the twin once and read off paths and multiply-adds. The model and the random state are as before."""
    check_fits(model, mask)
    if example is None:
        raise ValueError("an example input is needed to follow paths through the network, such as x[:1]")
    inputs = inputs_of(example)
    with torch.inference_mode(False), torch.enable_grad(), seeded(model, 0):
        twin = copy.deepcopy(unwrap(model)).cpu().double()
        _drop_hooks_of_others(twin)
        weights = parameters(twin)
        fill(weights, mask)
        names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        mode = Twin(names, {name: weight.numel() for name, weight in weights.items()})
        runs = [_run(twin, mode, weights, mask, inputs)]
        for turn in range(1, mode.turns):
            mode.turn = turn
            runs.append(_run(twin, mode, weights, mask, inputs))
    effective = Mask({name: torch.stack([each[0][name] for each in runs]).any(0) for name in mask})
    positions = {name: times / mode.turns for name, times in mode.positions.items()}
    uncounted = [name for name, kept in effective.items() if name not in positions and kept.any()]
    return Flow(
        effective,
        any(connected for _, connected in runs),
        positions,
        tuple(name for name in uncounted if name not in mode.added),
    )


def _run(
    twin: nn.Module, mode: Twin, weights: Mapping[str, nn.Parameter], mask: Mapping[str, Tensor], inputs: Inputs
) -> tuple[Mask, bool]:
    """The weights on a path in one run of the twin, and whether there is any path."""
    args, kwargs = tree_map(signal_of, (inputs.args, inputs.kwargs))
    with evaluating(twin), eager(twin), mode, torch.autocast("cpu", enabled=False):
        output = twin(*args, **kwargs)
    signal = total(output)
    return _on_a_path(signal, weights, mask, mode.added), bool(signal.detach() != 0)


def _drop_hooks_of_others(twin: nn.Module) -> None:
    """Leave the hooks that torch or the module's own library put there: they are a part of what it computes."""
    for module in twin.modules():
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(table.items()):
                if not _is_its_own(hook, module):
                    del table[key]


def _is_its_own(hook: Any, module: nn.Module) -> bool:
    hook = hook.func if isinstance(hook, partial) else hook
    written_in = str(getattr(hook, "__module__", None) or type(hook).__module__)
    libraries = {"torch", *(kind.__module__.partition(".")[0] for kind in type(module).__mro__[:-1])}
    return isinstance(getattr(hook, "__self__", None), nn.Module) or written_in.partition(".")[0] in libraries


def positions(model: nn.Module, mask: Mapping[str, Tensor], example: Any) -> dict[str, float]:
    """How often each weight is multiplied for an example, by name; without those that cannot be counted.

    A sharded model has no twin, and where paths cannot be followed, there is none, either: the model itself is run
    (a sharded one by all ranks together) and its multiplications are counted.
    """
    if not any(map(is_sharded, mask.values())):
        with suppress(Exception):  # the user's own code may refuse a float64 copy of itself
            found = flow(model, everything(mask), example)
            return {name: times for name, times in found.positions.items() if name not in found.uncounted}
    return _counted(model, example)


def _counted(model: nn.Module, example: Any) -> dict[str, float]:
    sizes = {name: weight.numel() for name, weight in parameters(model).items()}
    mode, inputs = _Counting({}, sizes), inputs_of(example)
    with ExitStack() as hooks, torch.no_grad(), evaluating(model), eager(model):
        for prefix, module in owners(model):
            hooks.callback(module.register_forward_pre_hook(partial(mode.note, prefix)).remove)
        with mode:
            model(*inputs.args, **inputs.kwargs)
    return mode.positions


class _Counting(Twin):
    """Counts multiplications while the network computes as ever; weights are known while their module runs."""

    def note(self, prefix: str, module: nn.Module, _: Any) -> None:
        for leaf, weight in module._parameters.items():
            if weight is not None and prefix + leaf in self._sizes:
                self._names[weight.untyped_storage().data_ptr()] = prefix + leaf

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "").strip("_")
        self._note_copy(name, args, kwargs or {}, output)
        self._count(name, args, kwargs or {}, output)
        return output


def _on_a_path(signal: Tensor, weights: Mapping[str, Tensor], mask: Mapping[str, Tensor], added: set[str]) -> Mask:
    chosen = [weights[name] for name in mask]
    found: tuple[Tensor | None, ...] = (None,) * len(chosen)
    if signal.requires_grad:
        found = torch.autograd.grad(signal, chosen, allow_unused=True)
    effective = Mask()
    for (name, kept), gradient in zip(mask.items(), found, strict=True):
        if name in added:
            effective[name] = kept.clone()
        elif gradient is None:
            effective[name] = torch.zeros_like(kept)
        else:
            effective[name] = kept & (gradient.isfinite() & (gradient != 0)).to(kept.device)
    return effective


@torch.no_grad()
def fill(weights: Mapping[str, nn.Parameter], mask: Mapping[str, Tensor]) -> None:
    """Positive numbers where kept, each row of about the same sum; no biases."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        weight.requires_grad_(True)
        if weight.dim() >= 2:
            kept = mask[name].cpu() if name in mask else torch.ones(weight.shape, dtype=torch.bool)
            values = (torch.rand(weight.shape, generator=generator, dtype=torch.float64) + 0.5) * kept
            fan = kept.flatten(1).sum(1).clamp(min=1)
            weight.copy_(values / fan.view(-1, *[1] * (weight.dim() - 1)))
        else:
            weight.fill_(0.0 if "bias" in name.rpartition(".")[2] else 1.0)


def signal_of(leaf: Any) -> Any:
    """An input of the twin: positive numbers of float64 for floats; integers as they are, both marked as signals."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_floating_point():
        return mark(leaf.detach().cpu().clone())
    generator = torch.Generator().manual_seed(1)
    return mark(torch.rand(leaf.shape, generator=generator, dtype=torch.float64) + 0.5)


def _floats(output: Any) -> Iterator[Tensor]:
    """All floating tensors of a model's output: of tuples, dictionaries and objects that behave like them."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _floats(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _floats(value)
    elif hasattr(output, "__dict__"):
        yield from _floats(vars(output))


def total(output: Any) -> Tensor:
    """The sum of all floating outputs of a model; a loss that it returns beside them is left out."""
    leaves = list(_floats(output))
    if not leaves:
        raise ValueError(f"the model's output, a {type(output).__name__}, holds no floating-point tensor")
    return torch.stack([leaf.sum() for leaf in leaves if leaf.dim() or len(leaves) == 1]).sum()


def check_paths(model: nn.Module, mask: Mapping[str, Tensor], example: Inputs | None) -> None:
    """Warn, before any training, of empty layers and of a network that no path leads through any more.

    An empty layer may be harmless: a residual network goes around an empty shortcut. A network without a path
    from input to output is not: it computes a constant and cannot learn.
    """
    empty = empty_layers(mask)
    found = None
    if example is not None and all_weights(mask) <= _LARGEST and not any(map(is_sharded, mask.values())):
        try:
            found = flow(model, mask, example)
        except Exception as error:  # the user's own code may refuse a float64 copy of itself
            warnings.warn(f"paths through the network could not be followed: {error}", CollapseWarning, 4)
    if found is not None and not found.connected:
        cause = f"; empty: {_list(empty)}" if empty else ""
        warnings.warn(
            f"no path is left from input to output: the network computes a constant and cannot learn{cause}. "
            "Use a lower sparsity, another method or min_kept=1.",
            CollapseWarning,
            stacklevel=4,
        )
    elif empty:
        detour = (
            "paths around it remain, the network can learn"
            if found
            else "whether paths around it remain was not checked"
        )
        warnings.warn(f"nothing is left of {_list(empty)}; {detour}", CollapseWarning, stacklevel=4)


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
