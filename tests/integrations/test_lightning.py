import csv
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import driveprune as dp
from driveprune.integrations.lightning import PruneCallback
from driveprune.mask import kept_count
from driveprune.plan import Prune, Train
from tests.nets import batch, mlp, removed_are_zero, same, snapshot
from tests.patience import PATIENCE

pytestmark = [
    pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]
SHORT = {
    "drive": {"early_epochs": 1, "cuts": 4},
    "driveflow": {"early_epochs": 1, "cuts": 4},
    "imp": {"cycles": 2, "cycle_epochs": 1},
    "gmp": {"cuts": 3},
    "magnitude": {"early_epochs": 2},
    "synflow": {"cuts": 5},
    "force": {"cuts": 5},
}
WEIGHTS = 1530
ROOT = Path(__file__).parents[2]


class Classifier(L.LightningModule):
    """What people write: forward, a training_step that logs, a metric, a schedule."""

    def __init__(self, seed=0, *, interval="epoch", optimizer="adam"):
        super().__init__()
        self.net = mlp(seed)
        self.mean_loss = MeanMetric()
        self.losses = []
        self.interval, self.optimizer_name = interval, optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.mean_loss.update(loss.detach())
        self.losses.append(loss.detach())
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"again": loss}, on_epoch=True)
        return {"loss": loss}

    def configure_optimizers(self):
        kinds = {"adam": torch.optim.AdamW, "lbfgs": torch.optim.LBFGS}
        optimizer = kinds[self.optimizer_name](self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 if self.interval == "epoch" else 3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def loader(batches=4, **options):
    x, y = batch(size=16 * batches, seed=5)
    return DataLoader(TensorDataset(x, y), batch_size=16, **options)


def callback(method="drive", sparsity=0.9, **options):
    knobs = SHORT.get(method) if isinstance(method, str) else None
    return PruneCallback(method=method, sparsity=sparsity, **{"knobs": knobs, **options})


def trainer(prune, tmp_path, *others, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    if not any(isinstance(other, ModelCheckpoint) for other in others):
        quiet["enable_checkpointing"] = False
    return L.Trainer(default_root_dir=tmp_path, callbacks=[prune, *others], **{**quiet, "max_epochs": 4, **options})


def count(mask):
    return sum(int(kept.sum()) for kept in mask.values())


@pytest.mark.parametrize("method", dp.methods.names())
def test_every_method_prunes_exactly_and_the_zeros_stay(method, tmp_path):
    net, prune = Classifier(), callback(method)
    trainer(prune, tmp_path).fit(net, loader())
    assert prune.pruner.done
    assert count(prune.mask) == kept_count(WEIGHTS, 0.9)
    assert removed_are_zero(net, prune.mask)
    assert set(prune.mask) == {"net.0.weight", "net.2.weight", "net.4.weight"}
    assert all(w[prune.mask[name]].any() for name, w in dp.prunable(net).items() if prune.mask[name].any())


class Moments(L.Callback):
    """Notes the sparsity after each batch."""

    def __init__(self):
        self.seen, self.rates, self.cycles = [], [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        (prune,) = (c for c in trainer.callbacks if isinstance(c, PruneCallback))
        self.seen.append(round(dp.sparsity(prune.mask), 2))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.cycles.append(prune.pruner.cycle)


def test_it_cuts_when_the_plan_says_so(tmp_path):
    moments = Moments()
    trainer(callback(), tmp_path, moments).fit(Classifier(), loader())
    assert moments.seen == [0] * 3 + [0.9] * 13


def test_methods_without_early_training_cut_first(tmp_path):
    moments = Moments()
    trainer(callback("snip"), tmp_path, moments).fit(Classifier(), loader())
    assert moments.seen == [0.9] * 16


@pytest.mark.parametrize(
    ("options", "steps", "cut"),
    [
        ({"accumulate_grad_batches": 2}, 8, 2),
        ({"accumulate_grad_batches": 3}, 8, 2),  # the last step of an epoch has fewer batches
        ({"max_steps": 7, "max_epochs": -1}, 7, 4),
        ({"limit_train_batches": 2}, 8, 2),
        ({"limit_train_batches": 0.5, "accumulate_grad_batches": 2}, 4, 1),
    ],
)
def test_steps_are_those_of_the_optimiser(options, steps, cut, tmp_path):
    prune = callback()
    trainer(prune, tmp_path, **options).fit(Classifier(), loader())
    first, last = prune.pruner.plan[0], prune.pruner.plan[-1]
    assert (first.until, last.until) == (cut, steps)
    assert prune.pruner.done


@pytest.mark.filterwarnings("ignore:.*precision.*:UserWarning:lightning")
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    ],
)
def test_precision_and_clipping(options, tmp_path):
    net, prune = Classifier(), callback()
    trainer(prune, tmp_path, **options).fit(net, loader())
    assert count(prune.mask) == kept_count(WEIGHTS, 0.9)
    assert removed_are_zero(net, prune.mask)


def test_an_optimiser_with_closures(tmp_path):
    net, prune = Classifier(optimizer="lbfgs"), callback("snip")
    trainer(prune, tmp_path).fit(net, loader())
    assert removed_are_zero(net, prune.mask)


def test_scoring_leaves_no_trace(tmp_path):
    """A cut that removes nothing: the training is bit for bit the one without the callback."""
    plain, pruned = Classifier(), Classifier()

    scored = []

    def score(model, mask, batches, *, loss, generator):
        scored.append(loss(model, next(batches)).item())
        return {name: kept.float() for name, kept in mask.items()}

    plan = [Train(3), Prune(score, (0.0, 0.0), revive=True), Train(16)]
    for net, other in ((plain, L.Callback()), (pruned, callback(plan, 0.0))):
        torch.manual_seed(0)
        trainer(other, tmp_path).fit(net, loader(shuffle=True))
    assert len(scored) == 2
    assert same(snapshot(plain), snapshot(pruned))


def test_a_cut_runs_the_training_step_without_a_trace(tmp_path):
    net = Classifier()
    trainer(callback("drive"), tmp_path).fit(net, loader())
    assert len(net.losses) == 16
    assert net.mean_loss._update_count == 16
    assert "log" not in net.__dict__


def test_the_sparsity_is_logged(tmp_path):
    logger = CSVLogger(tmp_path)
    fit = trainer(callback(), tmp_path, logger=logger, log_every_n_steps=1)
    fit.fit(Classifier(), loader())
    assert fit.callback_metrics["sparsity"] == pytest.approx(0.9)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        seen = [float(row["sparsity"]) for row in csv.DictReader(file) if row["sparsity"]]
    assert seen == pytest.approx([0] * 3 + [0.9] * 13)


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_imp_takes_weights_schedule_and_optimiser_back(interval, tmp_path):
    moments, net, prune = Moments(), Classifier(interval=interval), callback("imp")
    trainer(prune, tmp_path, moments).fit(net, loader())
    assert moments.cycles == [0] * 3 + [1] * 4 + [2] * 9
    assert moments.rates[0] == moments.rates[4] == moments.rates[8]  # the first step of each cycle
    one_cycle = moments.rates[:3]
    assert moments.rates[4:7] == moments.rates[8:11] == one_cycle
    assert moments.rates[15] < moments.rates[8]
    assert len(prune.pruner._snapshots) == 1


def test_imp_says_how_long_it_takes(tmp_path):
    with pytest.raises(ValueError, match="imp takes at least 201 steps, with 4 in an epoch, and .* only 16"):
        trainer(PruneCallback(method="imp", sparsity=0.9, knobs={"cycles": 50, "cycle_epochs": 1}), tmp_path).fit(
            Classifier(), loader()
        )


@pytest.mark.parametrize("method", ["drive", "imp", "gmp", "snip"])
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_resuming_gives_the_same_bits(method, interval, tmp_path):
    whole, prune = Classifier(interval=interval), callback(method)
    saved = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    trainer(prune, tmp_path, saved).fit(whole, loader())
    for epoch in range(3):
        again, resumed = Classifier(seed=9, interval=interval), callback(method)
        file = tmp_path / f"epoch={epoch}.ckpt"
        trainer(resumed, tmp_path).fit(again, loader(), ckpt_path=file, weights_only=True)
        assert same(snapshot(whole), snapshot(again)), epoch
        assert same(dict(prune.mask), dict(resumed.mask))
        assert resumed.pruner.done


class Remembering:
    """A loader that knows where it is, so that Lightning can go on in the middle of an epoch."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return 4

    def __iter__(self):
        for place in range(self.at, 4):
            self.at = (place + 1) % 4
            yield batch(seed=place)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("method", ["drive", "imp"])
def test_resuming_in_the_middle_of_an_epoch(method, tmp_path):
    scoring = [batch(seed=0), batch(seed=1)]
    whole, prune = Classifier(), callback(method, batches=scoring)
    saved = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    trainer(prune, tmp_path, saved).fit(whole, Remembering())
    for step in (2, 3, 4, 5, 10):
        again, resumed = Classifier(seed=9), callback(method, batches=scoring)
        trainer(resumed, tmp_path).fit(again, Remembering(), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert same(snapshot(whole), snapshot(again)), step


def test_training_on_after_the_plan_stays_sparse(tmp_path):
    net, prune = Classifier(), callback()
    saved = ModelCheckpoint(tmp_path, filename="last")
    trainer(prune, tmp_path, saved).fit(net, loader())
    again, longer = Classifier(seed=4), callback()
    trainer(longer, tmp_path, max_epochs=8).fit(again, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert same(dict(prune.mask), dict(longer.mask))
    assert removed_are_zero(again, prune.mask)
    assert not same(snapshot(net), snapshot(again))


def test_a_second_fit_of_the_same_trainer_goes_on(tmp_path):
    net, prune = Classifier(), callback()
    fit = trainer(prune, tmp_path)
    fit.fit(net, loader())
    mask = dict(prune.mask)
    fit.fit_loop.max_epochs = 6
    fit.fit(net, loader())
    assert fit.global_step == 24
    assert same(mask, dict(prune.mask))
    assert removed_are_zero(net, mask)


def test_a_dense_checkpoint_is_pruned_in_the_steps_that_are_left(tmp_path):
    net = Classifier()
    trainer(L.Callback(), tmp_path, ModelCheckpoint(tmp_path, filename="dense")).fit(net, loader())
    prune = callback()
    trainer(prune, tmp_path, max_epochs=7).fit(Classifier(seed=2), loader(), ckpt_path=tmp_path / "dense.ckpt")
    assert (prune.pruner.plan[0].until, prune.pruner.plan[-1].until) == (4, 12)
    assert prune.pruner.done


def test_the_model_is_free_afterwards(tmp_path):
    net, prune = Classifier(), callback()
    trainer(prune, tmp_path).fit(net, loader())
    assert dp.hold(net, None, prune.mask)
    assert set(net.state_dict()) == set(Classifier().state_dict())


def test_an_exception_lets_go(tmp_path):
    class Stops(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            raise RuntimeError("enough")

    net, prune = Classifier(), callback("snip")
    with pytest.raises(RuntimeError, match="enough"):
        trainer(prune, tmp_path, Stops()).fit(net, loader())
    trainer(callback("snip"), tmp_path).fit(net, loader())


def test_a_training_that_stops_before_the_cut_is_told(tmp_path):
    class Stops(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = True

    with pytest.warns(
        UserWarning, match="ended before the plan: 1 cuts were still to come, the sparsity is 0 and not"
    ):
        trainer(callback("magnitude"), tmp_path, Stops()).fit(Classifier(), loader())


class Gan(L.LightningModule):
    """Two networks and two optimisers, stepped by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 6))
        self.critic = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 1))

    def training_step(self, batch, batch_idx):
        real, _ = batch
        for_generator, for_critic = self.optimizers()
        made = self.generator(torch.randn(len(real), 4))
        for_critic.zero_grad()
        self.manual_backward(F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made.detach())).mean())
        for_critic.step()
        for_generator.zero_grad()
        self.manual_backward(F.softplus(-self.critic(made)).mean())
        for_generator.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.generator, self.critic)]


