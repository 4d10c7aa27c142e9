"""Hugging Face's Trainer with two processes: `torchrun -m ... FOLDER` writes what each rank ends with."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from driveprune.integrations import huggingface
from tests.integrations.test_huggingface import CASES, RUNS, STOPS, Endless, bert, callback, texts, trainer

EXAMPLES = 30
"""In batches of 8 on two ranks: the last batch of an epoch is smaller."""


def fit(folder, run, *, resume=None):
    """Train as a run says, or go on from one of its checkpoints, which it leaves with every step."""
    case, method, options = RUNS[run]
    build, data = CASES[case]
    model, prune = build(seed=9 if resume else 0), callback(method)
    saving = {} if resume else {"save_strategy": "steps", "save_steps": 1}
    own = trainer(model, data(EXAMPLES), folder / run, prune, per_device_train_batch_size=4, **saving, **options)
    own.train(resume_from_checkpoint=resume and str(folder / run / f"checkpoint-{resume}"))
    assert prune.pruner.done
    write(folder / f"{run}-{resume or 'whole'}-{dist.get_rank()}", model, prune)


def write(path, model, prune):
    tensors = {f"mask.{name}": kept for name, kept in prune.mask.items()}
    save_file(tensors | {name: weight.detach().contiguous() for name, weight in model.named_parameters()}, path)


def note_examples(folder):
    """Which examples a rank scores with."""
    seen, loss = [], huggingface._own_loss

    def noted(model, batch):
        seen.append(batch["input_ids"])
        return loss(model, batch)

    huggingface._own_loss = noted
    trainer(bert(), texts(EXAMPLES), folder, callback("snip"), per_device_train_batch_size=4).train()
    huggingface._own_loss = loss
    save_file({"x": seen[0]}, folder / f"scored-{dist.get_rank()}")


def stream(folder):
    """Data without a length, which the first rank reads for both while training."""
    model, prune = bert(), callback(steps_per_epoch=3)
    trainer(model, Endless(), folder, prune, max_steps=9).train()
    write(folder / f"stream-{dist.get_rank()}", model, prune)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    root = Path(sys.argv[1])
    for each in RUNS:
        fit(root, each)
        for step in STOPS:
            fit(root, each, resume=step)
    note_examples(root)
    stream(root)
    dist.destroy_process_group()
