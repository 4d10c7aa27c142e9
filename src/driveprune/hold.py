"""Keeping zeros zero, under any optimiser.

Gradients are masked as they are accumulated, so that clipping, gradient accumulation, scaling and closures see
only kept weights; once more before a step, for gradients that were set by hand; weights are set to zero again
after each step, for optimisers that move weights without a gradient; the optimiser's state is zero at removed
places, also after it was loaded (but where an optimiser keeps it above a positive floor, as Adamax and Rprop do, or
for whole rows and columns, as Adafactor does). An optimiser that was not named when the hold was made, or came later,
is taken in just before its first step on held weights. The network stays an ordinary network: no wrappers, no renamed
parameters. A copy of it is not held.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from driveprune.collectives import local, part
from driveprune.kinds import OptionError, brief
from driveprune.mask import Mask, bits, check_fits, check_mask, check_model, owners, zero_removed

Optimizers = Optimizer | Iterable[Optimizer] | None


def hold(model: nn.Module, optimizer: Optimizers, mask: Mapping[str, Tensor]) -> Held:
    """Set the removed weights of a model to zero and keep them there while it trains.

    Args:
        model: the network, compiled or not.
        optimizer: the optimiser of its weights, several of them, or None. One that is not named here is taken in at
            its first step on held weights.
        mask: name -> True where the weight is kept.

    A copy of the network (`copy.deepcopy`, a pickle, what `compact` makes) is not held: hold it, too, if you train
    it. A deep copy whose weights an optimiser steps without a hold says so, once, by a `HoldWarning`.

    >>> net = nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(net.parameters(), weight_decay=0.1)
    >>> held = hold(net, optimizer, {"weight": torch.tensor([[True, False]])})
    >>> net(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> net.weight[0, 1].item()
    0.0
    >>> held.release()  # from now on, all weights move

    """
    return Held(model, optimizer, mask)


class HoldWarning(UserWarning):
    """A copy of a held network is trained, and nothing holds it."""


class Held:
    """A hold on a network: `mask` is what is kept; `update` changes it, `release` lets go."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, mask: Mapping[str, Tensor]) -> None:
        check_model(model, "hold(model, optimizer, mask)")
        check_mask(mask, "hold(model, optimizer, mask)")
        weights = check_fits(model, mask)
        self._optimizers = listed(optimizer)
        check_free(weights, self._optimizers)
        self._keepers = {name: _Keeper(weight, mask[name]) for name, weight in weights.items()}
        self._mask = _copy(mask)
        self._released = False
        self._handles = [handle for one in self._optimizers for handle in self._watch(one)]
        name_of = {weight: name for name, weight in weights.items()}
        for _, module in owners(model):
            held = {leaf: name_of[p] for leaf, p in module._parameters.items() if p is not None and p in name_of}
            if held:
                hook = _AfterLoad(self, held)
                self._handles.append(module.register_load_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]
        self._adopted: list[weakref.ref[Optimizer]] = []
        _holds.add(self)
        self.clean()

    @property
    def mask(self) -> Mask:
        """What is kept."""
        return self._mask

    def update(self, mask: Mapping[str, Tensor]) -> None:
        """Hold another mask of the same weights from now on."""
        if self._released:
            raise ValueError("this hold was released: make a new one with hold(model, optimizer, mask)")
        if missing := sorted(mask.keys() ^ self._keepers.keys()):
            raise ValueError(f"the new mask must be for the same weights as the old one; {missing[0]} is not in both")
        for name, keeper in self._keepers.items():
            if mask[name].shape != keeper.weight.shape or mask[name].dtype != torch.bool:
                raise ValueError(
                    f"the mask of {name} must be boolean of shape {tuple(keeper.weight.shape)}, "
                    f"got {mask[name].dtype} of shape {tuple(mask[name].shape)}"
                )
        for name, keeper in self._keepers.items():
            keeper.keep(mask[name])
        self._mask = _copy(mask)
        self.clean()

    def release(self) -> None:
        """Let go: weights stay as they are, and train freely from now on."""
        for handle in (*self._handles, *(keeper.handle for keeper in self._keepers.values())):
            handle.remove()
        self._handles.clear()
        _holds.discard(self)
        self._released = True

    def clean(self) -> None:
        """Set everything to zero at removed places: weights, gradients and the optimisers' state."""
        self._clean_weights()
        self._clean_gradients()
        for optimizer in self._all_optimizers():
            self._clean_state(optimizer)
        for keeper in self._keepers.values():
            keeper.forget()

    def _watch(self, optimizer: Optimizer) -> list[Any]:
        return [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._clean_weights()),
            optimizer.register_load_state_dict_post_hook(self._clean_state),
        ]

    def _all_optimizers(self) -> list[Optimizer]:
        return [*self._optimizers, *(one for known in self._adopted if (one := known()) is not None)]

    def _adopt(self, optimizer: Optimizer) -> None:
        """Before a step of any optimiser: take it in if it trains held weights and was not known."""
        if any(one is optimizer for one in self._all_optimizers()):
            return
        trained = {weight for group in optimizer.param_groups for weight in group["params"]}
        if any(keeper.weight in trained for keeper in self._keepers.values()):
            self._adopted.append(weakref.ref(optimizer))
            self._handles += self._watch(optimizer)
            self._clean_gradients()
            self._clean_state(optimizer)

    def _before_step(self) -> None:
        for keeper in self._keepers.values():
            keeper.watch()
            keeper.forget()
        self._clean_gradients()

    def _clean_weights(self) -> None:
        for keeper in self._keepers.values():
            keeper.clean(keeper.weight.data)

    def _clean_gradients(self) -> None:
        for keeper in self._keepers.values():
            keeper.clean_gradient()

    def _clean_state(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS):
            self._clean_lbfgs(optimizer)
            return
        for keeper in self._keepers.values():
            for key, value in optimizer.state.get(keeper.weight, {}).items():
                if isinstance(value, Tensor) and value.shape == keeper.weight.shape:
                    keeper.clean_loaded(value, (optimizer, key))

    def _clean_lbfgs(self, optimizer: LBFGS) -> None:
        """Forget the history, vectors over all weights in a row, if it speaks of removed ones."""
        kept_of = {keeper.weight: keeper.kept for keeper in self._keepers.values()}
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        rows = [kept_of.get(w, torch.ones(w.shape, dtype=torch.bool)).reshape(-1).cpu() for w in weights]
        removed = ~torch.cat(rows)
        history = [value for value in tree_leaves(list(optimizer.state.values())) if isinstance(value, Tensor)]
        if any(value.cpu()[removed].any() for value in history if value.shape == removed.shape):
            optimizer.state.clear()

    def _loaded(self, module: nn.Module, held: Mapping[str, str]) -> None:
        """After load_state_dict of a module: zero again, also where the parameter is a new object."""
        for leaf, name in held.items():
            parameter = module._parameters.get(leaf)
            if parameter is not None:
                self._keepers[name].take(parameter)
                self._keepers[name].clean_loaded(parameter.data, None)


