"""What does loading cost? A batch cropped, flipped and normalised against a training step on it, in interleaved runs.

python benchmarks/loader.py    # about 2 minutes on 2 cores
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import measure
import torch
from core import Row, fused_adam, row, sgd, step
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import driveprune as dp
from driveprune import datasets
from driveprune.batches import Batches, Images

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
LIMIT = 0.05


class PerImage(Dataset):
    """The usual way: one image at a time, padded, cropped, flipped and normalised by itself."""

    def __init__(self, batches: Batches):
        self.images, self.padding = batches.images, batches.padding
        self.mean, self.deviation = (torch.tensor(v).view(-1, 1, 1) for v in (batches.mean, batches.deviation))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        _, height, width = self.images.shape
        top, left, flipped = torch.randint(2 * self.padding + 1, (3,)).tolist()
        x = torch.nn.functional.pad(self.images.x[index], [self.padding] * 4)[
            :, top : top + height, left : left + width
        ]
        x = x.flip(-1) if flipped % 2 else x
        return (x / 255 - self.mean) / self.deviation, self.images.y[index]


def endless(epoch: Callable[[int], Iterator[object]]) -> Iterator[object]:
    number = 0
    while True:
        yield from epoch(number)
        number += 1


def draw(batches: Iterator[object], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            next(batches)

    return run


def loader_rows(
    name: str, net: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, rounds: int, limited: bool
) -> list[Row]:
    counts = {"step": 1, "loader": 20, "dataloader": 2}
    usual = DataLoader(PerImage(batches), batch_size=batches.size, shuffle=True, num_workers=0)
    jobs = {
        "step": step(net, optimizer, next(iter(batches))),
        "loader": draw(endless(lambda number: batches.epoch(0, number)), counts["loader"]),
        "dataloader": draw(endless(lambda _: iter(usual)), counts["dataloader"]),
    }
    seconds = measure.interleaved(jobs, rounds, warmup=2)
    seconds = {job: [value / counts[job] for value in values] for job, values in seconds.items()}
    each = {f"{job}_s": round(measure.fastest(values), 6) for job, values in seconds.items()}
    ratio = measure.ratio(seconds, "loader", "step")
    question = f"loading a batch / a training step on it, {name}"
    result = row(question, ratio, LIMIT, each) if limited else {"question": question, **each}
    return [
        {**result, "ratio": round(ratio, 5)},
        {
            "question": f"torch DataLoader over single images / loading a batch, {name}",
            "ratio": round(measure.ratio(seconds, "dataloader", "loader"), 1),
        },
    ]


def photographs(size: int) -> Batches:
    """As many bytes as CIFAR-10 has."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8, generator=generator)
    images = Images(x, torch.randint(10, (50_000,), generator=generator))
    return Batches(images, size=size, mean=MEAN, deviation=DEVIATION, padding=4, flip=True)


def digits(size: int) -> Batches:
    data = datasets.load("digits")
    return Batches(data.train, size=size, mean=data.mean, deviation=data.deviation, padding=1)


CASES = (
    ("ResNet-18, SGD momentum, batch 128", dp.models.resnet18, sgd, photographs, 128, 12, True),
    ("VGG-16, SGD momentum, batch 128", dp.models.vgg16, sgd, photographs, 128, 18, True),
    ("AlexNet, Adam (fused), batch 256", dp.models.alexnet, fused_adam, photographs, 256, 24, True),
    ("the demo's network on digits, SGD momentum, batch 64", dp.models.digits_net, sgd, digits, 64, 90, False),
)


def rows() -> list[Row]:
    before = os.getloadavg()[0]  # a busy machine disturbs the long steps more than the short loading
    found = []
    for name, build, optimizer, data, size, rounds, limited in CASES:
        torch.manual_seed(0)
        net = build()
        found += loader_rows(name, net, optimizer(net), data(size), rounds, limited)
    return [*found, {"question": "load of the machine before it began", "load": round(before, 2)}]


if __name__ == "__main__":
    measure.write("loader", rows())
