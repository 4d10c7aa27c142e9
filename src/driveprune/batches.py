"""Images, and batches of them: shuffled, cropped, flipped and normalised by a few operations on whole batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from driveprune.collectives import share_of
from driveprune.seeds import generator_for

_CHUNK = 1 << 24
"""Bytes of pixels that are looked at in one go where a whole data set is read."""


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Pixels as uint8, (N, C, H, W), and classes as int64, (N,).

    The pixels may lie in a file that is mapped into memory (`mapped`). A choice of such images remembers their
    `rows` in the file and copies nothing: image i is then x[rows[i]]. Ask `pixels` and it is right either way.
    """

    x: Tensor
    y: Tensor
    rows: Tensor | None = None
    mapped: bool = False

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 or self.x.dim() != 4:
            raise ValueError(f"images must be uint8 (N, C, H, W), got {self.x.dtype} {tuple(self.x.shape)}")
        if self.y.dtype != torch.int64 or self.y.dim() != 1:
            raise ValueError(f"classes must be int64 (N,), got {self.y.dtype} {tuple(self.y.shape)}")
        images = len(self.x) if self.rows is None else len(self.rows)
        if images != len(self.y):
            raise ValueError(f"there are {images} images, but {len(self.y)} classes")

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Images({len(self)} of {'×'.join(map(str, self.shape))})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, channels, height, width = self.x.shape
        return channels, height, width

    def pixels(self, chosen: Tensor | slice) -> Tensor:
        """The pixels of some of the images, in the order asked for."""
        if self.rows is not None:
            chosen = self.rows[chosen]
        return self.x[chosen] if isinstance(chosen, slice) else self.x.index_select(0, chosen)

    def take(self, chosen: Tensor) -> Images:
        """The images with these numbers.

        >>> some = Images(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4))
        >>> some.take(torch.tensor([2, 0])).y
        tensor([2, 0])
        """
        if not self.mapped:
            return Images(self.pixels(chosen), self.y[chosen])
        return Images(self.x, self.y[chosen], chosen if self.rows is None else self.rows[chosen], mapped=True)


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: what it is called, its images, and what a person must know about it.

    `mean` and `deviation` are those of pixels/255 over the training images, by channel. `official` says that these
    are the official bytes, by checksum (or that nobody publishes official ones: a folder of your own).
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    official: bool
    note: str = ""

    @property
    def label(self) -> str:
        """The name to show: it says when these are not the official data."""
        return self.name if self.official else f"{self.name} (not the official data)"

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 over all pixels and classes: the same content has the same one, however it is stored."""
        digest = hashlib.sha256()
        for images in (self.train, self.test):
            digest.update(json.dumps(["uint8", len(images), *images.shape]).encode())
            for piece in pieces(images):
                digest.update(piece.contiguous().cpu().numpy().data)
            digest.update(images.y.contiguous().cpu().numpy().data)
        return digest.hexdigest()


def pieces(images: Images) -> Iterator[Tensor]:
    """All pixels in order, a few megabytes at a time."""
    channels, height, width = images.shape
    count = max(1, _CHUNK // (channels * height * width))
    return (images.pixels(slice(first, first + count)) for first in range(0, len(images), count))


def statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels/255 by channel, from exact counts; 1 for a channel that never varies.

    >>> statistics(Images(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1), torch.zeros(2).long()))
    ((0.5,), (0.5,))
    """
    channels = images.shape[0]
    counts = torch.zeros(channels, 256, dtype=torch.int64)
    for piece in pieces(images):
        for channel in range(channels):
            counts[channel] += torch.bincount(piece[:, channel].reshape(-1), minlength=256).cpu()
    found = [_moments(row) for row in counts.tolist()]
    return tuple(mean for mean, _ in found), tuple(deviation for _, deviation in found)


def _moments(counts: list[int]) -> tuple[float, float]:
    """Integers up to the last step, so that no order of summing can change a bit."""
    n = sum(counts)
    total = sum(value * count for value, count in enumerate(counts))
    squares = sum(value * value * count for value, count in enumerate(counts))
    return total / (255 * n), sqrt(n * squares - total * total) / (255 * n) or 1.0


def split(images: Images, holdout: int) -> tuple[Images, Images]:
    """Training images and `holdout` held-out ones: a random choice that is the same for every seed of a training."""
    _check_holdout(len(images), holdout)
    order = torch.randperm(len(images), generator=generator_for(0, "holdout", len(images)))
    return images.take(order[holdout:].sort().values), images.take(order[:holdout].sort().values)


def check_choice(data: Data, images: int | None, test_images: int | None, holdout: int) -> None:
    """An error if a data set has not so many images to train, test and hold out."""
    for found, count in ((data.train, images), (data.test, test_images)):
        if count is not None:
            _check_count(len(found), count)
    _check_holdout(len(data.train) if images is None else images, holdout)


def _check_count(size: int, count: int) -> None:
    if not 1 <= count <= size:
        raise ValueError(f"a subset must have from 1 to {size} images, got {count}")


