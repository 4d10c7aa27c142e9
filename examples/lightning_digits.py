"""Lightning: one callback. Needs `pip install 'driveprune[lightning]'`."""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import driveprune as dp
from driveprune.integrations.lightning import PruneCallback


class Digits(L.LightningModule):
    """An ordinary module: it knows nothing of pruning."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))

    def forward(self, x):
        """Logits."""
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """The loss."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        """The accuracy."""
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        """AdamW, and a cosine over the whole training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    L.seed_everything(0, verbose=False)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(digits)
    train = DataLoader(TensorDataset(x[:1400], y[:1400]), 100, shuffle=True)
    test = DataLoader(TensorDataset(x[1400:], y[1400:]), 397)
    prune = PruneCallback(method="drive", sparsity=0.95, knobs={"early_epochs": 3})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=20, accelerator="cpu", callbacks=[prune], enable_checkpointing=False, **quiet)
    model = Digits()
    trainer.fit(model, train)
    accuracy = trainer.test(model, test, verbose=False)[0]["accuracy"]
    print(f"pruned: accuracy {accuracy:.3f}, sparsity {dp.sparsity(prune.mask):.4f}")


if __name__ == "__main__":
    main()
