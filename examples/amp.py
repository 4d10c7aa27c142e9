"""Mixed precision: autocast and a gradient scaler (float16 on a GPU, bfloat16 on a CPU), nothing special to do."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import driveprune as dp

STEPS = 300


def data(device):
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float().to(device), torch.tensor(digits).to(device)
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def train(sparsity):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    (x, y), (x_test, y_test) = data(device)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device)
    batches = list(zip(x.split(100), y.split(100), strict=True))
    pruner = dp.Pruner(
        model, optimizer, batches, method="drive", sparsity=sparsity, epochs=STEPS // len(batches),
        steps_per_epoch=len(batches), knobs={"early_epochs": 3},
    )  # fmt: skip
    for _ in range(pruner.epochs):
        for number in torch.randperm(len(batches)).tolist():
            xs, ys = batches[number]
            optimizer.zero_grad()
            with torch.autocast(device, dtype):
                loss = F.cross_entropy(model(xs), ys)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            pruner.step()  # outside of autocast: scores are made in full precision
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    return accuracy, dp.sparsity(pruner.mask)


def main() -> None:
    for name, sparsity in (("dense", 0.0), ("pruned", 0.95)):
        accuracy, reached = train(sparsity)
        print(f"{name}: accuracy {accuracy:.3f}, sparsity {reached:.4f}")


if __name__ == "__main__":
    main()
