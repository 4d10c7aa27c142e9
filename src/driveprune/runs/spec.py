"""What a run is, completely, and its id."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from driveprune import methods, models
from driveprune.batches import Data, check_choice
from driveprune.cut import Budget, check_budget, check_macs
from driveprune.mask import check_sparsity
from driveprune.plan import Plan, Prune, Reinit, Rewind, Shuffle, Train, total_steps
from driveprune.recipes import Recipe
from driveprune.train import PRECISIONS, Precision

SCHEMA = 1
"""Goes up when the same spec would no longer give the same result."""

DENSE = "dense"
"""The method of a run that removes nothing."""

CHECKS = ("", "shuffle", "reinit", "random")
"""Sanity checks after the last cut: the mask shuffled in each layer; new initial weights; both, which is a random
mask with the same layer densities."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All that decides what comes out of a run."""

    recipe: Recipe
    """The training; without its knobs, for those of the method stand below, and no others decide the id."""
    method: str
    sparsity: float
    seed: int = 0
    knobs: Mapping[str, Any]
    """All knobs of the method, defaults included, but for those that came later: their defaults are not said."""
    check: str = ""
    budget: Budget = "weights"
    """What the sparsity is a fraction of."""
    holdout: int = 0
    size: int | None = None
    """Pixels to which the images of a folder are resized."""
    threads: int = 1
    """Of each process."""
    ranks: int = 1
    """Processes that do the run together, each with its share of every batch; the last bits depend on it."""
    device: str = "cpu"
    precision: Precision = "fp32"
    channels_last: bool = False
    model_code: str = ""
    """A checksum of the file with the user's own model; empty for the models of this package."""
    method_code: str = ""
    """The same for the user's own method."""
    fingerprint: str
    """Of the data."""
    official: bool
    """Whether the data are the official ones."""
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        """The name of the run's folder: what a person wants to know, and a hash of everything.

        Two specs have the same id only if they are equal.
        """
        digest = hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
        parts = (
            self.recipe.data, self.recipe.model, self.method, f"{100 * self.sparsity:g}", self.check,
            "" if self.budget == "weights" else self.budget,
        )  # fmt: skip
        words = [re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_.")[-40:] for part in parts if part]
        return "-".join([*words, f"seed{self.seed}", digest[:12]])

    @property
    def beginning(self) -> str:
        """A hash of all that decides how dense training begins, whatever the method will do later."""
        common = replace(self, method="", method_code="", sparsity=0.0, knobs={}, check="", budget="weights")
        return hashlib.sha256(json.dumps(common.to_json(), sort_keys=True).encode()).hexdigest()[:20]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON knows it."""
        plain = {**asdict(self), "recipe": self.recipe.to_json()}
        if self.budget == "weights":
            del plain["budget"]  # so that runs from before there was a choice keep their ids
        if self.ranks == 1:
            del plain["ranks"]
        known: dict[str, Any] = json.loads(json.dumps(plain))
        return known

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Spec:
        """The spec that `to_json` has written."""
        known = {item.name for item in fields(cls)}
        if odd := sorted((content.keys() | {"budget", "ranks"}) ^ known):
            raise ValueError(f"this is no spec of this version of driveprune: {odd[0]!r} is not in both")
        spec = cls(**{**content, "recipe": Recipe.from_json(content["recipe"])})
        spec.check_values()
        return spec

    def check_values(self) -> None:
        """An error that names the first value that no run can have."""
        if self.schema != SCHEMA:
            raise ValueError(f"this is a spec of another version: its schema is {self.schema!r}, not {SCHEMA}")
        for name in ("method", "check", "device", "precision", "model_code", "method_code", "fingerprint"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name} must be a word, got {value!r}")
        if not isinstance(self.official, bool) or not isinstance(self.channels_last, bool):
            raise TypeError(f"official and channels_last must be true or false, got {self.official!r}")
        numbers = self.seed, self.threads, self.holdout, self.ranks
        if any(type(number) is not int for number in numbers):
            found = ", ".join(map(repr, numbers))
            raise TypeError(f"seed, threads, holdout and ranks must be whole numbers, got {found}")
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise ValueError(f"size must be a number of pixels or nothing, got {self.size!r}")
        check_sparsity(self.sparsity)
        check_budget(self.budget)
        if self.check not in CHECKS:
            raise ValueError(f"check must be one of {', '.join(CHECKS[1:])}, got {self.check!r}")
        for name in ("threads", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be {', '.join(PRECISIONS)}, got {self.precision!r}")
        if not isinstance(self.knobs, Mapping):
            raise TypeError(f"knobs must be names and values, got {self.knobs!r}")

    def plan(self, steps_per_epoch: int) -> Plan:
        """What the run does."""
        steps = self.recipe.epochs * steps_per_epoch
        if self.method == DENSE:
            return [Train(steps)]
        plan = methods.make_plan(self.method, self.sparsity, steps, steps_per_epoch, self.knobs)
        return checked(plan, self.check, self.seed)


def make_spec(
    recipe: Recipe,
    data: Data,
    *,
    method: str,
    sparsity: float,
    seed: int = 0,
    knobs: Mapping[str, Any] | None = None,
    check: str = "",
    budget: Budget = "weights",
    holdout: int = 0,
    size: int | None = None,
    threads: int = 1,
    ranks: int = 1,
    device: str = "cpu",
    precision: Precision = "fp32",
    channels_last: bool = False,
) -> Spec:
    """The complete spec of a run; anything that cannot be run is an error here, before a run begins."""
    sparsity = 0.0 if method == DENSE else check_sparsity(sparsity)
    models.check(recipe.model, recipe.width)
    check_choice(data, recipe.images, recipe.test_images, holdout)
    given = {**recipe.knobs.get(method, {}), **(knobs or {})}
    if method == DENSE:
        if knobs or check:
            raise ValueError("dense runs have no knobs and no checks")
        resolved: dict[str, Any] = {}
    else:
        resolved = _resolved(method, given)
    spec = Spec(
        recipe=replace(recipe, sparsities=(), knobs={}), method=method, sparsity=sparsity, seed=int(seed),
        knobs=resolved, check=check, budget="weights" if method == DENSE else budget, holdout=holdout, size=size,
        threads=threads, ranks=ranks, device=str(device),
        precision=precision, channels_last=channels_last, fingerprint=data.fingerprint, official=data.official,
        model_code="" if recipe.model in models.names() else code_of(recipe.model),
        method_code="" if method in {DENSE, *methods.names()} else code_of(method),
    )  # fmt: skip
    spec.check_values()
    total_steps(plan := spec.plan(100))  # bad values of knobs, phases that do not fit into the training
    if spec.budget == "macs":
        check_macs(plan)
    return spec


def _resolved(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All knobs of a method, as JSON knows them, each of the kind of its default: 1 is 1.0 where that is a number."""
    known = methods.knobs(method)
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{method} has no knob {unknown[0]!r}; it has {', '.join(known) if known else 'none'}")
    values = methods.check_knobs(method, {name: _like(value, known[name]) for name, value in given.items()})
    resolved: dict[str, Any] = json.loads(json.dumps({**known, **values}))
    return {
        name: value
        for name, value in resolved.items()
        if not (methods.came_later(method, name) and value == known[name])
    }


def _like(value: Any, default: Any) -> Any:
    """A number as JSON may have it: 100.0 where the knob is a whole number."""
    is_whole = isinstance(value, float) and isinstance(default, int) and value.is_integer()
    return int(value) if is_whole else value


def code_of(name: str) -> str:
    """A checksum of the file in which something of the user's own is, by its dotted name; empty if there is none."""
    found = located(name)
    return "" if found is None else hashlib.sha256(found.read_bytes()).hexdigest()


def located(name: str) -> Path | None:
    """The file that importing a dotted name would read last; nothing is imported, not even the packages around it.

    >>> located("json.decoder.JSONDecoder").name
    'decoder.py'
    """
    last, path = None, None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = ".".join(parts[:count])
        found = _spec_of(module, path)
        if found is None:
            break
        if found.origin and Path(found.origin).is_file():
            last = Path(found.origin)
        path = found.submodule_search_locations
        if path is None:
            break
    return last


def _spec_of(module: str, path: Any) -> ModuleSpec | None:
    """Where a module is, by the finders that an import asks."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__spec__", None)
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    with suppress(ImportError, ValueError, TypeError, OSError):
        return next((found for finder in finders if (found := finder.find_spec(module, path)) is not None), None)
    return None


def checked(plan: Plan, check: str, seed: int) -> Plan:
    """A plan with a sanity check after its last cut (and the rewind that follows it).

    >>> checked([Train(5), Prune(None, (0.9,)), Train(10)], "reinit", seed=3)[2]
    Reinit(seed=3)
    """
    extra: Plan = [Shuffle(seed)] if check in {"shuffle", "random"} else []
    extra += [Reinit(seed)] if check in {"reinit", "random"} else []
    after = 1 + max(
        (place for place, phase in enumerate(plan) if isinstance(phase, Prune | Rewind)), default=len(plan) - 1
    )
    return [*plan[:after], *extra, *plan[after:]]
