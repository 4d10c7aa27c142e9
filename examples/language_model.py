"""A small Transformer that guesses the next character of a text: attention, tied embeddings, a loss of your own.

The text, declaration.txt, is in the public domain: the Declaration of Independence of the United States (1776) and
parts of their Constitution (1787) and its amendments.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp

TEXT = Path(__file__).with_name("declaration.txt").read_text()
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH, EPOCHS = 32, 48, 3


class Writer(nn.Module):
    """Two blocks of attention; the table of letters serves as input and, transposed, as output."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.letters.weight
        for table in (self.letters, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, x):
        """For each place, how likely each letter comes next."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = self.letters(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(h, mask=later)))


def loss(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def train(sparsity):
    torch.manual_seed(0)
    numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    training, test = numbers[:19000], numbers[19000:]
    windows = training.unfold(0, LENGTH + 1, 4)
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    batches = list(windows[torch.randperm(len(windows))].split(64))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(batches))
    pruner = dp.Pruner(
        model, optimizer, batches, loss=loss, method="drive", sparsity=sparsity, epochs=EPOCHS,
        steps_per_epoch=len(batches), knobs={"early_epochs": 1, "cuts": 20},
    )  # fmt: skip
    for _ in range(pruner.epochs):
        for number in torch.randperm(len(batches)).tolist():
            optimizer.zero_grad()
            loss(model, batches[number]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            pruner.step()
    with torch.no_grad():
        bits = loss(model.eval(), test.unfold(0, LENGTH + 1, LENGTH)).item() / torch.tensor(2.0).log().item()
    return bits, dp.sparsity(pruner.mask)


def main() -> None:
    counts = torch.tensor([TEXT.count(letter) for letter in LETTERS]) / len(TEXT)
    print(f"letters by frequency: {-(counts * counts.log2()).sum():.3f} bits a character")
    for name, sparsity in (("dense", 0.0), ("pruned", 0.8)):
        bits, reached = train(sparsity)
        print(f"{name}: {bits:.3f} bits a character, sparsity {reached:.4f}")


if __name__ == "__main__":
    main()