def _check_holdout(size: int, holdout: int) -> None:
    if not 0 <= holdout < size:
        raise ValueError(f"holdout must be from 0 to {size - 1} of {size} images, got {holdout}")


def subset(images: Images, count: int | None) -> Images:
    """`count` of the images, always the same ones, with as many of each class as there are; None: all of them.

    A smaller subset is a part of every larger one.

    >>> some = Images(torch.zeros(6, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 0, 0, 1, 1]))
    >>> subset(some, 4).y
    tensor([0, 0, 1, 1])
    """
    if count is None:
        return images
    _check_count(len(images), count)
    generator = generator_for(0, "subset", len(images))
    order = torch.randperm(len(images), generator=generator)
    by_class = order[images.y[order].argsort(stable=True)]
    sizes = torch.bincount(images.y)
    place = torch.arange(len(images)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # within its class
    turn = torch.randperm(len(sizes), generator=generator)[images.y[by_class]]
    first = (place * len(sizes) + turn).argsort()[:count]
    return images.take(by_class[first].sort().values)


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of images on a device: float32, normalised, in a new order each epoch; the last one may be smaller.

    Everything random follows from (seed, cycle, epoch, step), so an epoch can start at any of its batches.
    Iterating gives an epoch of its own, for scoring.

    Knobs:
        mean, deviation: a pixel becomes (pixel/255 - mean) / deviation; one value, or one for each channel.
        padding: pixels of black on each side, of which a random crop cuts the image's size again.
        flip: mirror half of the images, at random.
        channels_last: the memory format of what comes out.
        share: (rank, ranks): of each batch only this rank's share comes out.

    >>> some = Images(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), torch.arange(5))
    >>> [len(y) for x, y in Batches(some, size=2).epoch(0, 0)]
    [2, 2, 1]
    """

    images: Images
    size: int = 128
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    padding: int = 0
    flip: bool = False
    shuffle: bool = True
    seed: int = 0
    device: torch.device | str = "cpu"
    channels_last: bool = False
    share: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the size of a batch must be at least 1, got {self.size}")
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0, got {self.padding}")
        for name, values in (("mean", self.mean), ("deviation", self.deviation)):
            if len(values) not in (1, self.images.shape[0]):
                raise ValueError(f"{name} needs 1 or {self.images.shape[0]} values, got {len(values)}")
        if min(self.deviation) <= 0:
            raise ValueError(f"deviations must be above 0, got {self.deviation}")

    def __len__(self) -> int:
        return ceil(len(self.images) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.scoring_from(0)

    def scoring_from(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches for scoring, from batch `start` on."""
        return self.epoch("scoring", 0, start)

    def epoch(self, cycle: int | str, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch, from batch `start` on: the very ones that the whole epoch has there."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be from 0 to {len(self)} batches, got {start}")
        chosen = self._order(cycle, number).split(self.size)  # type: ignore[no-untyped-call]
        return (self._batch(chosen[step], (cycle, number, step)) for step in range(start, len(self)))

    def _order(self, cycle: int | str, number: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.images))
        return torch.randperm(len(self.images), generator=generator_for(self.seed, "order", cycle, number))

    def _batch(self, chosen: Tensor, counter: tuple[int | str, ...]) -> tuple[Tensor, Tensor]:
        count, own = len(chosen), share_of(len(chosen), self.share)
        chosen = chosen[own].to(self.images.y.device)
        x, y = self.images.pixels(chosen).to(self.device), self.images.y[chosen].to(self.device)
        if self.padding or self.flip:
            places = augmentation(self.seed, counter, count, self.padding, self.flip)
            top, left, flipped = (place[own].to(self.device) for place in places)
            x = crop_and_flip(x, top, left, flipped, self.padding)
        return self._normalised(x), y

    def _normalised(self, x: Tensor) -> Tensor:
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)  # while it is bytes: a quarter of the work
        mean, deviation = (torch.tensor(v, device=x.device).view(-1, 1, 1) for v in (self.mean, self.deviation))
        return x.float().mul_(1 / (255 * deviation)).sub_(mean / deviation)  # in place: twice as fast as addcmul


def augmentation(
    seed: int, counter: tuple[int | str, ...], count: int, padding: int, flip: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each image of a batch where its crop begins, from the top and from the left, and whether it is mirrored."""
    generator = generator_for(seed, "augment", *counter)
    top, left = torch.randint(2 * padding + 1, (2, count), generator=generator)
    return top, left, torch.randint(2 if flip else 1, (count,), generator=generator).bool()


def crop_and_flip(x: Tensor, top: Tensor, left: Tensor, flipped: Tensor, padding: int) -> Tensor:
    """Each image with `padding` pixels of black around it, cut to size at (top, left); mirrored where `flipped`."""
    _, channels, height, width = x.shape
    rows = torch.arange(height, device=x.device) + top[:, None]
    columns = torch.arange(width, device=x.device)
    columns = torch.where(flipped[:, None], width - 1 - columns, columns) + left[:, None]
    padded = F.pad(x, [padding] * 4).flatten(2)
    places = (rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]).flatten(1)[:, None]
    return padded.gather(2, places.expand(-1, channels, -1)).view(x.shape)
