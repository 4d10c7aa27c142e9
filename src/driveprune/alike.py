"""Do two networks compute the same? Asked of a compacted network, and of a graph, before anybody gets it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from driveprune.gradients import seeded
from driveprune.graph import Inputs

CANNOT_RUN = "cannot run"
_INPUT = "its input"
_SEEDS = 2
"""How often each input is tried, each time with other random numbers."""
_GRADIENTS = 1e-3
"""How far gradients may be apart, relatively: where both are computed alike, they agree far better."""


@dataclass(frozen=True)
class _Pass:
    """What a network made of an input."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    """As they are afterwards: some networks write into them."""
    gradients: dict[str, Tensor | None]
    """Of parameters, by name, and of inputs, by number; empty in evaluation mode."""


def difference(
    big: nn.Module,
    small: nn.Module,
    inputs: Inputs,
    *,
    training: bool,
    kept: Mapping[str, Tensor] | None = None,
    precisions: Sequence[torch.dtype | None] = (torch.float64, None),
) -> str | None:
    """How two networks differ on inputs like an example, if they do by more than rounding.

    They get several inputs, one after the other, each with several states of the generators of random numbers.
    Compared are outputs, what becomes of inputs and buffers, and in training mode gradients. Where channels may be
    gone, it is whether there are gradients at all, and the buffers of the network's own code.

    Args:
        big: a network.
        small: one that should do the same.
        inputs: an example.
        training: in training mode, too, not in evaluation mode alone.
        kept: masks of weights of the first network, of which the second one may have the kept values alone; None if
            channels may be gone, and with them what becomes of others that do not matter.
        precisions: the kinds of numbers to compare with; the first one with which the networks run. None: their own.

    """
    for mode in (False, True) if training else (False,):
        found: str | None = CANNOT_RUN
        for dtype in precisions:
            found = _compare(big, small, inputs, mode, dtype, kept)
            if found != CANNOT_RUN:
                break
        if found is not None:
            return found
    return None


def _compare(
    big: nn.Module,
    small: nn.Module,
    inputs: Inputs,
    training: bool,
    dtype: torch.dtype | None,
    kept: Mapping[str, Tensor] | None,
) -> str | None:
    def ready(net: nn.Module) -> nn.Module:
        twin = copy.deepcopy(net).cpu().train(training)
        for parameter in twin.parameters():  # frozen ones may learn later
            parameter.requires_grad_(parameter.requires_grad or (training and parameter.is_floating_point()))
        return twin if dtype is None else twin.to(dtype)

    kind = dtype or next((p.dtype for p in big.parameters() if p.is_floating_point()), torch.float32)
    known = [given for given in _variants(inputs, kind) if _runs(ready(big), given, training)]
    if not known:
        return CANNOT_RUN
    ours, theirs = ready(small), ready(big)
    tolerance = _tolerance(big)
    for number, given in enumerate(known * _SEEDS):
        wanted = _passed(theirs, given, number, training)
        try:
            found = _passed(ours, given, number, training)
        except Exception as error:  # what the first one can compute, the second one cannot
            return f"what is left of it fails ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        why = _apart(found, wanted, tolerance, kept)
        if why is not None:
            return why
    return _other_buffers(ours, theirs, tolerance, of_torch=kept is not None)


def _runs(net: nn.Module, given: Inputs, training: bool) -> bool:
    try:
        _passed(net, given, 0, training)
    except Exception:  # not an input of this network, or not of this kind of numbers
        return False
    return True


def _passed(net: nn.Module, given: Inputs, seed: int, training: bool) -> _Pass:
    """One pass, in training with gradients; the input that is given stays as it is."""
    sources: list[Tensor] = []

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if training and leaf.is_floating_point():
            sources.append(leaf.detach().clone().requires_grad_())
        return sources[-1].clone() if training and leaf.is_floating_point() else leaf.clone()

    fresh = tree_map(taken, (given.args, given.kwargs))
    leaves = [leaf for leaf in tree_leaves(fresh) if isinstance(leaf, Tensor)]
    net.zero_grad(set_to_none=True)
    with seeded(net, seed), torch.set_grad_enabled(training):
        output = net(*fresh[0], **fresh[1])
        floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        parts = [leaf.double().square().sum() for leaf in floats if leaf.requires_grad and leaf.is_floating_point()]
        if parts:
            torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()} if training else {}
    gradients |= {f"{_INPUT} {number}": source.grad for number, source in enumerate(sources)}
    return _Pass([leaf.detach().double() for leaf in floats], [leaf.detach() for leaf in leaves], gradients)


def _apart(found: _Pass, wanted: _Pass, tolerance: float, kept: Mapping[str, Tensor] | None) -> str | None:
    if len(found.outputs) != len(wanted.outputs) or not all(
        a.shape == b.shape and _near(a, b, tolerance) for a, b in zip(found.outputs, wanted.outputs, strict=True)
    ):
        return "what is left of it computes something else"
    if not all(_equal(ours, theirs) for ours, theirs in zip(found.inputs, wanted.inputs, strict=True)):
        return "it writes into its input, and the result does not"
    there = [each for each in wanted.gradients.values() if each is not None and each.numel()]
    largest = max((float(each.abs().max()) for each in there), default=0.0)
    for name in found.gradients.keys() & wanted.gradients.keys():
        ours, theirs = (_kept(each.gradients[name], kept, name) for each in (found, wanted))
        if ours is None or theirs is None:
            same = not _is_some(ours) and not _is_some(theirs)
        else:
            compared = kept is not None or name.startswith(_INPUT)
            same = not compared or _same_gradient(ours, theirs, largest, tolerance)
        if not same:
            return f"what is left of it has another gradient for {name}"
    return None


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    """In all bits, and in NaN."""
    return ours.shape == theirs.shape and bool(torch.isclose(ours, theirs, rtol=0, atol=0, equal_nan=True).all())


def _kept(gradient: Tensor | None, kept: Mapping[str, Tensor] | None, name: str) -> Tensor | None:
    """The entries of a gradient that belong to kept values; of a sparse layer's there are no others."""
    places = None if kept is None else kept.get(name)
    return gradient if gradient is None or places is None or gradient.shape != places.shape else gradient[places]


