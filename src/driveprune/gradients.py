"""Gradients of the loss for scoring: averaged over batches and ranks, and without a trace in the model."""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.loss import _Loss
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from driveprune import collectives
from driveprune.collectives import is_sharded, local, placed, together
from driveprune.kinds import Count, Mode, OptionError, brief, checked, qualified
from driveprune.mask import Loss, owners, parameters, unwrap
from driveprune.seeds import seed_for
from driveprune.whole import summed_part, whole_weights


def cross_entropy(model: nn.Module, batch: Any, *, smoothing: float = 0.0) -> Tensor:
    """The default loss: the model's logits of x against the classes y, for a batch (x, y)."""
    if not (isinstance(batch, Sequence) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
        raise ValueError(
            f"a batch must be a pair of tensors (inputs, classes), got {_describe(batch)}; "
            "for other batches and losses pass loss=, a function of (model, batch)"
        )
    if batch[1].dim() == 0:
        raise ValueError(
            "a batch must be a pair of tensors (inputs, classes), got a single example: its class has no dimension. "
            "Batches are made of examples by a torch.utils.data.DataLoader with a batch size"
        )
    device = next(model.parameters()).device
    x, y = (part.to(device, non_blocking=True) for part in batch)
    return F.cross_entropy(model(x), y, label_smoothing=smoothing)


_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw a new order each time they are begun."""


def endless(batches: Iterable[Any] | None, skip: int = 0, seed: int = 0) -> Iterator[Any]:
    """One batch after the other, from the start again when they end; a one-shot iterator that ends raises.

    `skip` batches are passed over first; what shuffles begins a new order instead, for that costs nothing.
    """
    if batches is None:
        raise ValueError("this method looks at data: pass batches, a list of batches or a data loader")
    check_collection(batches)
    if skip and not isinstance(batches, Iterator):
        yield from _after(batches, skip, seed)
    if isinstance(batches, DataLoader) and batches.persistent_workers:
        batches = copy.copy(batches)  # workers of our own: the user's may be in the middle of an epoch
        batches._iterator = None
    served = 0
    while True:
        before = served
        for batch in batches:
            served += 1
            yield batch
        if served == 0:
            raise ValueError("batches is empty, or was used up before: there is nothing to score with")
        if served == before or isinstance(batches, Iterator):
            raise ValueError(
                f"the batch iterator ran out after {served} batches: pass something that can be iterated again, "
                "such as a list or a data loader"
            )


def _after(batches: Iterable[Any], skip: int, seed: int) -> Iterator[Any]:
    """The endless row of batches without the first `skip` ones; in a new order where batches are shuffled."""
    with suppress(TypeError, ZeroDivisionError):  # of unknown length, or empty
        skip %= len(batches)  # type: ignore[arg-type]
    if callable(begin := getattr(batches, "scoring_from", None)):
        return chain(begin(skip), endless(batches))
    if isinstance(batches, DataLoader) and type(batches.sampler) in _SHUFFLING:
        for generator in generators_of(batches):
            generator.manual_seed(seed_for(seed, "skip", skip))
        return endless(batches)
    return islice(endless(batches), skip, None)


def check_collection(batches: Any) -> None:
    """An error if this is no collection of batches, but one batch, single examples, or something else."""
    if isinstance(batches, tuple) and batches and all(isinstance(part, Tensor) for part in batches):
        raise ValueError("batches must be a collection of batches, got one batch: pass [(x, y)]")
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise OptionError(
            "batches must be a collection of batches, and a Dataset has single examples: wrap this "
            f"{type(batches).__name__} in a torch.utils.data.DataLoader with a batch size"
        )
    if isinstance(batches, str | Mapping | Tensor | nn.Module) or not (
        hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    ):
        raise OptionError(
            "batches must be a collection of batches, such as a data loader or a list of (x, y), got "
            f"{brief(batches)}"
        )


_TARGETS = {"target", "targets", "label", "labels", "y", "y_true", "true", "gt"}
"""What the second argument of a loss of (output, target) is called, and no batch is."""


def check_loss(loss: Any) -> None:
    """An error if this is no loss of (model, batch), but one of (output, target), as those of torch are."""
    if wrong := _not_of_batches(loss):
        raise OptionError(
            f"loss must be a function of (model, batch) that returns a scalar, {wrong}: write loss=lambda model, "
            "batch: criterion(model(batch[0]), batch[1])"
        )


def check_measure(measure: Any) -> None:
    """An error if this is no measure of (model, batch)."""
    if wrong := _not_of_batches(measure):
        raise OptionError(
            f"measure must be a function of (model, batch) that returns a value an example, {wrong}: write "
            "measure=lambda model, batch: metric(model(batch[0]), batch[1])"
        )


def _not_of_batches(function: Any) -> str:
    """Why a function cannot be one of (model, batch), if so."""
    inner = function.func if isinstance(function, functools.partial) else function
    kind = type(inner) if isinstance(inner, nn.Module) else inner
    is_torchs = (getattr(kind, "__module__", None) or "").partition(".")[0] == "torch"
    if not callable(function):
        return f"got {brief(function)}"
    if is_torchs or isinstance(function, type) or isinstance(inner, _Loss):
        return f"and {qualified(function)} is one of outputs and targets"
    names = _first_two(inner.forward if isinstance(inner, nn.Module) else function)
    if names is None:
        return f"and {qualified(function)} does not take these two"
    if names[1:] and names[1].lower() in _TARGETS:
        return f"and {qualified(function)} is one of ({', '.join(names)})"
    return ""


def _first_two(function: Any) -> list[str] | None:
    """The names of the arguments for two values; None if a function does not take two, nothing if it is not known."""
    try:
        signature = inspect.signature(function)
        return list(signature.bind(None, None).arguments)
    except TypeError:
        return None
    except ValueError:  # the signature of this function is not known
        return []


def batch_size(batch: Any) -> int:
    """How many examples a batch holds: the length of the first tensor in it (1 where there is none)."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = batch
    return next((batch_size(part) for part in parts if isinstance(part, Tensor | Mapping | Sequence)), 1)


def check_batches(count: int, combine: str = "mean") -> None:
    """An error if so many batches cannot be combined in this way."""
    checked("batches_per_cut", count, Count)
    checked("combine", combine, Literal["mean", "squares"])


def gradients(
    model: nn.Module,
    names: Iterable[str],
    batches: Iterator[Any],
    *,
    loss: Loss,
    count: int = 1,
    combine: Literal["mean", "squares"] = "mean",
) -> dict[str, Tensor]:
    """The gradient g of the loss for the named parameters, over the next `count` batches.

    "mean" treats the batches as one large batch: the mean of their gradients, weighted by their sizes.
    "squares" gives √Σ_b g_b², which is formed without squaring, so that nothing underflows. Half-precision
    gradients are combined in float32. With several ranks a batch is that of all ranks together, the same as one
    process would have; the gradients of sharded parameters are sharded alike.
    """
    check_batches(count, combine)
    weights = _named(model, names)
    total: dict[str, Tensor] = {}
    examples = 0
    with differentiable(weights.values()):
        for batch in _drawn(batches, count):
            own, new = _over_ranks(model, weights, batch, loss)
            if not total:
                total = {name: _at_least_float32(g) for name, g in own.items()}
            elif combine == "squares":
                total = {name: torch.hypot(t, own[name].to(t.dtype)) for name, t in total.items()}
            else:
                share = new / (examples + new)  # not in place: gradients may be one tensor, or expanded
                total = {name: torch.lerp(t, own[name].to(t.dtype), share) for name, t in total.items()}
            examples += new
    return total


def _drawn(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """The next `count` batches; if they end on one rank, all raise."""
    batches = islice(batches, count)
    while True:
        with together():
            batch = next(batches, batches)
        if batch is batches:
            return
        yield batch


def _over_ranks(
    model: nn.Module, weights: Mapping[str, nn.Parameter], batch: Any, loss: Loss
) -> tuple[dict[str, Tensor], int]:
    """The gradient for a batch, of which each rank has a share, and the number of examples on all ranks."""
    size = batch_size(batch)
    (examples,) = collectives.total(size)
    if any(is_sharded(weight) for weight in weights.values()):
        return _sharded_gradient(model, weights, batch, loss, size * collectives.size() / examples), int(examples)
    with together():
        if size == 0 and examples:
            own = [torch.zeros_like(weight) for weight in weights.values()]
        else:
            own = _gradient(model, list(weights.values()), batch, loss)
    return collectives.mean(dict(zip(weights, own, strict=True)), size), int(examples)


def _sharded_gradient(
    model: nn.Module, weights: Mapping[str, nn.Parameter], batch: Any, loss: Loss, factor: float
) -> dict[str, Tensor]:
    """The gradient as `fully_shard` makes it: the mean over ranks, each of which multiplies its loss by a factor."""
    try:
        with together():
            value = _finite(loss(model, batch), lambda: "its layers are sharded and were not searched")
    except Exception:
        collectives.reshard(model)
        raise
    found = backward(model, weights, value * factor)
    plain = {name: g for name, g in found.items() if not is_sharded(g)}  # of parameters that are left out of sharding
    return found | collectives.mean(plain, 1.0)


def backward(model: nn.Module, weights: Mapping[str, nn.Parameter], value: Tensor) -> dict[str, Tensor]:
    """Gradients by a backward pass as in training, which sharded parameters need; `.grad` is None afterwards.

    Holds do not see it: the gradients of removed weights are found, too.
    """
    frozen = [name for name, weight in weights.items() if is_sharded(weight) and not weight.requires_grad]
    if frozen:
        raise ValueError(f"{frozen[0]} is frozen and sharded: its gradient is not known, leave it out")
    known: dict[Any, Any] = {weight: weight._post_accumulate_grad_hooks for weight in weights.values()}
    try:
        for weight in known:
            weight._post_accumulate_grad_hooks = None
        value.sum().backward()  # type: ignore[no-untyped-call]
        return {name: _taken(weight) for name, weight in weights.items()}
    finally:
        for weight, hooks in known.items():
            weight._post_accumulate_grad_hooks = hooks
        for parameter in model.parameters():
            parameter.grad = None


def _taken(weight: nn.Parameter) -> Tensor:
    """A weight's gradient, sharded as the weight is."""
    if weight.grad is None:
        return placed(torch.zeros_like(local(weight)), weight)
    if not is_sharded(weight):
        return weight.grad
    known: Any = weight
    found: Tensor = weight.grad.redistribute(known.device_mesh, known.placements)  # type: ignore[attr-defined]
    return found.detach()


def hessian_gradients(
    model: nn.Module, names: Iterable[str], batches: Iterator[Any], *, loss: Loss, count: int = 1
) -> dict[str, Tensor]:
    """The Hessian of the loss times its gradient, H·g, both over the same `count` batches as one.

    With several ranks a batch is that of all ranks together. Where parameters are sharded, every rank has them all
    for a while; of the product it keeps its part.
    """
    check_batches(count)
    sharded = _named(model, names)
    drawn = list(_drawn(batches, count))
    with whole_weights(model):
        product = _own_product(model, list(sharded), drawn, loss)
        return {name: summed_part(product.pop(name), weight) for name, weight in sharded.items()}


def _own_product(model: nn.Module, names: list[str], drawn: list[Any], loss: Loss) -> dict[str, Tensor]:
    """What this rank's batches add to the product of all ranks' Hessian and gradient."""
    weights = _named(model, names)
    sizes = [batch_size(batch) for batch in drawn]
    (examples,) = collectives.total(sum(sizes))
    g = gradients(model, names, iter(drawn), loss=loss, count=len(drawn))
    product = {name: torch.zeros_like(g[name]) for name in names}
    # Fused attention kernels have no second derivative; the plain one has.
    with together(), differentiable(weights.values()), sdpa_kernel(SDPBackend.MATH):
        for batch, size in ((batch, size) for batch, size in zip(drawn, sizes, strict=True) if size):
            slope = _slope(model, weights, g, batch, loss)
            for name, h in zip(names, _grad(slope, list(weights.values())), strict=True):
                product[name].add_(h.to(product[name].dtype), alpha=size / examples)
    return product


def _slope(
    model: nn.Module, weights: Mapping[str, nn.Parameter], direction: Mapping[str, Tensor], batch: Any, loss: Loss
) -> Tensor:
    """The derivative of the loss in a direction, which can be differentiated again."""
    own = dict(zip(weights, _gradient(model, list(weights.values()), batch, loss, twice=True), strict=True))
    return sum(((g * direction[name].to(g.dtype)).sum() for name, g in own.items()), torch.tensor(0.0))


def _named(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    known = parameters(model)
    return {name: known[name] for name in names}


def _gradient(
    model: nn.Module, weights: list[nn.Parameter], batch: Any, loss: Loss, twice: bool = False
) -> list[Tensor]:
    value = _finite(loss(model, batch), lambda: _first_bad_layer(model, batch, loss))
    return _grad(value, weights, twice)


def _finite(value: Any, where: Callable[[], str]) -> Tensor:
    """A loss, or an error that says what is wrong with it."""
    if not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"loss must return a scalar tensor, got {_describe(value)}")
    if not value.isfinite():
        raise ValueError(f"the loss is {value.item()} on a scoring batch; {where()}")
    if not value.requires_grad:
        raise ValueError(
            "the loss has no gradient, so no weight can be scored by it: it must use the model's output without "
            ".detach(), .item(), .argmax() or torch.no_grad()"
        )
    return value


def _grad(value: Tensor, weights: list[nn.Parameter], twice: bool = False) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(weight) for weight in weights]
    total = value.sum()
    # What torch.autograd.grad does; but that one leaves `_NoDropout`, and checkpointing would drop out anew.
    found = _engine_run_backward(
        (total,), (torch.ones_like(total),), twice, twice, tuple(weights), True, accumulate_grad=False
    )
    return [
        torch.zeros_like(w) if g is None else g.to_dense() if g.is_sparse else g
        for w, g in zip(weights, found, strict=True)
    ]


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() < 4 else tensor


def _first_bad_layer(model: nn.Module, batch: Any, loss: Loss) -> str:
    """Say which weight or which layer's output is the first that is not finite."""
    for name, weight in parameters(model).items():
        if not weight.isfinite().all():
            return f"the weights of {name} hold NaN or infinity"
    bad: list[str] = []
    with ExitStack() as hooks, torch.no_grad():
        for path, module in owners(model):

            def look(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
                if isinstance(output, Tensor) and not output.isfinite().all():
                    bad.append(path.rstrip("."))

            hooks.callback(module.register_forward_hook(look).remove)
        loss(model, batch)
    return (
        f"the first layer with such an output is {bad[0] or 'the model itself'}" if bad else "its layers are finite"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


@contextmanager
def differentiable(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Frozen weights take part in differentiation for a while; gradients are enabled, whatever surrounds."""
    frozen = [weight for weight in weights if not weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        with torch.enable_grad(), torch.inference_mode(False):
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


@contextmanager
def scoring(model: nn.Module, seed: int) -> Iterator[nn.Module]:
    """The unwrapped model as in training but with dropout off; afterwards no trace of what was done with it.

    Dropout is off as a module, as a function and inside attention and recurrent layers. Training flags, buffers
    (running statistics), gradients and the random state of torch, numpy and Python are put back. Inside, all three
    are seeded, so that loaders and augmentation repeat. A model in evaluation mode is scored in training mode; a
    frozen normalisation layer of a model in training stays as it is.
    """
    model = unwrap(model)
    with _same_flags(model), same_buffers(model), _same_gradients(model), seeded(model, seed), _fresh_casts():
        if not model.training:
            model.train()
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.training = False
            elif isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        with eager(model), _NoDropout():
            yield model


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Parts of the model that are compiled run as written for a while: nothing is compiled again just to score."""
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


class _NoDropout(TorchFunctionMode):
    """Functions that drop out at random let everything through."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = args[:4], {**kwargs, **dict(zip(("dropout_p", "is_causal"), args[4:], strict=False))}
            kwargs["dropout_p"] = 0.0
        return function(*args, **kwargs)


_DROPOUTS = {
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"),
    *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
}


@contextmanager
def _fresh_casts() -> Iterator[None]:
    """Forget copies of weights that autocast made before, and those that it makes meanwhile."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def in_mode(model: nn.Module, mode: Mode) -> Iterator[None]:
    """The model in evaluation mode for a while, or as it is, as in training."""
    checked("mode", mode, Mode)
    with evaluating(model) if mode == "evaluation" else nullcontext():
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in evaluation mode for a while."""
    with _same_flags(model):
        model.eval()
        yield


@contextmanager
def _same_flags(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    dropout = [(module, module.dropout) for module in model.modules() if isinstance(module, nn.RNNBase)]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
        for module, rate in dropout:
            module.dropout = rate


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """The buffers of a model, put back afterwards to what they were."""
    kept = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                module._buffers[name] = buffer


@contextmanager
def _same_gradients(model: nn.Module) -> Iterator[None]:
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def generators_of(batches: Any) -> set[torch.Generator]:
    """The generators that a data loader was given for itself or its samplers."""
    sampler, batch_sampler = (getattr(batches, name, None) for name in ("sampler", "batch_sampler"))
    holders = (batches, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    return {g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)}


@contextmanager
def same_generators(batches: Any) -> Iterator[None]:
    """The generators that a data loader was given, put back afterwards to where they were."""
    states = [(generator, generator.get_state()) for generator in generators_of(batches)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """The random state of torch, numpy and Python seeded for a while, and put back afterwards."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device.index or 0 for device in devices], device_type=kind):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
