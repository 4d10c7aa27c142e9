import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import driveprune as dp
from driveprune.integrations.huggingface import FILE, PruneCallback
from driveprune.mask import kept_count
from driveprune.plan import Prune, Train
from tests.nets import removed_are_zero, same, snapshot
from tests.ranks import torchrun

pytestmark = [pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")]
SHORT = {
    "drive": {"early_epochs": 1, "cuts": 4},
    "driveflow": {"early_epochs": 1, "cuts": 4},
    "imp": {"cycles": 2, "cycle_epochs": 1},
    "gmp": {"cuts": 3},
    "magnitude": {"early_epochs": 2},
    "synflow": {"cuts": 5},
    "force": {"cuts": 5},
    "grasp": {"temperature": 1.0},
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def bert(seed=0):
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**SMALL, vocab_size=50, max_position_embeddings=12, num_labels=3))


def vit(seed=0):
    torch.manual_seed(seed)
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3))


def gpt(seed=0):
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 12}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def texts(count=32):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(50, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": int(row[0]) % 3} for row in rows]


def pictures(count=32):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    return [{"pixel_values": image, "labels": int(image.sum() > 0)} for image in images]


def lines(count=32):
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in texts(count)]


CASES = {"bert": (bert, texts), "vit": (vit, pictures), "gpt": (gpt, lines)}


def callback(method="drive", sparsity=0.9, **options):
    knobs = SHORT.get(method) if isinstance(method, str) else None
    return PruneCallback(method=method, sparsity=sparsity, **{"knobs": knobs, **options})


def trainer(model, data, folder, *callbacks, **options):
    settings = {
        "num_train_epochs": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "weight_decay": 0.1,
    }  # fmt: skip
    return Trainer(
        model,
        TrainingArguments(str(folder), **{**settings, **options}),
        train_dataset=data,
        callbacks=list(callbacks),
    )


def count(mask):
    return sum(int(kept.sum()) for kept in mask.values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", dp.methods.names())
def test_every_method_prunes_exactly_and_the_zeros_stay(method, case, tmp_path):
    build, data = CASES[case]
    net, prune = build(), callback(method)
    size = sum(w.numel() for w in dp.prunable(net).values())
    trainer(net, data(), tmp_path, prune).train()
    assert prune.pruner.done
    assert count(prune.mask) == kept_count(size, 0.9)
    assert removed_are_zero(net, prune.mask)


@pytest.mark.parametrize("case", CASES)
def test_what_is_pruned(case):
    weights = dp.prunable(CASES[case][0]())
    assert not [name for name in weights if "embeddings.position" in name or "wte" in name or "norm" in name.lower()]
    assert [name for name in weights if "layer.0." in name or "h.0." in name or "layers.0." in name]


def test_grasp_says_what_to_do_with_outputs_that_are_no_tensor(tmp_path):
    with pytest.raises(ValueError, match="set the knob temperature=1"):
        trainer(bert(), texts(), tmp_path, callback("grasp", knobs={})).train()


@pytest.mark.parametrize("case", CASES)
def test_a_stored_model_comes_back_with_its_zeros(case, tmp_path):
    build, data = CASES[case]
    net, prune = build(), callback("snip")
    trainer(net, data(), tmp_path, prune).train()
    net.save_pretrained(tmp_path / "net")
    again = type(net).from_pretrained(tmp_path / "net")
    assert same(snapshot(net), snapshot(again))
    assert removed_are_zero(again, prune.mask)
    assert set(again.state_dict()) == set(build().state_dict())
    found = dp.mask_of(again)
    assert all((found[name] <= kept).all() for name, kept in prune.mask.items())
    dp.save(tmp_path / "net.safetensors", again, prune.mask)
    other = build(seed=3)
    assert same(dict(dp.load(tmp_path / "net.safetensors", other)), dict(prune.mask))
    assert same(snapshot(other), snapshot(net))


class Moments(TrainerCallback):
    """Notes sparsity, cycle and rate after each step."""

    def __init__(self, prune):
        self.prune, self.seen, self.cycles, self.rates = prune, [], [], []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(round(dp.sparsity(self.prune.mask), 2))
        self.cycles.append(self.prune.pruner.cycle)
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])


