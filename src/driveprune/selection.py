"""The exact choice of the best-scored weights, in bounded memory.

Floats order as their bit patterns (negative ones after a flip of their bits), so the score of the last weight
to keep is found digit by digit: count the candidates by the upper 16 bits of their patterns, find the bin that
holds the last one, count within that bin by the next 16 bits, and so on. Nothing is concatenated or sorted.
On a CPU the passes are compiled loops; on other devices the same passes are tensor operations.

Of scores that are sharded over ranks each rank counts its own part. The counts are summed, so all ranks find the same
last score to keep, and no rank has all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from typing import Any, Literal, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from driveprune.collectives import (
    Groups,
    box_of,
    counted,
    groups_of,
    local,
    part,
    placed,
    sum_over,
    summed_over_parts,
    together,
)
from driveprune.compiled import compiled
from driveprune.kinds import Whole, checked
from driveprune.mask import Mask, Scores, all_weights, check_sparsity, kept_count

Scope = Literal["global", "layer"] | Mapping[str, int]
"""Where scores compete: in the whole network, within each layer, or for a given number of places a layer."""

_DIGIT = 16
_BINS = 1 << _DIGIT
_PIECE = 1 << 20  # weights looked at together: temporaries stay in the cache, and small

Counts = np.ndarray[Any, np.dtype[np.int64]]


def keep_top(
    scores: Scores,
    mask: Mapping[str, Tensor] | None,
    sparsity: float,
    *,
    scope: Scope = "global",
    min_kept: int = 0,
    revive: bool = False,
    costs: Mapping[str, float] | None = None,
) -> Mask:
    """Keep the best-scored weights: exactly round((1 - sparsity)·n) of all n, at least 1.

    With `costs`, the sparsity is that of the costs: weights are kept by their score per cost, from the best down, as
    long as their costs add up to at most (1 - sparsity) of all; the next one would not fit any more.

    Only weights that `mask` keeps are candidates (None: all), unless `revive=True`. Equal scores go by
    position: the earlier tensor, then the smaller logical index, whatever the memory format; -0.0 equals 0.0.

    Scores that are DTensors may be sharded over ranks in any way in which each rank has a block: the choice is that
    of one process with all scores, and the mask is sharded alike.

    Args:
        scores: name -> score, higher is kept; of any type (integers are compared as float64), on any device.
        mask: name -> True where the weight is a candidate.
        sparsity: the fraction of all weights to be removed, in [0, 1).
        scope: "global" (all weights compete), "layer" (the same sparsity in each layer), or an allocation:
            name -> number of weights to keep there.
        min_kept: keep at least this many in each layer (all of a smaller one); the total stays.
        revive: let weights compete that the mask has removed.
        costs: name -> what each weight of that tensor costs, such as multiply-adds; only with a global scope.

    >>> keep_top({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([2.0, 2.0])}, None, sparsity=0.5)
    {'a': tensor([ True, False]), 'b': tensor([ True, False])}

    """
    check_sparsity(sparsity)
    min_kept = checked("min_kept", min_kept, Whole)
    checked("revive", revive, bool)
    _check_pairs(scores, mask)
    order = scores if mask is None else mask
    scores = {name: scores[name].detach() for name in order}
    candidates: dict[str, Tensor | None] = {name: None if mask is None or revive else mask[name] for name in order}
    if costs is not None:
        if scope != "global" or min_kept:
            raise ValueError(
                "costs are for a global scope without min_kept: the cheapest weights decide what is left"
            )
        kept = _within(scores, candidates, _check_costs(scores, costs), sparsity)
    elif scope == "global":
        kept = _global(scores, candidates, kept_count(all_weights(scores), sparsity), min_kept)
    else:
        counts = _layer_counts(scores, sparsity) if scope == "layer" else _check_allocation(scores, scope)
        counts = _lifted(counts, {name: min(min_kept, score.numel()) for name, score in scores.items()})
        kept = Mask()
        for name, count in counts.items():
            kept |= _best({name: scores[name]}, {name: candidates[name]}, count)
    return kept


def _check_costs(scores: Scores, costs: Mapping[str, float]) -> dict[str, float]:
    if missing := sorted(scores.keys() - costs.keys()):
        raise ValueError(f"there is no cost for the weights of {missing[0]}")
    if odd := [name for name in scores if not 0 < costs[name] < float("inf")]:
        raise ValueError(f"a weight of {odd[0]} must cost more than 0, got {costs[odd[0]]}")
    return {name: float(costs[name]) for name in scores}


def _within(
    scores: Scores, candidates: Mapping[str, Tensor | None], costs: Mapping[str, float], sparsity: float
) -> Mask:
    """The candidates of the highest score per cost whose costs fit into the budget; at least one."""
    each = {name: score.double() / costs[name] for name, score in scores.items()}
    budget = (1 - sparsity) * sum(costs[name] * score.numel() for name, score in scores.items())
    places = _places(each, candidates)
    limit, left = _last_that_fits(places, costs, budget * (1 + 1e-12))
    equal = _keep_above(places, limit, True)
    for layer, ties in _ties(places, equal):
        fitting = min(ties, int(left // costs[layer.name]))
        _keep_first(layer, fitting, ties, equal, limit, True)
        left -= fitting * costs[layer.name]
        if fitting < ties:
            break
    best = _mask_of(places)
    return best if any(counted(best).values()) else _best(each, candidates, 1)


def _last_that_fits(places: list[_Layer], costs: Mapping[str, float], budget: float) -> tuple[int, float]:
    """The ordered pattern of the score at which the budget ends, and what is left of it for scores equal to it."""
    prefix, left = 0, budget
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        histogram = np.zeros(_BINS)
        for layer in places:
            counts = _histogram([layer], shift, prefix, True)
            if shift == 64 - _DIGIT:
                _check_first([layer], counts, 0, True)
            histogram += counts * costs[layer.name]
        through = np.cumsum(histogram[::-1])[::-1]  # the cost of this bin and all above
        over = np.flatnonzero(through > left)
        digit = int(over[-1]) if over.size else 0
        left -= float(through[digit] - histogram[digit])
        prefix = (prefix << _DIGIT) | digit
    return prefix, left


def _layer_counts(scores: Scores, sparsity: float) -> dict[str, int]:
    return {name: min(score.numel(), kept_count(score.numel(), sparsity)) for name, score in scores.items()}


def _lifted(counts: Mapping[str, int], floor: Mapping[str, int]) -> dict[str, int]:
    """Counts of at least the floor: what short layers are given is taken from the largest, one by one."""
    if sum(floor.values()) > sum(counts.values()):
        raise ValueError(
            f"min_kept asks for {sum(floor.values())} weights, but only {sum(counts.values())} are kept: "
            "lower min_kept or the sparsity"
        )
    lifted = {name: max(count, floor[name]) for name, count in counts.items()}
    for _ in range(sum(lifted.values()) - sum(counts.values())):
        lifted[max(lifted, key=lambda name: lifted[name] - floor[name])] -= 1
    return lifted


def _global(scores: Scores, candidates: Mapping[str, Tensor | None], count: int, min_kept: int) -> Mask:
    """The best `count`, with at least `min_kept` in each layer.

    A layer that falls short gets its minimum and leaves the competition; the others share the rest. Their
    shares only shrink by that, so a layer that has left never wants to come back.
    """
    if min_kept == 0:
        return _best(scores, candidates, count)
    floor = {name: min(min_kept, _available(score, candidates[name])) for name, score in scores.items()}
    if sum(floor.values()) > count:
        raise ValueError(
            f"min_kept={min_kept} asks for {sum(floor.values())} weights, but the sparsity keeps only {count}: "
            "lower one of the two"
        )
    chosen: dict[str, Tensor] = {}
    free = dict(scores)
    while True:
        best = _best(free, candidates, count - sum(floor[name] for name in chosen)) if free else Mask()
        short = [name for name, count in counted(best).items() if count < floor[name]]
        if not short:
            return Mask({name: chosen.get(name, best.get(name)) for name in scores})  # type: ignore[misc]
        for name in short:
            chosen |= _best({name: free.pop(name)}, candidates, floor[name])


def _available(score: Tensor, candidates: Tensor | None) -> int:
    return score.numel() if candidates is None else counted({"": candidates})[""]


def _best(scores: Scores, candidates: Mapping[str, Tensor | None], count: int) -> Mask:
    """The `count` best-scored candidates of all these tensors together."""
    places = _places(scores, candidates)
    wide = any(not s.is_floating_point() or s.element_size() > 4 for s in scores.values())
    limit, left = _last_kept(places, count, wide)
    equal = _keep_above(places, limit, wide)
    for layer, ties in _ties(places, equal):
        used = min(left, ties)
        _keep_first(layer, used, ties, equal, limit, wide)
        left -= used
    return _mask_of(places)


def _places(scores: Scores, candidates: Mapping[str, Tensor | None]) -> list[_Layer]:
    """Of every layer, the part that this rank has."""
    return [_Layer.of(name, score, candidates[name]) for name, score in scores.items()]


def _mask_of(places: list[_Layer]) -> Mask:
    return Mask({layer.name: placed(layer.kept, layer.whole) for layer in places})


def _keep_above(places: list[_Layer], limit: int, wide: bool) -> dict[str, list[int]]:
    """Write which candidates lie above the limit; return how many lie on it, in each piece of each layer."""
    equal: dict[int, int] = {}
    _share(lambda piece: equal.__setitem__(piece.number, piece.keep_above(limit, wide)), places)
    by_layer: dict[str, list[int]] = {layer.name: [] for layer in places}
    for piece in _pieces(places):
        by_layer[piece.name].append(equal[piece.number])
    return by_layer


def _ties(places: list[_Layer], equal: Mapping[str, list[int]]) -> list[tuple[_Layer, int]]:
    """The layers with candidates on the limit, and how many each has, on all ranks."""
    own = {name: sum(counts) for name, counts in equal.items()}
    found = summed_over_parts(own, {layer.name: layer.whole for layer in places})
    return [(layer, int(found[layer.name])) for layer in places if found[layer.name]]


def _keep_first(layer: _Layer, used: int, ties: int, equal: Mapping[str, list[int]], limit: int, wide: bool) -> None:
    """Keep the first `used` of a layer's candidates on the limit, too, in the order of logical indices."""
    own = sum(equal[layer.name])
    left = own if used == ties else used if not layer.groups else _own_share(layer, used, limit, wide)
    for piece, count in zip(_pieces([layer]), equal[layer.name], strict=True):
        fitting = min(left, count)
        if fitting:
            piece.keep_equal(limit, fitting, wide)
            left -= fitting


