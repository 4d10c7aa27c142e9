"""Lightning with two processes: python ddp.py FOLDER writes what each rank ends with."""

import sys
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.integrations.test_lightning import Classifier, callback, loader  # noqa: E402
from tests.nets import batch  # noqa: E402


def fit(folder, run, prune, seed=0, checkpoint=None):
    """Train on different data on each rank: Lightning gives the loader a sampler that does so."""
    net = Classifier(seed)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[prune, ModelCheckpoint(folder, filename=run + "-{epoch}", save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(net, loader(7, shuffle=True), ckpt_path=checkpoint)
    masks = {f"mask.{name}": kept for name, kept in prune.mask.items()}
    save_file({**net.net.state_dict(), **masks}, folder / f"{run}-{trainer.global_rank}.safetensors")


class Noted:
    """A loss that notes the examples it is asked for."""

    def __init__(self):
        self.seen = []

    def __call__(self, model, batch):
        self.seen.append(batch[0].clone())
        return F.cross_entropy(model(batch[0]), batch[1])


def same_batches(folder):
    """Both ranks score with the same batches."""
    batches = [batch(seed=1), batch(seed=2)]
    fit(folder, "same-whole", callback(batches=batches))
    fit(folder, "same-resumed", callback(batches=batches), 5, folder / "same-whole-epoch=1.ckpt")


def own_batches(folder, method, knobs):
    """Each rank scores with its share of the training data, also if it goes on from the first epoch's checkpoint."""
    for run, seed, checkpoint in (("whole", 0, None), ("resumed", 5, folder / f"{method}-whole-epoch=0.ckpt")):
        loss = Noted() if method == "snip" else None  # the others take what the training_step returns
        fit(folder, f"{method}-{run}", callback(method, loss=loss, knobs=knobs), seed, checkpoint)
        if loss is not None and run == "whole":
            save_file({"x": loss.seen[0]}, folder / f"scored-{torch.distributed.get_rank()}.safetensors")


OWN = {
    "drive": {"early_epochs": 2, "cuts": 4},
    "imp": {"cycles": 2, "cycle_epochs": 1},
    "snip": {},
    "gmp": {"cuts": 3},
}
"""The checkpoint is before the cuts, in the middle of the cycles, after the cut, and between cuts."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    same_batches(Path(sys.argv[1]))
    for each, options in OWN.items():
        own_batches(Path(sys.argv[1]), each, options)
