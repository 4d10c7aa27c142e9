"""Gradient accumulation and clipping: `pruner.step()` follows each step of the optimiser, not each batch."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import driveprune as dp

EPOCHS, ACCUMULATE = 20, 4


def train(sparsity):
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(digits)
    loader = DataLoader(TensorDataset(x[:1408], y[:1408]), 16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pruner = dp.Pruner(
        model, optimizer, loader, method="drive", sparsity=sparsity, epochs=EPOCHS,
        steps_per_epoch=len(loader) // ACCUMULATE, knobs={"early_epochs": 2, "batches_per_cut": ACCUMULATE},
    )  # fmt: skip
    for _ in range(pruner.epochs):
        for number, (xs, ys) in enumerate(loader, start=1):
            (F.cross_entropy(model(xs), ys) / ACCUMULATE).backward()
            if number % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # sees the gradients of kept weights only
                optimizer.step()
                optimizer.zero_grad()
                pruner.step()
    with torch.no_grad():
        accuracy = (model.eval()(x[1408:]).argmax(1) == y[1408:]).float().mean().item()
    return accuracy, dp.sparsity(pruner.mask)


def main() -> None:
    for name, sparsity in (("dense", 0.0), ("pruned", 0.95)):
        accuracy, reached = train(sparsity)
        print(f"{name}: accuracy {accuracy:.3f}, sparsity {reached:.4f}")


if __name__ == "__main__":
    main()
