"""Prune a small network on handwritten digits with four methods and compare. Run by `make demo`."""

import time
import warnings

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import driveprune as dp
from driveprune.train import Batches, Trained, train

SPARSITIES = (0.9, 0.95, 0.98, 0.993)
EPOCHS = 12
# The paper's proportions, scaled to a small data set.
METHODS = {
    "imp": {"cycles": 6, "cycle_epochs": 2},
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


def run(method: dp.methods.Method, sparsity: float, knobs: dict[str, float]) -> tuple[Trained, bool]:
    """What came of one training, and whether the cut left no path through the network."""
    training, test = data()
    torch.manual_seed(0)
    net = dp.models.digits_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", dp.CollapseWarning)
        trained = train(
            net, optimizer, training, test=test, scheduler=scheduler,
            method=method, sparsity=sparsity, knobs=knobs, epochs=EPOCHS,
        )  # fmt: skip
    return trained, any("no path" in str(warning.message) for warning in caught)


def main() -> None:
    torch.set_num_threads(1)  # such a small network is faster on one
    start = time.perf_counter()
    console = Console()
    table = Table(title="Handwritten digits: test accuracy in % by sparsity")
    table.add_column("method")
    for sparsity in SPARSITIES:
        table.add_column(f"{100 * sparsity:g}%", justify="right")
    table.add_column("seconds to the last cut", justify="right")
    cut_off = False
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("training", total=1 + len(METHODS) * len(SPARSITIES))
        dense, _ = run([dp.Train(EPOCHS * len(data()[0]))], 0.0, {})
        progress.advance(bar)
        table.add_row("unpruned", *[f"{100 * dense.accuracies[-1]:.1f}"] * len(SPARSITIES), "")
        for method, knobs in METHODS.items():
            cells, seconds = [], 0.0
            for sparsity in SPARSITIES:
                trained, collapsed = run(method, sparsity, knobs)
                cells.append(f"{100 * trained.accuracies[-1]:.1f}" + "*" * collapsed)
                seconds += trained.pruning_seconds / len(SPARSITIES)
                cut_off |= collapsed
                progress.advance(bar)
            table.add_row(method, *cells, f"{seconds:.1f}")
    console.print(table)
    if cut_off:
        console.print("* the cut left no path from input to output, as a warning said before any training")
    console.print(f"One seed, last of {EPOCHS} epochs, {time.perf_counter() - start:.0f} s in all.")


if __name__ == "__main__":
    main()
