"""Prune a small network on handwritten digits with five methods and compare. Run by `make demo`."""

import time

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import driveprune as dp
from driveprune.train import Batches, Trained, train

SPARSITIES = (0.9, 0.95, 0.98, 0.993)
EPOCHS = 20
# The paper's proportions, scaled to a small data set: IMP trains 8 cycles of 3 epochs before its last training.
METHODS = {
    "imp": {"cycles": 8, "cycle_epochs": 3},
    "snip": {},
    "synflow": {},
    "drive": {"early_epochs": 2},
}


def data() -> tuple[Batches, Batches]:
    x, y = load_digits(return_X_y=True)
    x = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) - 4.9) / 6.0
    y = torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    training, test = order[:1437], order[1437:]
    return Batches(x[training], y[training], size=64), Batches(x[test], y[test], size=360)


def run(method: dp.methods.Method, sparsity: float, knobs: dict[str, float]) -> Trained:
    training, test = data()
    torch.manual_seed(0)
    net = dp.models.digits_net(width=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    return train(
        net, optimizer, training, test=test, scheduler=scheduler,
        method=method, sparsity=sparsity, knobs=knobs, epochs=EPOCHS,
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)  # such a small network is faster on one
    start = time.perf_counter()
    console = Console()
    table = Table(title="Handwritten digits: test accuracy in % by sparsity")
    table.add_column("method")
    for sparsity in SPARSITIES:
        table.add_column(f"{100 * sparsity:g}%", justify="right")
    table.add_column("pruning, s", justify="right")
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("training", total=1 + len(METHODS) * len(SPARSITIES))
        steps = EPOCHS * len(data()[0])
        dense = run([dp.Train(steps)], 0.0, {}).accuracies[-1]
        progress.advance(bar)
        table.add_row("unpruned", *[f"{100 * dense:.1f}"] * len(SPARSITIES), "")
        for method, knobs in METHODS.items():
            cells, seconds = [], 0.0
            for sparsity in SPARSITIES:
                trained = run(method, sparsity, knobs)
                cells.append(f"{100 * trained.accuracies[-1]:.1f}")
                seconds += trained.pruning_seconds / len(SPARSITIES)
                progress.advance(bar)
            table.add_row(method, *cells, f"{seconds:.1f}")
    console.print(table)
    console.print(f"One seed, {EPOCHS} epochs, {time.perf_counter() - start:.0f} s in all.")


if __name__ == "__main__":
    main()