def keep_zero(weight: nn.Parameter, kept: Tensor) -> Callable[[nn.Parameter], None]:
    """Mask the gradients of one weight for as long as it lives: enough for optimisers that never saw others.

    Returns:
        What to call with the weight after something was loaded, into it or in its place.

    """
    keeper = _Keeper(weight, kept)

    def loaded(parameter: nn.Parameter) -> None:
        keeper.take(parameter)
        keeper.clean(parameter.data)

    return loaded


def listed(optimizer: Optimizers) -> list[Optimizer]:
    """The optimisers as a list, or an error that names what is none."""
    optimizers: list[Any] = [optimizer]
    if optimizer is None or (isinstance(optimizer, Iterable) and not isinstance(optimizer, Mapping | str)):
        optimizers = list(optimizer or ())
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise OptionError(f"optimizer must be a torch optimiser, several of them or None, got {brief(one)}")
    return optimizers


def check_free(weights: Mapping[str, Tensor], optimizers: list[Optimizer]) -> None:
    """An error if these weights cannot be held: held already, or trained by other optimisers."""
    for name, weight in weights.items():
        if _is_held(weight):
            raise ValueError(f"{name} is held already: call update(mask) or release() on that hold")
    trained = {w for one in optimizers for group in one.param_groups for w in group["params"]}
    if optimizers and weights and trained.isdisjoint(weights.values()):
        raise ValueError(
            "the optimiser has none of the masked weights: was it made for another model, or before the model "
            "was moved or copied?"
        )


