"""Regression: the progression of diabetes from ten measurements, with a loss of your own and a table of methods."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from torch import nn

import driveprune as dp

EPOCHS = 60


def mse(model, batch):
    x, y = batch
    return F.mse_loss(model(x).squeeze(1), y)


def data():
    x, y = load_diabetes(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).numpy()
    x, y = x[order] / x.std(), (y[order] - y.mean()) / y.std()
    return x[:342], y[:342], x[342:], y[342:]


def explained(predicted, y):
    """R²: the fraction of the variance that is explained."""
    return 1 - ((predicted - y) ** 2).mean() / ((y - y.mean()) ** 2).mean()


def train(method, sparsity):
    torch.manual_seed(0)
    x, y, x_test, y_test = (torch.tensor(part).float() for part in data())
    model = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches = list(zip(x.split(57), y.split(57), strict=True))
    early = {"early_epochs": 5} if method in ("drive", "magnitude") else {}
    pruner = dp.Pruner(
        model, optimizer, batches, loss=mse, method=method, sparsity=sparsity, epochs=EPOCHS,
        steps_per_epoch=len(batches), knobs=early,
    )  # fmt: skip
    for _ in range(pruner.epochs):
        for batch in batches:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()
            pruner.step()
    with torch.no_grad():
        return explained(model(x_test).squeeze(1), y_test).item(), dp.sparsity(pruner.mask)


def main() -> None:
    x, y, x_test, y_test = data()
    print(f"linear regression: R² {explained(LinearRegression().fit(x, y).predict(x_test), y_test):.3f}")
    for method, sparsity in (("drive", 0.0), ("drive", 0.9), ("synflow", 0.9), ("magnitude", 0.9), ("erk", 0.9)):
        r2, reached = train(method, sparsity)
        print(f"{method if sparsity else 'dense'}: R² {r2:.3f}, sparsity {reached:.4f}")


if __name__ == "__main__":
    main()