def _own_share(layer: _Layer, used: int, limit: int, wide: bool) -> int:
    """How many of the first `used` ties of a sharded layer this rank has: the end of the first ones is bisected."""
    first = 0
    found = []
    for piece in _pieces([layer]):
        found.append(piece.on(limit, wide) + first)
        first += piece.score.numel()
    places = _logical(torch.cat(found), layer.whole) if found else torch.zeros(0, dtype=torch.int64)
    low, high = 0, layer.whole.numel()
    while low < high:
        middle = (low + high) // 2
        before = sum_over(np.array([int((places <= middle).count_nonzero())]), layer.groups)
        low, high = (low, middle) if int(before[0]) >= used else (middle + 1, high)
    return int((places <= low).count_nonzero()) if used else 0


def _logical(places: Tensor, whole: Tensor) -> Tensor:
    """Indices in a rank's part as indices in the whole tensor."""
    found, step = torch.zeros_like(places), 1
    for (start, end), length in zip(reversed(box_of(whole)), reversed(whole.shape), strict=True):
        found += (places % (end - start) + start) * step
        places = places // (end - start)
        step *= length
    return found


def _last_kept(places: list[_Layer], count: int, wide: bool) -> tuple[int, int]:
    """The ordered pattern of the last score to keep, and how many of the scores equal to it are kept."""
    width = 64 if wide else 32
    prefix, wanted = 0, count
    for shift in range(width - _DIGIT, -1, -_DIGIT):
        histogram = _histogram(places, shift, prefix, wide)
        if shift == width - _DIGIT:
            _check_first(places, histogram, count, wide)
        above = np.cumsum(histogram[::-1])[::-1] - histogram  # candidates in higher bins
        digit = int(np.searchsorted(-above, -wanted, side="right")) if wanted else _BINS - 1
        wanted -= int(above[digit])
        prefix = (prefix << _DIGIT) | digit
    return prefix, wanted


