"""torch.nn.utils.prune: masks from networks that it has pruned, and to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from driveprune.mask import Mask, apply, check_fits, check_ordinary, owners, parameters

_VALUES, _MASK = "_orig", "_mask"


def from_torch(model: nn.Module) -> Mask:
    """Take over from torch.nn.utils.prune: its masks are returned, and the model is an ordinary one afterwards.

    Parameters have their own names again (`weight`, not `weight_orig`) and stay the same objects, so that optimisers
    need not be made anew. Removed weights are zero; `driveprune.hold` keeps them there.

    >>> net = prune.l1_unstructured(nn.Linear(4, 2), "weight", amount=6)
    >>> mask = from_torch(net)
    >>> list(net.state_dict()), int(mask["weight"].sum())
    (['bias', 'weight'], 2)
    """
    check_ordinary(model)
    kept: dict[nn.Parameter, Tensor] = {}
    for _, module in owners(model):
        for leaf in [name.removesuffix(_VALUES) for name in module._parameters if name.endswith(_VALUES)]:
            buffer = module._buffers.get(leaf + _MASK)
            if buffer is None:
                continue
            prune.remove(module, leaf)  # type: ignore[no-untyped-call]
            weight = module._parameters[leaf]
            assert weight is not None
            kept[weight] = buffer.bool() & kept.get(weight, torch.ones_like(buffer, dtype=torch.bool))
    if not kept:
        raise ValueError("nothing in this model was pruned by torch.nn.utils.prune")
    mask = Mask({name: kept[weight] for name, weight in parameters(model).items() if weight in kept})
    apply(model, mask)
    return mask


def to_torch(model: nn.Module, mask: Mapping[str, Tensor]) -> None:
    """Hand a mask over to torch.nn.utils.prune, which multiplies by it in every forward pass.

    Removed weights are set to zero first. Tied weights get the mask under each of their names.

    >>> net = nn.Linear(2, 1)
    >>> to_torch(net, {"weight": torch.tensor([[True, False]])})
    >>> prune.is_pruned(net), net.weight_mask
    (True, tensor([[1., 0.]]))
    """
    apply(model, mask)
    kept = {weight: mask[name] for name, weight in check_fits(model, mask).items()}
    for module in {id(module): module for _, module in owners(model)}.values():
        found = [leaf for leaf, weight in module._parameters.items() if weight is not None and weight in kept]
        for leaf in found:
            own = kept[module._parameters[leaf]]  # type: ignore[index]
            prune.custom_from_mask(module, leaf, own)  # type: ignore[no-untyped-call]
