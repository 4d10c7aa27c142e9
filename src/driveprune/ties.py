"""Scores that cannot tell weights apart: then only the weights' positions decide which of them stay."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor

from driveprune.collectives import counted, is_sharded, local, part, ranks
from driveprune.graph import CollapseWarning
from driveprune.mask import Scores, all_weights, kept_weights

_PIECE = 1 << 16  # scores that are looked at together: most layers differ within the first ones


class ScoreWarning(UserWarning):
    """Scores are equal where a cut had to choose among them: the positions of weights decided which of them stay."""


class Ties:
    """Watches the scores of one Prune phase. Candidates are the weights of the mask, or all if weights may revive."""

    def __init__(self, cuts: int, revive: bool) -> None:
        self._cuts, self._revive = cuts, revive
        self._is_first = True
        self._equal: set[str] = set()
        """Layers whose scores were equal at the first cut; what dies later has died of pruning."""
        self._split: set[str] = set()
        self._blind: tuple[int, float] | None = None
        """The first cut at which all scores were equal, and that score."""

    def look(self, scores: Scores, before: Mapping[str, Tensor], after: Mapping[str, Tensor], number: int) -> None:
        """Look at the scores that have made one mask of another at a cut; an error if the first ones say nothing."""
        values = _only_values({name: scores[name] for name in before}, None if self._revive else before)
        known = set(values.values())
        if len(known) == 1 and None not in known:
            candidates = all_weights(before) if self._revive else kept_weights(before)
            if kept_weights(after) < candidates:
                self._found_blind(known.pop() or 0.0, number)
        if self._is_first:
            self._equal = {name for name, value in values.items() if value is not None}
        self._is_first = False
        self._note_split(before, after)

    def _found_blind(self, value: float, number: int) -> None:
        if not self._is_first:
            self._blind = self._blind or (number, value)
            return
        raise ValueError(
            "all scores are 0, so they cannot say which weights to keep. Does the loss use the model's output, with "
            "its gradient (no .detach(), no .item(), no torch.no_grad())? Does a signal come through the network?"
            if value == 0
            else f"all scores are {value:g}, so they cannot say which weights to keep. Are all weights equal, as an "
            "initialisation to a constant leaves them?"
        )

    def _note_split(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Note which layers of equal scores a cut has split."""
        if self._equal:
            had = {name: before[name].numel() for name in self._equal}
            if not self._revive:
                had = counted({name: before[name] for name in sorted(self._equal)})
            left = counted({name: after[name] for name in sorted(self._equal)})
            self._split |= {name for name in self._equal if 0 < left[name] < had[name]}

    def warn(self) -> None:
        """Say what was found."""
        if self._split:
            first, *more = sorted(self._split)
            warnings.warn(
                f"all scores of {', '.join([first, *more[:4]])}{', ...' if more[4:] else ''} are equal, and some of "
                "these weights were removed: their positions decided which. Are they initialised to a constant, or "
                "does no gradient reach them?",
                ScoreWarning,
                stacklevel=6,
            )
        if self._blind is not None:
            number, value = self._blind
            why = "no gradient comes through the network any more, and" if value == 0 else "from there"
            warnings.warn(
                f"from cut {number + 1} of {self._cuts} on, all scores are {value:g}: {why} the positions of weights "
                "decided which of them stay",
                CollapseWarning if value == 0 else ScoreWarning,
                stacklevel=6,
            )


def _only_values(scores: Scores, mask: Mapping[str, Tensor] | None) -> dict[str, float | None]:
    """Of each layer with candidates their one score, or None if they have several; the same on every rank."""
    own = {
        name: _values(local(score), None if mask is None else part(mask[name], score))
        for name, score in scores.items()
    }
    group = ranks()
    if group is not None and any(map(is_sharded, scores.values())):
        parts: list[dict[str, tuple[float, ...]]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(parts, own, group=group)
        own = {name: tuple({value for one in parts for value in one[name]}) for name in own}
    return {name: values[0] if len(values) == 1 else None for name, values in own.items() if values}


def _values(score: Tensor, candidates: Tensor | None) -> tuple[float, ...]:
    """The score of this rank's candidates; two of their scores if there are several, none without candidates."""
    found: tuple[float, ...] = ()
    for piece in _pieces(score, candidates):
        values = piece if not found else piece[piece != found[0]]
        if values.numel() and not found:
            found = (float(values[0]),)
            values = values[values != values[0]]
        if values.numel():
            return found[0], float(values[0])
    return found


def _pieces(score: Tensor, candidates: Tensor | None) -> Iterator[Tensor]:
    """The candidates' scores, some rows at a time."""
    if score.dim() == 0 or score.numel() == 0:
        return
    rows = max(1, _PIECE * len(score) // score.numel())
    for first in range(0, len(score), rows):
        piece = score[first : first + rows].detach()
        if candidates is None:
            yield piece.reshape(-1)
        else:
            yield piece[candidates[first : first + rows].to(piece.device)]
