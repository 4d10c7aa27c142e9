"""Your own loop: handwritten digits, dense and with 90% of the weights removed. One object, one line a step."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import driveprune as dp

EPOCHS = 10


def data():
    pixels, digits = load_digits(return_X_y=True)
    everything = TensorDataset(torch.tensor(pixels / 16).float().view(-1, 1, 8, 8), torch.tensor(digits))
    train, test = random_split(everything, [1437, 360], torch.Generator().manual_seed(0))
    return DataLoader(train, 64, shuffle=True, drop_last=True), DataLoader(test, 360)


def train(sparsity):
    torch.manual_seed(0)
    loader, test = data()
    model = dp.models.digits_net(width=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    pruner = dp.Pruner(
        model, optimizer, loader, method="drive", sparsity=sparsity, epochs=EPOCHS, steps_per_epoch=len(loader),
        knobs={"early_epochs": 2},
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    for _ in range(pruner.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            pruner.step()  # cuts after 2 epochs, and keeps removed weights at zero
    x, y = next(iter(test))
    with torch.no_grad():
        accuracy = (model.eval()(x).argmax(1) == y).float().mean().item()
    return accuracy, dp.sparsity(pruner.mask)


def main() -> None:
    for name, sparsity in (("dense", 0.0), ("pruned", 0.9)):
        accuracy, reached = train(sparsity)
        print(f"{name}: accuracy {accuracy:.3f}, sparsity {reached:.4f}")


if __name__ == "__main__":
    main()
