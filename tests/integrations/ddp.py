"""Lightning with two processes: python ddp.py FOLDER writes what each rank ends with."""

import sys
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.integrations.test_lightning import Classifier, callback, loader  # noqa: E402
from tests.nets import batch  # noqa: E402


def fit(folder, run, seed, checkpoint=None):
    """Train on different data on each rank; score with the same batches on both."""
    net, prune = Classifier(seed), callback(batches=[batch(seed=1), batch(seed=2)])
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[prune, ModelCheckpoint(folder, filename=run + "-{epoch}", save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(net, loader(8), ckpt_path=checkpoint)
    masks = {f"mask.{name}": kept for name, kept in prune.mask.items()}
    save_file({**net.net.state_dict(), **masks}, folder / f"{run}-{trainer.global_rank}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    fit(folder, "whole", seed=0)
    fit(folder, "resumed", seed=5, checkpoint=folder / "whole-epoch=1.ckpt")
