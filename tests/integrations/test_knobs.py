"""Methods × callbacks × knobs: another value of a knob changes what comes out, or is refused."""

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import driveprune as dp
from driveprune.integrations import huggingface, lightning
from driveprune.kinds import OptionError
from tests.methods.test_knobs import CASES, EPOCHS, beside, check_acts, data, net

pytestmark = [
    pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]
X, Y = (torch.cat(parts) for parts in zip(*data(), strict=True))
BATCH = len(X) // 3
CALLBACKS = {"Lightning": lightning.PruneCallback, "transformers": huggingface.PruneCallback}


class Module(L.LightningModule):
    """The network in the way of Lightning."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Model(nn.Module):
    """The network in the way of transformers."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.net(x), labels)}


class Outcome:
    """What a training with a callback leaves: the moments and sparsities of the cuts, and the weights."""

    def __init__(self, prune, model):
        self.prune, self.model, self.seen = prune, model, []

    def step(self, *_, **__):
        pruner = self.prune.pruner
        self.seen.append((pruner.cycle, pruner.cycle_step, dp.sparsity(pruner.mask)))

    def __call__(self):
        return {name: w.tolist() for name, w in self.model.named_parameters()}, self.seen


def by_lightning(method, knobs):
    torch.manual_seed(0)
    module = Module()
    prune = lightning.PruneCallback(method=method, sparsity=0.9, knobs=knobs)
    outcome = Outcome(prune, module)
    watch = L.Callback()
    watch.on_train_batch_end = outcome.step
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[prune, watch], enable_checkpointing=False, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=BATCH))
    return outcome()


def by_transformers(method, knobs):
    model, knobs = (
        Model(),
        {"temperature": 1.0, **knobs} if method == "grasp" else knobs,
    )  # its output is a dictionary
    prune = huggingface.PruneCallback(method=method, sparsity=0.9, knobs=knobs)
    outcome = Outcome(prune, model)
    settings = TrainingArguments(
        "unused", num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, learning_rate=1e-2, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no", seed=0,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    trainer = Trainer(model, settings, train_dataset=rows, callbacks=[prune])
    step = prune.on_step_end
    prune.on_step_end = lambda *args, **given: (step(*args, **given), outcome.step())[0]
    trainer.train()
    return outcome()


@pytest.mark.parametrize("by", [by_lightning, by_transformers])
@pytest.mark.parametrize(("method", "knob"), CASES)
def test_another_value_changes_what_comes_out_or_is_refused(method, knob, by, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_acts(by, method, knob, beside(method, knob))


def plain(model, batch):
    """A loss of one's own."""
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("kind", CALLBACKS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 90}, "sparsity must be in .0, 1., got 90"),
        ({"sparsity": None}, "sparsity must be given"),
        ({"method": "drve"}, "unknown method 'drve'"),
        ({"method": [dp.Train(3), dp.Prune(plain, (0.5,))]}, "the plan cuts to sparsity 0.5, so sparsity=0.9 would"),
        ({"knobs": {"cut": 3}}, "drive has no knob 'cut'"),
        ({"knobs": {"cuts": 2.5}}, "cuts must be a whole number, got 2.5"),
        ({"min_kept": 2.5}, "min_kept must be a whole number, got 2.5"),
        ({"seed": 1.7}, "seed must be a whole number, got 1.7"),
        ({"frozen": "no"}, "frozen must be true or false, got 'no'"),
        ({"include": 3}, "include must be a pattern of parameter names"),
        ({"budget": "flops"}, "budget must be 'weights' or 'macs'"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be a whole number of at least 1, got 0"),
        ({"batches": TensorDataset(X, Y)}, "a Dataset has single examples"),
        ({"loss": nn.CrossEntropyLoss()}, "loss must be a function of .model, batch.* is one of outputs and targets"),
    ],
)
def test_options_that_cannot_be_are_refused_when_a_callback_is_made(kind, options, message):
    with pytest.raises((OptionError, ValueError, TypeError), match=message):
        CALLBACKS[kind](**{"sparsity": 0.9, **options})
