"""What a run is, completely, and its id."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from driveprune import methods
from driveprune.batches import Data
from driveprune.mask import check_sparsity
from driveprune.plan import Plan, Prune, Reinit, Rewind, Shuffle, Train, total_steps
from driveprune.recipes import Recipe
from driveprune.train import Precision

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
    """The training; of its knobs only those of the method, so that nothing else decides the id."""
    method: str
    sparsity: float
    seed: int = 0
    knobs: Mapping[str, Any]
    """All knobs of the method, defaults included."""
    check: str = ""
    holdout: int = 0
    size: int | None = None
    """Pixels to which the images of a folder are resized."""
    threads: int = 1
    device: str = "cpu"
    precision: Precision = "fp32"
    channels_last: bool = False
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
        parts = (self.recipe.data, self.recipe.model, self.method, f"{100 * self.sparsity:g}", self.check)
        words = [re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_.")[-40:] for part in parts if part]
        return "-".join([*words, f"seed{self.seed}", digest[:12]])

    @property
    def beginning(self) -> str:
        """A hash of all that decides how dense training begins, whatever the method will do later."""
        common = replace(
            self, method="", sparsity=0.0, knobs={}, check="", recipe=replace(self.recipe, knobs={}, sparsities=())
        )
        return hashlib.sha256(json.dumps(common.to_json(), sort_keys=True).encode()).hexdigest()[:20]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON knows it."""
        plain = {**asdict(self), "recipe": self.recipe.to_json()}
        known: dict[str, Any] = json.loads(json.dumps(plain))
        return known

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Spec:
        """The spec that `to_json` has written."""
        known = {item.name for item in fields(cls)}
        if odd := sorted(content.keys() ^ known):
            raise ValueError(f"this is no spec of this version of driveprune: {odd[0]!r} is not in both")
        return cls(**{**content, "recipe": Recipe.from_json(content["recipe"])})

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
    holdout: int = 0,
    size: int | None = None,
    threads: int = 1,
    device: str = "cpu",
    precision: Precision = "fp32",
    channels_last: bool = False,
) -> Spec:
    """The complete spec of a run; anything that cannot be run is an error here, before a run begins."""
    sparsity = 0.0 if method == DENSE else check_sparsity(sparsity)
    given = {**recipe.knobs.get(method, {}), **(knobs or {})}
    if method == DENSE:
        if knobs or check:
            raise ValueError("dense runs have no knobs and no checks")
        resolved: dict[str, Any] = {}
    else:
        methods.make_plan(method, sparsity, 10**9, 1000, given)  # unknown knobs and bad values
        resolved = {**methods.knobs(method), **given}
    if check not in CHECKS:
        raise ValueError(f"check must be one of {', '.join(CHECKS[1:])}, got {check!r}")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    own = replace(
        recipe, sparsities=(), knobs={key: dict(value) for key, value in recipe.knobs.items() if key == method}
    )
    spec = Spec(
        recipe=own, method=method, sparsity=sparsity, seed=int(seed), knobs=json.loads(json.dumps(resolved)),
        check=check, holdout=holdout, size=size, threads=threads, device=device, precision=precision,
        channels_last=channels_last, fingerprint=data.fingerprint, official=data.official,
    )  # fmt: skip
    total_steps(spec.plan(100))  # phases that do not fit into the training
    return spec


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