def test_it_cuts_when_the_plan_says_so(tmp_path):
    prune = callback()
    moments = Moments(prune)
    fit = trainer(bert(), texts(), tmp_path, prune, moments)
    fit.train()
    assert moments.seen == [0] * 3 + [0.9] * 13
    logged = [row["sparsity"] for row in fit.state.log_history if "loss" in row]
    assert logged == pytest.approx([0] * 3 + [0.9] * 13, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "steps", "cut"),
    [
        ({"gradient_accumulation_steps": 2}, 8, 2),
        ({"gradient_accumulation_steps": 3}, 8, 2),
        ({"max_steps": 7}, 7, 4),
        ({"max_grad_norm": 0.01}, 16, 4),
        ({"bf16": True}, 16, 4),
        ({"gradient_checkpointing": True}, 16, 4),
    ],
)
def test_steps_are_those_of_the_optimiser(options, steps, cut, tmp_path):
    net, prune = bert(), callback()
    trainer(net, texts(), tmp_path, prune, **options).train()
    assert (prune.pruner.plan[0].until, prune.pruner.plan[-1].until) == (cut, steps)
    assert prune.pruner.done
    assert removed_are_zero(net, prune.mask)


def test_scores_are_made_in_full_precision(tmp_path):
    kinds = []

    def score(model, mask, batches, *, loss, generator):
        with torch.no_grad():
            kinds.append(model.bert(**{"input_ids": next(batches)["input_ids"]}).pooler_output.dtype)
        return {name: w.detach().abs() for name, w in dp.prunable(model).items()}

    net = bert()
    trainer(net, texts(), tmp_path, callback(score, sparsity=0.5), bf16=True, num_train_epochs=1).train()
    assert kinds == [torch.float32]


def test_scoring_leaves_no_trace(tmp_path):
    """A cut that removes nothing, in the middle of an epoch of shuffled data: bit for bit the same training."""
    scored = []

    def score(model, mask, batches, *, loss, generator):
        scored.extend(loss(model, next(batches)).item() for _ in range(6))
        return {name: kept.float() for name, kept in mask.items()}

    plan = [Train(2), Prune(score, (0.0,), revive=True), Train(16)]
    nets = []
    for callbacks in ([], [callback(plan, 0.0)]):
        nets.append(bert())
        trainer(nets[-1], texts(), tmp_path, *callbacks).train()
    assert len(scored) == 6
    assert same(snapshot(nets[0]), snapshot(nets[1]))


def test_imp_takes_the_schedule_back(tmp_path):
    prune = callback("imp")
    moments = Moments(prune)
    trainer(bert(), texts(), tmp_path, prune, moments).train()
    assert moments.cycles == [0] * 3 + [1] * 4 + [2] * 9
    assert moments.rates[:3] == moments.rates[4:7] == moments.rates[8:11]


@pytest.mark.parametrize("method", ["drive", "imp"])
def test_resuming_gives_the_same_bits(method, tmp_path):
    whole, prune = bert(), callback(method)
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer(whole, texts(), tmp_path, prune, **saving).train()
    for step in (2, 4, 9):
        again, resumed = bert(seed=9), callback(method)
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / FILE).exists()
        trainer(again, texts(), tmp_path, resumed).train(resume_from_checkpoint=str(folder))
        assert same(snapshot(whole), snapshot(again)), step
        assert same(dict(prune.mask), dict(resumed.mask))
        assert resumed.pruner.done


def test_a_checkpoint_that_was_moved(tmp_path):
    trainer(bert(), texts(), tmp_path / "a", callback(), save_strategy="steps", save_steps=6).train()
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "a" / "checkpoint-6").rename(elsewhere)
    with pytest.raises(ValueError, match="goes on from step 6, but there is no .*pass resume=, the folder"):
        trainer(bert(), texts(), tmp_path / "b", callback()).train(resume_from_checkpoint=str(elsewhere))
    net, prune = bert(), callback(resume=elsewhere)
    trainer(net, texts(), tmp_path / "b", prune).train(resume_from_checkpoint=str(elsewhere))
    assert removed_are_zero(net, prune.mask)
    late = callback(resume=False)
    trainer(bert(), texts(), tmp_path / "b", late).train(resume_from_checkpoint=str(elsewhere))
    assert late.pruner.plan[-1].until == 10