def _copy(mask: Mapping[str, Tensor]) -> Mask:
    return Mask({name: kept.clone() for name, kept in mask.items()}, getattr(mask, "provenance", None))


def _is_held(weight: Tensor) -> bool:
    hooks = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, _MaskGradient) for hook in hooks.values())


Place = tuple[Optimizer, str] | None
"""Where a loaded tensor belongs: None is the weight itself, else a state of an optimiser under a key."""


class _Keeper:
    """One weight and its mask, as bits in the layouts in which it was needed so far; of both, this rank's part."""

    def __init__(self, weight: nn.Parameter, kept: Tensor) -> None:
        self.weight = weight
        self.kept = part(kept, weight).clone()
        self.handle: Any = _Nothing()
        self._bits: dict[Any, Tensor] = {}
        self._loaded: dict[Place, Tensor] = {}
        self._cleaned: tuple[TensorWeakRef, int] | None = None
        self.watch()

    def watch(self) -> None:
        """Mask gradients from now on, if there are any and it is not done yet."""
        if isinstance(self.handle, _Nothing) and self.weight.requires_grad:
            self.handle = self.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _MaskGradient(self)
            )

    def keep(self, kept: Tensor) -> None:
        """Keep other places from now on; what was loaded there since the last step comes back."""
        for place, values in self._loaded.items():
            tensor = self._at(place)
            if tensor is not None:
                old = self.kept.to(tensor.device)
                tensor.copy_(torch.where(old, tensor, values.to(tensor)))
        self.forget()
        self.kept = part(kept, self.weight).clone()
        self._bits.clear()
        self._cleaned = None

    def _at(self, place: Place) -> Tensor | None:
        if place is None:
            return local(self.weight.data)
        optimizer, key = place
        found = optimizer.state.get(self.weight, {}).get(key)
        return local(found) if isinstance(found, Tensor) else None

    def take(self, weight: nn.Parameter) -> None:
        """Go over to another parameter object, which load_state_dict(assign=True) has put in the place."""
        if weight is not self.weight:
            self.handle.remove()
            self.handle = _Nothing()
            self.weight = weight
            self.watch()

    def clean_loaded(self, tensor: Tensor, place: Place) -> None:
        """Clean what may just have been loaded, and remember it until training goes on.

        A checkpoint is loaded in parts, in any order: if its mask comes last, its values are still there.
        """
        tensor = local(tensor)
        values = tensor.detach().clone()
        self.clean(tensor)
        self._loaded.pop(place, None)
        if not torch.equal(values, tensor):
            self._loaded[place] = values

    def forget(self) -> None:
        """Nothing that was loaded is needed any more."""
        self._loaded.clear()

    def clean_gradient(self) -> None:
        """Mask the gradient, whoever has made it."""
        if self.weight.grad is None:
            return
        gradient = local(self.weight.grad)
        if self._is_clean(gradient):
            return
        if gradient.is_sparse:
            self.weight.grad = _masked_sparse(gradient.coalesce(), self.kept.to(gradient.device))
            return
        if any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
            self.weight.grad = gradient = gradient.clone(memory_format=torch.contiguous_format)  # was expanded
        self.clean(gradient)
        self._cleaned = TensorWeakRef(gradient), gradient._version

    def _is_clean(self, gradient: Tensor) -> bool:
        """Whether a gradient is just as the last cleaning has left it: the same tensor, never written to since."""
        if self._cleaned is None:
            return False
        cleaned, version = self._cleaned
        return cleaned() is gradient and gradient._version == version

    def clean(self, tensor: Tensor) -> None:
        """Set removed places to +0.0."""
        tensor = local(tensor)
        layout = (tensor.element_size(), tensor.stride(), tensor.device)
        if layout not in self._bits:
            if len(self._bits) == 2:  # gradient and weight may differ; anything older has been moved or cast
                self._bits.clear()
            self._bits[layout] = bits(self.kept, tensor.detach())
        zero_removed(tensor.detach(), self._bits[layout])