def gan_loss(gan, batch):
    made = gan.generator(torch.randn(len(batch[0]), 4))
    return F.softplus(-gan.critic(batch[0])).mean() + F.softplus(gan.critic(made)).mean()


def test_manual_optimisation_with_two_optimisers(tmp_path):
    net, prune = Gan(), callback(loss=gan_loss)
    trainer(prune, tmp_path).fit(net, loader())
    assert prune.pruner.done
    assert count(prune.mask) == kept_count(4 * 30 + 30 * 6 + 6 * 30 + 30, 0.9)
    assert removed_are_zero(net, prune.mask)


def test_only_a_part(tmp_path):
    net = Gan()
    prune = callback("snip", part="critic", loss=lambda critic, batch: critic(batch[0]).square().mean())
    trainer(prune, tmp_path).fit(net, loader())
    assert list(prune.mask) == ["0.weight", "2.weight"]
    assert removed_are_zero(net.critic, prune.mask)
    assert net.generator[0].weight.all()


@pytest.mark.parametrize("method", ["synflow", "grasp"])
def test_a_module_whose_training_step_calls_a_part(method, tmp_path):
    class Around(Classifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

    with pytest.raises(ValueError, match="the loss does not call the model itself"):
        trainer(callback(method), tmp_path).fit(Around(), loader())
    net, prune = Around(), callback(method, part="net")
    trainer(prune, tmp_path).fit(net, loader())
    assert list(prune.mask) == ["0.weight", "2.weight", "4.weight"]
    assert removed_are_zero(net.net, prune.mask)


def test_manual_optimisation_needs_a_loss(tmp_path):
    with pytest.raises(ValueError, match="with manual optimisation your training_step moves weights.*pass loss="):
        trainer(callback(), tmp_path).fit(Gan(), loader())


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            x, y = batch()
            yield x[0], y[0]


def test_data_without_an_end(tmp_path):
    data = DataLoader(Endless(), batch_size=8)
    with pytest.raises(ValueError, match="do not say how long an epoch is: pass steps_per_epoch"):
        trainer(callback(), tmp_path, max_steps=10, max_epochs=-1).fit(Classifier(), data)
    prune = callback(steps_per_epoch=3)
    trainer(prune, tmp_path, max_steps=10, max_epochs=-1).fit(Classifier(), data)
    assert (prune.pruner.plan[0].until, prune.pruner.plan[-1].until) == (3, 10)
    with pytest.raises(ValueError, match="a plan needs an end: give the Trainer max_epochs or max_steps"):
        trainer(callback(steps_per_epoch=3), tmp_path, max_epochs=-1).fit(Classifier(), data)


def test_several_loaders(tmp_path):
    class Two(Classifier):
        def training_step(self, batch):
            return F.cross_entropy(self(batch["a"][0]), batch["b"][1])

    net, prune = Two(), callback()
    trainer(prune, tmp_path).fit(net, {"a": loader(), "b": loader(2)})
    assert removed_are_zero(net, prune.mask)


def test_a_training_step_without_a_loss(tmp_path):
    class Lazy(Classifier):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ValueError, match="training_step returned no loss to score with, but NoneType: pass loss="):
        trainer(callback("snip"), tmp_path).fit(Lazy(), loader())


