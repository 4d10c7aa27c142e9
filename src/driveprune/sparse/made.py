"""What `sparsify` makes of a network: an instance of the network's own class, and what it remembers."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from driveprune.frozen import check_settable
from driveprune.hold import Held
from driveprune.mask import SPARSE_MARK, Mask, mark_sparse
from driveprune.sparse.choice import Measured
from driveprune.sparse.graphs import Graphs
from driveprune.sparse.layers import SparseLayer, Ways
from driveprune.sparse.reasons import SparseWarning

_RECORD = "_sparsified"
RECORDS = (_RECORD, SPARSE_MARK, "mask", "origin")
"""Attributes of a sparse network that are not the ordinary network's."""


@dataclass
class Origin:
    """What a sparse network was made from: enough to make the ordinary one again."""

    skeleton: nn.Module
    """The ordinary network without any numbers in it."""
    held: Held | None
    """The hold on removed weights of layers that are not sparse ones."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Origin, (self.skeleton, None)  # a copy is held by hooks of its own, see pattern.py


@dataclass
class Made:
    """What a sparse network remembers of its making."""

    origin: Origin
    mask: Mask
    ways: Ways
    graphs: Graphs | None = None
    """None if the layers run one by one, in the network's own code."""
    timings: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a masked weight is not a sparse layer's, by its name."""
    fallbacks: tuple[str, ...] = ()
    """Why the network runs by its own code, layer by layer."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Made:
        return Made(**{each.name: copy.deepcopy(getattr(self, each.name), memo) for each in fields(self)})

    def __getstate__(self) -> dict[str, Any]:
        """For a file: the mask in bits."""
        packed = {name: (np.packbits(kept.cpu().numpy()), tuple(kept.shape)) for name, kept in self.mask.items()}
        return {**self.__dict__, "mask": (packed, self.mask.provenance)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed, provenance = state["mask"]
        mask = Mask({name: _unpacked(*each) for name, each in packed.items()}, provenance)
        self.__dict__.update({**state, "mask": mask})

    def graphs_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graphs | None:
        """The network's graphs, if they stand for what its code would do for these inputs."""
        if self.graphs is None or self.graphs.decide_otherwise(args, kwargs) is not None:
            return None
        why = self.graphs.why_not()
        if why is None:
            return self.graphs
        said = f"{why}, after sparsify: the network runs by its own code, layer by layer"
        if said not in self.fallbacks:
            self.fallbacks = (*self.fallbacks, said)
            warnings.warn(said, SparseWarning, stacklevel=4)
        return None

    def fill_in(self) -> None:
        """Let torch compute everything from now on, with zeros filled in, as in the ordinary network's own code."""
        self.ways.inference = self.ways.training = "channels last"


def _unpacked(packed: Any, shape: tuple[int, ...]) -> Tensor:
    flat = np.unpackbits(packed, count=int(np.prod(shape, dtype=np.int64)))
    return torch.from_numpy(flat.astype(bool)).view(shape)


def made_of(model: object) -> Made | None:
    """What a network that sparsify made remembers; None for other networks."""
    found = getattr(model, "__dict__", {}).get(_RECORD)
    return found if isinstance(found, Made) else None


def remember(net: nn.Module, made: Made) -> None:
    """Make a network known as one that sparsify has made."""
    net.__dict__[_RECORD] = made
    for module in net.modules():
        if isinstance(module, SparseLayer):
            mark_sparse(module)
    mark_sparse(net)
    if made.graphs is None and not isinstance(net, SparseNetwork):
        for name in ("mask", "origin"):
            if not hasattr(net, name):
                net.__dict__[name] = getattr(made, name)


class SparseNetwork(nn.Module):
    """A network whose sparse layers run together, in regions; made by `sparsify`.

    It is an instance of a class made of this one and the network's own, so that the network's methods and attributes
    are there, and use the kept weights.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the ordinary network would compute."""
        made, own = made_of(self), type(self).__dict__.get("_own")
        if made is not None and made.graphs is not None and (own is None or made.ways.now() == "sparse"):
            graphs = made.graphs_for(args, kwargs) if made.ways.now() == "sparse" else None
            if graphs is not None:
                return graphs(self, args, kwargs)
            if own is None:
                return made.graphs.without_regions(self, args, kwargs)
        return own.forward(self, *args, **kwargs)  # type: ignore[union-attr]

    def __setattr__(self, name: str, value: Any) -> None:
        check_settable(self, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """What the network's own class knows; beside that, the parts of a sparse network, such as its mask."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            made = made_of(self)
            if made is not None and name in _SHOWN:
                return _SHOWN[name](made)
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies and files: the class is made anew from the network's own."""
        own = type(self).__dict__.get("_own")
        found = super().__reduce_ex__(protocol)
        if isinstance(found, str) or getattr(found[0], "__name__", "") != "__newobj__":
            return found  # the network's own class says how it is copied
        return _blank, (own,), *found[2:]


_SHOWN: dict[str, Callable[[Made], Any]] = {
    "origin": lambda made: made.origin,
    "mask": lambda made: made.mask,
    "graph": lambda made: made.graphs.graph if made.graphs else None,
    "parts": lambda made: made.graphs.parts if made.graphs else {},
    "regions": lambda made: made.graphs.regions if made.graphs else {},
    "dense": lambda made: made.ways.inference != "sparse" and made.ways.training != "sparse",
    "fill_in": lambda made: made.fill_in,
}
"""What a network shows where it has no attributes of these names itself."""


def in_regions(net: nn.Module, graphs: Graphs) -> nn.Module:
    """A network that runs by graphs from now on; the same object, if it has a class of its own."""
    if not isinstance(net, fx.GraphModule):
        object.__setattr__(net, "__class__", _class_for(type(net)))
        return net
    found = SparseNetwork()  # the class of a traced network is its graph: without it there is nothing to keep
    found.__dict__["_frozen"] = net.__dict__.get("_frozen", set())
    for name in found.__dict__.keys() & net.__dict__.keys():
        found.__dict__[name] = net.__dict__[name]
    return found


def _blank(own: type[nn.Module] | None) -> SparseNetwork:
    """An instance for a state to be put in."""
    kind = SparseNetwork if own is None else _class_for(own)
    return kind.__new__(kind)


def _class_for(own: type[nn.Module]) -> type[SparseNetwork]:
    """The class of sparse networks that are networks of a class, too."""
    for known in type.__subclasses__(own):
        if known.__dict__.get("_own") is own:
            return known  # type: ignore[return-value]
    content = {"_own": own, "forward": _forward_like(own), "__module__": own.__module__}
    name = f"Sparse{own.__name__}"
    made: Any = types.new_class(name, (SparseNetwork, own), {}, lambda space: space.update(content))
    return made  # type: ignore[no-any-return]


def _forward_like(own: type[nn.Module]) -> Callable[..., Any]:
    """A forward with the signature and the documentation of a class's own."""

    @functools.wraps(own.forward)
    def forward(self: SparseNetwork, *args: Any, **kwargs: Any) -> Any:
        return SparseNetwork.forward(self, *args, **kwargs)

    return forward