def _masked_sparse(gradient: Tensor, kept: Tensor) -> Tensor:
    """A sparse gradient, such as an embedding's, with zeros at removed places."""
    places = tuple(gradient.indices())
    values = torch.where(kept[places], gradient.values(), 0)
    return torch.sparse_coo_tensor(
        gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    )


class _MaskGradient:
    """Masks a gradient as soon as it is there."""

    def __init__(self, keeper: _Keeper) -> None:
        self._keeper = keeper

    def __call__(self, _: Tensor) -> None:
        self._keeper.forget()
        self._keeper.clean_gradient()


_holds: weakref.WeakSet[Held] = weakref.WeakSet()
"""All holds; none is kept alive. A hook for each might be removed in the middle of some optimiser's step."""


def _tell_holds(optimizer: Optimizer, *_: Any) -> None:
    """Before a step of any optimiser: holds take it in if it trains what they hold."""
    for held in list(_holds):
        held._adopt(optimizer)


register_optimizer_step_pre_hook(_tell_holds)


class _AfterLoad:
    """Reapplies a hold after a module's load_state_dict; copies and pickles of the module get a blank."""

    def __init__(self, held: Held, names: Mapping[str, str]) -> None:
        self._held, self._names = held, names

    def __call__(self, module: nn.Module, _: Any) -> None:
        self._held._loaded(module, self._names)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _Copied:
        return _Copied(_of_copy([self._held._keepers[name].weight for name in self._names.values()], memo))

    def __reduce__(self) -> tuple[type[_Copied], tuple[()]]:
        return _Copied, ()


class _Copied:
    """The hook of a module that was copied from a held one: marks its weights, and those of its own copies."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        self._weights = [TensorWeakRef(weight) for weight in weights]
        for weight in weights:
            _copies[weight] = True

    def __call__(self, *_: Any) -> None:
        """Nothing is to be done when the copy is loaded."""

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _Copied:
        return _Copied(_of_copy([weight for one in self._weights if (weight := one()) is not None], memo))

    def __reduce__(self) -> tuple[type[_Copied], tuple[()]]:
        return _Copied, ()


_copies: Any = WeakTensorKeyDictionary()
"""Weights of deep copies of held networks, until somebody is told of them."""


def _of_copy(weights: Iterable[Tensor], memo: Mapping[int, Any]) -> list[Tensor]:
    """What a deep copy has made of some weights."""
    return [copied for weight in weights if isinstance(copied := memo.get(id(weight)), Tensor)]


def _look_for_copies(optimizer: Optimizer, *_: Any) -> None:
    """Before a step of any optimiser: say, once for each, that the copy which it trains is not held."""
    if not len(_copies) or torch.compiler.is_compiling():
        return
    found = [weight for group in optimizer.param_groups for weight in group["params"] if weight in _copies]
    if any(weight.grad is not None and not _is_held(weight) for weight in found):
        for weight in found:
            del _copies[weight]
        warnings.warn(
            "a copy of a held network is trained, and a copy is not held: its removed weights move. Hold it by "
            "hold(copy, optimizer, mask)",
            HoldWarning,
            stacklevel=4,
        )


register_optimizer_step_pre_hook(_look_for_copies)


class _Nothing:
    def remove(self) -> None:
        """Nothing was registered."""