def _histogram(places: list[_Layer], shift: int, prefix: int, wide: bool) -> Counts:
    """Candidates whose digits above `shift` are `prefix`, counted by their digit at `shift`, on all ranks."""
    found = np.zeros(_BINS, dtype=np.int64)
    layers: dict[Groups, list[_Layer]] = {}
    for layer in places:
        layers.setdefault(layer.groups, []).append(layer)
    for groups, some in layers.items():
        counts = _share(lambda piece, own: piece.count(shift, prefix, wide, own), some, bins=True)
        found += sum_over(sum(counts[1:], start=counts[0]), groups)
    return found


def _check_first(places: list[_Layer], histogram: Counts, count: int, wide: bool) -> None:
    edge = 0x10 if wide else 0x80  # the upper digits of -inf, inf and NaN lie on it or beyond
    if histogram[: edge + 1].any() or histogram[_BINS - edge :].any():
        with together() if any(layer.groups for layer in places) else nullcontext():
            for piece in _pieces(places):
                if not piece.score[piece.candidates].double().isfinite().all():
                    raise ValueError(f"the scores of {piece.name} hold NaN or infinity")
    if histogram.sum() < count:
        raise ValueError(
            f"{count} weights are to be kept, but only {histogram.sum()} are candidates: the mask is sparser "
            "than the sparsity asked for (revive=True lets removed weights compete again)"
        )


