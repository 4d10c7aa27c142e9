"""Losses and weights that are not finite: seen in time, and where it began."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from driveprune.collectives import local
from driveprune.mask import buffers, parameters, restore


class Losses:
    """The mean loss of an epoch, and the step from which on so many losses in a row were not finite.

    All is kept on the device: whoever asks waits for it, and whoever adds does not.

    >>> losses = Losses(torch.device("cpu"), patience=1)
    >>> losses.add(torch.tensor(2.0), step=1)
    >>> losses.mean(1), losses.broken()
    (2.0, None)
    >>> losses.add(torch.tensor(float("nan")), step=2)
    >>> losses.broken()
    2
    """

    def __init__(self, device: torch.device, patience: int) -> None:
        self._patience = patience
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._left_out, self._row, self._broken = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)
        )

    def begin(self) -> None:
        """Begin an epoch."""
        self._sum.zero_()
        self._left_out.zero_()

    def add(self, loss: Tensor, step: int) -> None:
        """Add the loss of a step, counted from 1; one that is not finite counts for nothing in the mean."""
        loss = loss.to(self._sum.device)
        is_finite = loss.isfinite()
        self._sum += torch.where(is_finite, loss, 0)
        self._left_out += ~is_finite
        self._row = torch.where(is_finite, 0, self._row + 1)
        is_first = (self._row >= self._patience) & (self._broken == 0)
        self._broken = torch.where(is_first, step - self._row + 1, self._broken)

    def broken(self) -> int | None:
        """The first step of too many in a row."""
        return int(self._broken) or None

    def mean(self, count: int) -> float:
        """The mean of the losses since the epoch began, of which there were so many."""
        return float(self._sum) / max(1, count - int(self._left_out))

    def state(self) -> dict[str, Tensor]:
        """What is known of the epoch under way."""
        return {"losses": self._sum, "left_out": self._left_out}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what was known of an epoch."""
        self._sum = state["losses"].to(self._sum.device)
        self._left_out.fill_(state.get("left_out", 0))


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds NaN or infinity.

    >>> first_not_finite({"a": torch.ones(2), "b": torch.tensor([1, float("inf")])})
    'b'
    """
    flags = {
        name: local(tensor).detach().isfinite().all()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }
    if not flags:
        return None
    device = next(iter(flags.values())).device
    known = torch.stack([flag.to(device) for flag in flags.values()]).cpu()  # waits for a device once, not for each
    return None if bool(known.all()) else list(flags)[int((~known).nonzero()[0])]


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The weights that an optimiser may change. A frozen one may be infinite on purpose."""
    return {name: weight for name, weight in parameters(model).items() if weight.requires_grad}


def origin(model: nn.Module, batch: Any, loss: Callable[[], Tensor]) -> str | None:
    """Where it began that a loss is not finite, in words; None if it is finite when it is computed once more.

    Looked at in this order: the batch, the weights, the outputs of the modules. The model is left as it was.
    """
    if (found := _in_batch(batch, torch.isnan)) is not None:
        return f"the batch itself holds NaN, in {found}: look at the data"
    infinite = _in_batch(batch, torch.isinf)  # which may be on purpose, in what is added to masked places
    beside = "" if infinite is None else f"; the batch itself holds infinity, in {infinite}"
    if (name := first_not_finite(trained(model))) is not None:
        return f"the weights {name} hold {_odd(parameters(model)[name])}{beside}"
    before = {name: value.clone() for name, value in buffers(model).items()}
    try:
        with _listening(model) as heard:
            value = loss()
    except Exception as error:
        return f"where it began is not known: computed once more, it raises {type(error).__name__}: {error}{beside}"
    finally:
        restore(buffers(model), before)
    if bool(value.detach().isfinite().all()):
        return None
    if not heard:
        return f"all modules' outputs are finite: it begins in the loss itself{beside}"
    name, module, odd = heard[0]
    return f"it begins in the output of {name or 'the model'} ({type(module).__name__}), which holds {odd}{beside}"


def _in_batch(batch: Any, is_odd: Callable[[Tensor], Tensor]) -> str | None:
    """The first tensor of a batch that holds something odd, and the example."""
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(is_odd(leaf).any()):
            place = f"batch{keystr(path)}"
            return f"{place}, example {int(is_odd(leaf).nonzero()[0, 0])}" if leaf.dim() else place
    return None


@contextmanager
def _listening(model: nn.Module) -> Iterator[list[tuple[str, nn.Module, str]]]:
    """Note the modules whose outputs are not finite, in the order in which they end."""
    heard: list[tuple[str, nn.Module, str]] = []
    handles = []
    for name, module in model.named_modules():

        def note(module: nn.Module, _: object, output: object, name: str = name) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            if odd := next((_odd(tensor) for tensor in tensors if not bool(tensor.detach().isfinite().all())), None):
                heard.append((name, module, odd))

        handles.append(module.register_forward_hook(note))
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _odd(tensor: Tensor) -> str:
    return "NaN" if bool(local(tensor).detach().isnan().any()) else "infinity"
