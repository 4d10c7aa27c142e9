"""Why a masked weight is not the weight of a sparse layer, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from driveprune.mask import owners

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class SparseWarning(UserWarning):
    """A sparse network may not do what was hoped for: `driveprune.explain` says more."""


def reads_weights(module: nn.Module) -> bool:
    """Whether a module of torch may read its layers' weights itself, as those of transformers do."""
    containers = nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict
    return type(module).__module__.startswith("torch.nn.") and type(module) not in containers


def share(mask: Mapping[str, Tensor], sparse: Collection[str]) -> float:
    """How many of the masked weights, kept or not, are those of sparse layers."""
    return sum(mask[name].numel() for name in sparse) / max(1, sum(kept.numel() for kept in mask.values()))


def reasons(plain: nn.Module, mask: Mapping[str, Tensor], sparse: Collection[str]) -> dict[str, str]:
    """For each masked weight of an ordinary network that is not in a sparse layer, why."""
    places: dict[nn.Parameter, list[str]] = {}
    modules: dict[str, nn.Module] = {}
    for prefix, module in owners(plain):
        modules[prefix.rstrip(".")] = module
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append(prefix + leaf)
    return {name: _reason(name, modules, places) for name in mask if name not in sparse}


def _reason(name: str, modules: Mapping[str, nn.Module], places: Mapping[nn.Parameter, list[str]]) -> str:
    path, _, leaf = name.rpartition(".")
    module = modules[path]
    around = modules.get(path.rpartition(".")[0]) if path else None
    kind = type(module).__name__
    if leaf != "weight" and reads_weights(module) and not isinstance(module, nn.ParameterList | nn.ParameterDict):
        return f"nn.{kind} reads its weights itself"
    if around is not None and reads_weights(around):
        return f"nn.{type(around).__name__} reads the weights of its layers itself"
    if leaf != "weight":
        return "only the weights of linear layers and convolutions can be sparse"
    if any(getattr(module, each) for each in HOOKS):
        return "the layer has hooks"
    unknown = _unknown(module)
    if unknown:
        return unknown
    others = [other for each in module._parameters.values() if each is not None for other in places[each]]
    others = [other for other in others if other.rpartition(".")[0] != path]
    if others:
        return f"a shared weight: it is {others[0]}, too"
    return "the network's own code reads its weight"


def _unknown(module: nn.Module) -> str | None:
    """Why a layer is none that the kernels know; None if it is one."""
    kind = type(module)
    if kind is nn.Conv2d:
        return _odd_convolution(module)  # type: ignore[arg-type]
    if kind is nn.Linear:
        return None
    for base in (nn.Linear, nn.Conv2d):
        if isinstance(module, base):
            return f"{kind.__name__} is a class of its own, made from nn.{base.__name__}: it may do something else"
    home = kind.__module__.partition(".")[0]
    return f"{kind.__name__} of {home} is not a layer that the sparse kernels know"


def _odd_convolution(module: nn.Conv2d) -> str | None:
    if module.groups > 1:
        depthwise = module.groups == module.in_channels
        return "a depthwise convolution" if depthwise else f"a convolution in {module.groups} groups"
    if module.padding_mode != "zeros":
        return f"a convolution with {module.padding_mode} padding"
    if module.padding == "same" and any(
        gap * (kernel - 1) % 2 for gap, kernel in zip(module.dilation, module.kernel_size, strict=True)
    ):
        return "a convolution with more padding on one side than on the other"
    return None