def test_the_best_model_is_a_sparse_one(tmp_path):
    """The dense network is better at first; what is loaded at the end was stored after the cut all the same."""
    net, prune = bert(), callback("magnitude", sparsity=0.95)
    fit = Trainer(
        net,
        TrainingArguments(
            str(tmp_path), num_train_epochs=4, per_device_train_batch_size=8, learning_rate=1e-3, use_cpu=True,
            report_to="none", disable_tqdm=True, eval_strategy="steps", save_strategy="steps", eval_steps=2,
            save_steps=2, load_best_model_at_end=True, metric_for_best_model="steps", greater_is_better=False,
        ),
        train_dataset=texts(), eval_dataset=texts(), callbacks=[prune],
        compute_metrics=lambda _: {"steps": float(fit.state.global_step)},
    )  # fmt: skip
    fit.train()
    best = fit.state.best_model_checkpoint
    assert best.endswith("checkpoint-8")  # the first one after the cut, which comes with step 8
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert saved["best_model_checkpoint"].endswith("checkpoint-2")
    assert removed_are_zero(net, prune.mask)


def test_a_model_without_a_loss(tmp_path):
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 3)

        def forward(self, input_ids, labels):
            return {"logits": self.net(input_ids.float())}

    with pytest.raises(ValueError, match="the model returned no loss"):
        trainer(Silent(), texts(), tmp_path, callback("snip")).train()
    net, prune = Silent(), callback("snip", loss=lambda model, batch: model(**batch)["logits"].square().mean())
    with pytest.raises(ValueError, match="did not return a loss"):
        trainer(net, texts(), tmp_path, prune).train()  # the Trainer itself needs one
    assert removed_are_zero(net, prune.mask)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from texts()


def test_data_without_a_length(tmp_path):
    with pytest.raises(ValueError, match="pass steps_per_epoch"):
        trainer(bert(), Endless(), tmp_path, callback(), max_steps=9).train()
    prune = callback(steps_per_epoch=3)
    trainer(bert(), Endless(), tmp_path, prune, max_steps=9).train()
    assert (prune.pruner.plan[0].until, prune.pruner.plan[-1].until) == (3, 9)


def test_a_training_that_stops_before_the_cut_is_told(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    with pytest.warns(UserWarning, match="ended before the plan: 1 cuts"):
        trainer(bert(), texts(), tmp_path, callback(), Stops()).train()


def test_the_model_is_free_afterwards(tmp_path):
    net, prune = bert(), callback()
    trainer(net, texts(), tmp_path, prune).train()
    assert dp.hold(net, None, prune.mask)


RUNS = {
    "bert": ("bert", "drive", {}),
    "accumulated": ("bert", "drive", {"bf16": True, "gradient_accumulation_steps": 2}),
    "rewound": ("bert", "imp", {}),
    "gradual": ("gpt", "gmp", {}),
    "gpt": ("gpt", "grasp", {}),
}
"""With two processes: the model, the method and the Trainer's options."""
STOPS = (2, 6)
"""The steps from which they go on."""


def test_two_processes(tmp_path):
    """Both ranks have the same mask and weights, bit for bit, also after going on from a checkpoint."""
    done = torchrun("tests.integrations.trainer_ranks", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for run in RUNS:
        assert_alike([load_file(tmp_path / f"{run}-{end}-{rank}") for end in ("whole", *STOPS) for rank in (0, 1)])
    assert_alike([load_file(tmp_path / f"stream-{rank}") for rank in (0, 1)])
    mine, yours = (load_file(tmp_path / f"scored-{rank}")["x"] for rank in (0, 1))
    assert not any(torch.equal(x, y) for x in mine for y in yours)  # each rank scores with its own examples


def assert_alike(found):
    assert all(same(found[0], other) for other in found[1:])
    mask = {name.removeprefix("mask."): kept for name, kept in found[0].items() if name.startswith("mask.")}
    assert count(mask) == kept_count(sum(kept.numel() for kept in mask.values()), 0.9)
    assert all(not found[0][name][~kept].any() for name, kept in mask.items())