class _Layer(NamedTuple):
    """A layer's scores, candidates and what is kept: of each, the part that this rank has."""

    name: str
    score: Tensor
    candidates: Tensor | None
    kept: Tensor
    whole: Tensor
    """The scores of all ranks, if they are sharded over `groups`."""
    groups: Groups

    @classmethod
    def of(cls, name: str, score: Tensor, candidates: Tensor | None) -> _Layer:
        own = local(score)
        kept = torch.empty(own.shape, dtype=torch.bool, device=own.device)
        chosen = None if candidates is None else part(candidates, score)
        return cls(name, own, chosen, kept, score, groups_of(score))


def _pieces(places: list[_Layer]) -> Iterator[_Piece]:
    """All layers in pieces of a bounded size, numbered, in the order of logical indices."""
    number = 0
    for name, score, candidates, kept, *_ in places:
        tensors = (score, kept) if candidates is None else (score, kept, candidates.to(score.device))
        for some in _split(*tensors):
            yield _Piece(number, name, *some)
            number += 1


def _split(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape in aligned parts of a bounded size: views, nothing is copied yet."""
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(_PIECE) for tensor in tensors), strict=True)  # type: ignore[no-untyped-call]
    elif tensors[0].numel() <= _PIECE:
        yield tensors
    else:
        rows = max(1, _PIECE * len(tensors[0]) // tensors[0].numel())
        for some in zip(*(tensor.split(rows) for tensor in tensors), strict=True):  # type: ignore[no-untyped-call]
            yield from _split(*(tensor[0] if len(tensor) == 1 else tensor for tensor in some))


def _share(work: Callable[..., None], places: list[_Layer], bins: bool = False) -> list[Counts]:
    """Do the work for every piece, on a CPU with torch's number of threads; each thread with counts of its own."""
    on_cpu = all(layer.score.device.type == "cpu" for layer in places)
    small = sum(layer.score.numel() for layer in places) <= _PIECE
    threads = torch.get_num_threads() if on_cpu and not small else 1

    def part(first: int) -> Counts:
        own = np.zeros(_BINS if bins else 0, dtype=np.int64)
        for piece in islice(_pieces(places), first, None, threads):
            work(piece, own) if bins else work(piece)
        return own

    if threads == 1:
        return [part(0)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(part, range(threads)))


class _Piece:
    """Some weights in a row: their scores, which are candidates, and where to write what is kept."""

    def __init__(self, number: int, name: str, score: Tensor, kept: Tensor, candidates: Tensor | None = None):
        self.number, self.name = number, name
        self._score, self._candidates, self._kept = score, candidates, kept

    @property
    def score(self) -> Tensor:
        return self._score.reshape(-1)

    @property
    def candidates(self) -> Tensor:
        if self._candidates is None:
            return torch.ones(self._score.numel(), dtype=torch.bool, device=self._score.device)
        return self._candidates.reshape(-1)

    def raw(self, wide: bool) -> Tensor:
        """The bit patterns of the scores as floats of 32 or 64 bits."""
        number, pattern = (torch.float64, torch.int64) if wide else (torch.float32, torch.int32)
        return self.score.to(number).view(pattern)

    def count(self, shift: int, prefix: int, wide: bool, histogram: Counts) -> None:
        raw, candidates = self.raw(wide), self.candidates
        if _compiles(raw):
            kind = np.uint64 if wide else np.uint32
            first = shift == (48 if wide else 16)
            count = _count_first_cpu if first else _count_cpu
            count(_array(raw, kind), _array(candidates, np.uint8), kind(shift), kind(prefix), _sign(kind), histogram)
        else:
            histogram += _count_any(raw, candidates, shift, prefix).cpu().numpy()

    def keep_above(self, limit: int, wide: bool) -> int:
        """Write which candidates lie above the limit; return how many lie on it."""
        raw, candidates, kept = self.raw(wide), self.candidates, self._kept.view(-1)
        if _compiles(raw):
            kind = np.uint64 if wide else np.uint32
            arrays = _array(raw, kind), _array(candidates, np.uint8), _array(kept, np.uint8)
            return int(_keep_above_cpu(*arrays, kind(limit), _sign(kind)))
        return _keep_above_any(raw, candidates, kept, limit)

    def on(self, limit: int, wide: bool) -> Tensor:
        """Where candidates lie on the limit."""
        equal = (_ordered_any(self.raw(wide)) == _signed(limit, wide)) & self.candidates
        return equal.nonzero().view(-1)

    def keep_equal(self, limit: int, places: int, wide: bool) -> None:
        """Keep the first `places` candidates on the limit, too."""
        raw, candidates, kept = self.raw(wide), self.candidates, self._kept.view(-1)
        if _compiles(raw):
            kind = np.uint64 if wide else np.uint32
            arrays = _array(raw, kind), _array(candidates, np.uint8), _array(kept, np.uint8)
            _keep_equal_cpu(*arrays, kind(limit), places, _sign(kind))
        else:
            kept[self.on(limit, wide)[:places]] = True


def _check_pairs(scores: Scores, mask: Mapping[str, Tensor] | None) -> None:
    if not scores:
        raise ValueError("there are no scores to choose from")
    if mask is None:
        return
    if missing := sorted(mask.keys() ^ scores.keys()):
        raise ValueError(f"scores and mask must name the same weights; only one of them has {missing[0]}")
    for name, kept in mask.items():
        if kept.dtype != torch.bool or kept.shape != scores[name].shape:
            raise ValueError(
                f"the mask of {name} must be boolean of shape {tuple(scores[name].shape)}, "
                f"got {kept.dtype} of shape {tuple(kept.shape)}"
            )


def _check_allocation(scores: Scores, scope: Any) -> Mapping[str, int]:
    if not isinstance(scope, Mapping):
        raise ValueError(f'scope must be "global", "layer" or an allocation (name -> kept), got {scope!r}')
    if missing := sorted(scope.keys() ^ scores.keys()):
        raise ValueError(f"scores and allocation must name the same weights; only one of them has {missing[0]}")
    for name, count in scope.items():
        if not isinstance(count, int) or not 0 <= count <= scores[name].numel():
            raise ValueError(f"the allocation keeps {count} weights of {name}, which has {scores[name].numel()}")
    return {name: scope[name] for name in scores}


# The passes. Bit patterns of floats, read as unsigned integers, order as the floats do once the sign bit of the
# positive ones is set and the negative ones are negated; -0.0 and 0.0 then have the same pattern.


def _compiles(tensor: Tensor) -> bool:
    """Whether the compiled loops serve this tensor; elsewhere the same passes are tensor operations."""
    return tensor.device.type == "cpu"


def _array(tensor: Tensor, kind: Any) -> np.ndarray[Any, Any]:
    return tensor.numpy().view(kind)


def _sign(kind: Any) -> Any:
    """The sign bit, in the type of the patterns."""
    return kind(1 << (8 * np.dtype(kind).itemsize - 1))


@numba.njit(inline="always")
def _ordered(raw: Any, sign: Any) -> Any:
    if raw & sign:
        return sign - (raw ^ sign)
    return raw | sign


@compiled()
def _count_first_cpu(raw: Any, candidates: Any, shift: Any, _: Any, sign: Any, histogram: Any) -> None:
    for i in range(raw.size):
        histogram[_ordered(raw[i], sign) >> shift] += candidates[i]


@compiled()
def _count_cpu(raw: Any, candidates: Any, shift: Any, prefix: Any, sign: Any, histogram: Any) -> None:
    digit = raw.dtype.type(_DIGIT)
    inside = raw.dtype.type(_BINS - 1)
    for i in range(raw.size):
        key = _ordered(raw[i], sign) >> shift
        if key >> digit == prefix:
            histogram[key & inside] += candidates[i]


@compiled()
def _keep_above_cpu(raw: Any, candidates: Any, kept: Any, limit: Any, sign: Any) -> Any:
    equal = np.uint32(0)
    for i in range(raw.size):
        key = _ordered(raw[i], sign)
        kept[i] = candidates[i] & np.uint8(key > limit)
        equal += candidates[i] & np.uint8(key == limit)
    return equal


@compiled()
def _keep_equal_cpu(raw: Any, candidates: Any, kept: Any, limit: Any, places: Any, sign: Any) -> None:
    for i in range(raw.size):
        if places == 0:
            return
        if candidates[i] and _ordered(raw[i], sign) == limit:
            kept[i] = 1
            places -= 1


def _signed(pattern: int, wide: bool) -> int:
    """An ordered pattern as torch has it: signed integers of the same order."""
    return pattern - (1 << (63 if wide else 31))


def _ordered_any(raw: Tensor) -> Tensor:
    return torch.where(raw < 0, -(raw & torch.iinfo(raw.dtype).max), raw)


def _count_any(raw: Tensor, candidates: Tensor, shift: int, prefix: int) -> Tensor:
    key = _ordered_any(raw[candidates])
    width = 8 * raw.element_size()
    if shift == width - _DIGIT:
        return torch.bincount((key >> shift) + _BINS // 2, minlength=_BINS)
    above = width - shift - _DIGIT  # bits that the prefix has
    inside = key[(key >> (shift + _DIGIT)) == prefix - (1 << (above - 1))]
    return torch.bincount((inside >> shift) & (_BINS - 1), minlength=_BINS)


def _keep_above_any(raw: Tensor, candidates: Tensor, kept: Tensor, limit: int) -> int:
    key, border = _ordered_any(raw), _signed(limit, raw.dtype == torch.int64)
    kept.copy_((key > border) & candidates)
    return int(((key == border) & candidates).count_nonzero())