def _is_some(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.count_nonzero())


def _same_gradient(ours: Tensor, theirs: Tensor, largest: float, tolerance: float) -> bool:
    """Whether two gradients of kept values agree."""
    if not ours.numel():
        return True
    if not bool(theirs.isfinite().all()):
        return torch.equal(ours.isfinite(), theirs.isfinite())
    limit = max(_GRADIENTS, tolerance)
    worst = float((ours.double() - theirs.double()).abs().max())
    return worst <= limit * float(theirs.abs().max()) or worst <= 0.01 * limit * largest


def _other_buffers(ours: nn.Module, theirs: nn.Module, tolerance: float, *, of_torch: bool) -> str | None:
    """What became of buffers of the same names and sizes."""
    known = dict(ours.named_buffers())
    for name, wanted in theirs.named_buffers():
        owner = type(theirs.get_submodule(name.rpartition(".")[0]))
        found = known.get(name) if of_torch or not owner.__module__.startswith("torch.") else None
        if found is None or found.shape != wanted.shape:
            continue
        if not _near(found.double(), wanted.double(), tolerance):
            return f"its buffer {name} becomes another one"
    return None


def _tolerance(net: nn.Module) -> float:
    """How far outputs may be apart, relatively: constants were rounded to the network's own kind of numbers."""
    coarsest = max((torch.finfo(p.dtype).eps for p in net.parameters() if p.is_floating_point()), default=1e-16)
    return min(0.1, max(1e-9, 50 * coarsest))


def _near(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Equal up to rounding, with NaN and infinity at the same places."""
    if ours.is_complex() or theirs.is_complex():
        ours, theirs = torch.view_as_real(ours.to(torch.complex128)), torch.view_as_real(theirs.to(torch.complex128))
    if not theirs.numel():
        return True
    finite = theirs.isfinite()
    if not torch.equal(ours[~finite].nan_to_num(), theirs[~finite].nan_to_num()):
        return False
    apart, scale = (ours - theirs)[finite].abs(), theirs[finite].abs()
    return not apart.numel() or float(apart.max()) <= tolerance * max(1e-30, float(scale.max()))


def _variants(inputs: Inputs, dtype: torch.dtype) -> Iterator[Inputs]:
    """The example, random numbers in its place, small and large, twice as many of them, and one alone."""
    generator = torch.Generator().manual_seed(0)

    def plain(leaf: Any) -> Any:
        kind = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().cpu().to(dtype) if kind else leaf.cpu() if isinstance(leaf, Tensor) else leaf

    def drawn(leaf: Any) -> Any:
        """Random numbers; of integers, which may be words or places, the same ones in another order."""
        if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool:
            return plain(leaf)
        if not leaf.is_floating_point():
            return leaf.cpu().flatten()[torch.randperm(leaf.numel(), generator=generator)].view(leaf.shape)
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(dtype)

    def twice(leaf: Any) -> Any:
        return torch.cat([drawn(leaf), drawn(leaf)]) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    def one(leaf: Any) -> Any:
        return drawn(leaf)[:1] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    def large(leaf: Any) -> Any:
        return 1e3 * drawn(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    for change in (plain, drawn, twice, one, large):
        yield Inputs(*tree_map(change, (inputs.args, inputs.kwargs)))
