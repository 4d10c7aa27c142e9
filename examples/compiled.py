"""torch.compile: the compiled model trains on through the cut; nothing is compiled anew."""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import driveprune as dp

EPOCHS = 25


def main() -> None:
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(digits)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = list(zip(x[:1400].split(100), y[:1400].split(100), strict=True))
    pruner = dp.Pruner(
        compiled, optimizer, batches, method="drive", sparsity=0.95, epochs=EPOCHS, steps_per_epoch=len(batches),
        knobs={"early_epochs": 3},
    )  # fmt: skip
    start = time.perf_counter()
    for epoch in range(pruner.epochs):
        for number in torch.randperm(len(batches)).tolist():
            xs, ys = batches[number]
            optimizer.zero_grad()
            F.cross_entropy(compiled(xs), ys).backward()
            optimizer.step()
            pruner.step()
        if epoch in (0, EPOCHS - 1):
            seconds = time.perf_counter() - start
            print(f"after epoch {epoch + 1}: {seconds:.1f} seconds, sparsity {dp.sparsity(pruner.mask):.4f}")
    with torch.no_grad():
        accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"pruned: accuracy {accuracy:.3f}, sparsity {dp.sparsity(pruner.mask):.4f}, graphs compiled {frames}")


if __name__ == "__main__":
    main()