def test_fast_dev_run_prunes_nothing(tmp_path):
    net, prune = Classifier(), PruneCallback(sparsity=0.9)
    trainer(prune, tmp_path, fast_dev_run=True).fit(net, loader())
    with pytest.raises(ValueError, match="there is no pruner yet"):
        _ = prune.pruner


def test_a_compiled_module(tmp_path):
    class Plain(Classifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

    net, prune = Plain(), callback()
    trainer(prune, tmp_path).fit(torch.compile(net, backend="eager"), loader())
    assert count(prune.mask) == kept_count(WEIGHTS, 0.9)
    assert removed_are_zero(net, prune.mask)


def test_two_processes(tmp_path):
    """Both ranks have the same mask and the same weights, also after going on from a checkpoint.

    They score with the same batches, or each with its share of the training data, as Lightning's sampler gives it.
    """
    script = Path(__file__).with_name("ddp.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    for method in ("same", "drive", "imp", "snip", "gmp"):
        runs = [f"{method}-{run}" for run in ("whole", "resumed")]
        first, *others = (load_file(tmp_path / f"{run}-{rank}.safetensors") for run in runs for rank in (0, 1))
        assert all(same(first, other) for other in others), method
        masks = {name: kept for name, kept in first.items() if name.startswith("mask.")}
        assert count(masks) == kept_count(WEIGHTS, 0.9)
        for name, kept in masks.items():
            assert not first[name.removeprefix("mask.net.")][~kept].any()
    mine, yours = (load_file(tmp_path / f"scored-{rank}.safetensors")["x"] for rank in (0, 1))
    assert not any(torch.equal(x, y) for x in mine for y in yours)
