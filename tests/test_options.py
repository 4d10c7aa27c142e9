"""The command line: an option that cannot act is an error that names it and what it stands beside."""

import json
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from driveprune.cli import app
from driveprune.cli.options import recipe_of
from driveprune.files import write_json
from driveprune.runs.sweep import Outcome
from tests.runs.kills import small_spec

MODULE = """
import torch
from torch.nn import Linear, ReLU, Sequential
def net():
    return Sequential(Linear(4, 50), ReLU(), Linear(50, 3))
def batches():
    return [(torch.randn(20, 4), torch.randint(3, (20,)))]
"""
VALUES = {
    "--method": "snip", "--sparsity": "0.5", "--recipe": "demo-digits", "--set": "demo", "--data": "digits",
    "--model": "digits_net", "--seed": "7", "--knob": "cuts=3", "--check": "shuffle", "--epochs": "2",
    "--width": "0.5", "--images": "100", "--test-images": "50", "--budget": "macs", "--holdout": "20", "--size": "8",
    "--threads": "1", "--device": "cpu", "--precision": "bf16", "--channels-last": None,
}  # fmt: skip
"""Every option that is part of what a run is, with a value that would make another run."""


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_options.py").write_text(MODULE)
    write_json(tmp_path / "spec.json", small_spec("snip").to_json())
    write_json(tmp_path / "dense.json", small_spec("dense").to_json())
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
    return tmp_path


def test_every_option_that_a_spec_says_is_in_the_list_above():
    commands = typer.main.get_command(app).commands
    options = {each.opts[0] for each in commands["run"].params if each.opts[0].startswith("--")}
    free = {"--spec", "--trust", "--runs", "--every", "--engine", "--json", "--data-dir", "--help"}
    assert options - free == VALUES.keys()


@pytest.mark.parametrize("option", VALUES)
def test_beside_a_spec_nothing_is_said_that_the_spec_says(here, option):
    value = VALUES[option]
    told = command("run", "--spec", "spec.json", "--runs", "r", option, *([] if value is None else [value]))
    assert told.exit_code == 2, told.output
    assert f"error: {option} cannot act beside --spec" in told.stderr
    assert not (here / "r").exists()


def test_what_decides_nothing_about_a_run_acts_beside_a_spec(here):
    words = ("--engine", "auto", "--every", "9", "--json")
    told = command("run", "--spec", "spec.json", "--runs", "r", *words)
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["id"] == small_spec("snip").id


PAIRS = [
    ("run --method dense", "--sparsity 0.5", "the method dense"),
    ("run --method dense", "--knob cuts=3", "the method dense"),
    ("run --method dense", "--check shuffle", "the method dense"),
    ("run --method dense", "--budget macs", "the method dense"),
    ("run --method dense", "--engine sparse", "the method dense"),
    ("run --spec dense.json", "--engine sparse", "the method dense"),
    ("run", "--trust", "a run of your own"),
    ("run --recipe demo-digits", "--set demo", "--recipe"),
    ("run", "--set small", "--data or --model"),
    ("run --data images", "--set paper", "--data images"),
    ("run", "--data-dir .", "the data digits"),
    ("run --spec spec.json", "--data-dir .", "the data digits"),
    ("run --data images", "--data-dir .", "the data images"),
    ("run", "--size 8", "size=8"),
    ("run --device cuda", "--engine sparse", "--device cuda"),
    ("run --device cuda", "--engine auto", "--device cuda"),
    ("run --precision bf16", "--engine sparse", "--precision bf16"),
    ("run --precision fp16", "--engine auto", "--precision fp16"),
    ("sweep --precision bf16", "--engine auto", "--precision bf16"),
    ("sweep --methods dense", "--sparsities 0.5", "the method dense"),
    ("sweep --methods dense", "--budget macs", "the method dense"),
    ("sweep --methods dense", "--engine auto", "the method dense"),
    ("sweep --methods dense", "--checks shuffle", "the method dense"),
    ("sweep --methods dense", "--knob dense.cuts=3", "the method dense"),
    ("sweep --methods snip", "--knob drive.cuts=3", "drive"),
    ("sweep --methods erk,snip", "--checks erk", "--methods with erk"),
    ("sweep --methods erk,random", "--checks shuffle", "--methods erk,random"),
    ("sweep --methods dense,erk", "--checks random", "--methods dense,erk"),
    ("sweep --recipe demo-digits", "--set demo", "--recipe"),
    ("sweep", "--set strong", "--data or --model"),
    ("sweep", "--data-dir .", "the data digits"),
    ("sweep", "--size 8", "size=8"),
    ("sweep", "--address auto", "--cluster"),
    ("sweep", "--retries 3", "--cluster"),
    ("sweep", "--cpus-per-run 1", "--cluster"),
    ("sweep", "--gpus-per-run 1", "--cluster"),
    ("sweep --cluster ray", "--jobs 1", "on a cluster"),
    ("prune mine_options.net mine_options.batches", "--batch 3", "mine_options.batches"),
    ("prune mine_options.net mine_options.batches", "--data-dir .", "mine_options.batches"),
    ("prune digits_net digits", "--data-dir .", "the data digits"),
    ("preview mine_options.net mine_options.batches", "--batch 3", "mine_options.batches"),
    ("preview mine_options.net mine_options.batches", "--data-dir .", "mine_options.batches"),
    ("preview digits_net digits", "--data-dir .", "the data digits"),
    ("data check digits", "--data-dir .", "the data digits"),
    ("data check digits", "--size 8", "size=8"),
    ("data check images", "--data-dir .", "the data images"),
    ("data get digits", "--data-dir .", "the data digits"),
]


@pytest.mark.parametrize(("words", "option", "beside"), PAIRS, ids=lambda value: value)
def test_an_option_that_cannot_act_says_so_and_nothing_is_done(here, words, option, beside):
    before = sorted(here.rglob("*"))
    told = command(*words.split(), *option.split())
    assert told.exit_code == 2, told.output
    (line,) = [line for line in told.stderr.splitlines() if line.startswith("error: ")]
    name = option.split()[0]
    assert name in line or name.lstrip("-") in line
    assert beside in line
    assert [path for path in sorted(here.rglob("*")) if "__pycache__" not in str(path)] == before


OTHERS = {
    **VALUES, "--recipe": "strong-digits-net-mnist --data digits", "--data": "images", "--no-channels-last": None,
    "--size": "16 --data images", "--device": "cuda", "--threads": "77",
}  # fmt: skip
"""The same options with values that are not their defaults, each with what it needs to act."""


def test_every_option_of_a_run_makes_another_run(here, monkeypatch):
    specs = []
    monkeypatch.setattr("driveprune.cli.runs.carry_out", lambda root, spec, *_, **__: specs.append(spec) or {})
    monkeypatch.setattr("driveprune.cli.runs.print_run", lambda _: None)
    for place, name in enumerate(("a", "b")):
        for number in range(5):
            Image.new("L", (8, 8), 20 * number + place).save(here / "images" / name / f"{number}.png")
    assert command("run").exit_code == 0
    for option, value in OTHERS.items():
        if option not in {"--set", "--model", "--channels-last"}:  # the last is the default, the others stand below
            told = command("run", option, *([] if value is None else value.split()))
            assert told.exit_code == 0, (option, told.output)
    assert command("run", "--model", "mine_options.net").exit_code == 0
    assert len({spec.id for spec in specs}) == len(specs) == len(OTHERS) - 1
    found = {kind: recipe_of(None, kind, "cifar10", "vgg16", *[None] * 4) for kind in ("paper", "strong", "small")}
    assert len({str(recipe) for recipe in found.values()}) == 3


def test_every_option_of_a_sweep_makes_other_runs(here, monkeypatch):
    swept = []
    monkeypatch.setattr("driveprune.cli.runs.run_all", lambda _, specs, *__, **___: swept.append(specs) or Outcome())
    words = (
        "", "--methods snip", "--sparsities 0.5", "--seeds 1,2", "--checks shuffle", "--knob drive.cuts=3",
        "--epochs 2", "--width 0.5", "--images 100", "--test-images 50", "--budget macs", "--holdout 20",
        "--threads 77", "--precision bf16", "--no-channels-last", "--device cuda",
    )  # fmt: skip
    for options in words:
        told = command("sweep", *options.split())
        assert told.exit_code == 0, (options, told.output)
    assert len({tuple(spec.id for spec in specs) for specs in swept}) == len(words)


def test_every_option_of_prune_makes_another_file(here):
    net, found = ("mine_options.net", "mine_options.batches"), []
    for options in ("", "--method snip", "--sparsity 0.5", "--knob cuts=2", "--seed 7"):
        told = command("prune", *net, *options.split(), "-o", "x.safetensors")
        assert told.exit_code == 0, (options, told.output)
        found.append((here / "x.safetensors").read_bytes())
    assert len(set(found)) == len(found)
    sizes = []
    for batch in ("16", "64"):
        told = command("prune", "digits_net", "digits", "--method", "snip", "--batch", batch, "-o", "x.safetensors")
        assert told.exit_code == 0, told.output
        sizes.append((here / "x.safetensors").read_bytes())
    assert sizes[0] != sizes[1]


FLAT = """
from torch.nn import Flatten, Linear, ReLU, Sequential
def flat(classes=10):
    return Sequential(Flatten(), Linear(64, 20), ReLU(), Linear(20, classes))
number = 3
"""


def test_a_network_without_convolutions_runs(here):
    """--channels-last is the default of a command, and nothing that its user has asked for."""
    (here / "mine_flat.py").write_text(FLAT)
    told = command("run", "--model", "mine_flat.flat", "--method", "snip", "--epochs", "1", "--runs", "r")
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model mine_flat.flat --width 0.5", "mine_flat.flat cannot be scaled"),
        ("--model resnt18", "unknown model 'resnt18'"),
        ("--model mine_flat.net", "unknown model 'mine_flat.net'"),
        ("--model mine_flat.number", "mine_flat.number must be a function that makes a network, got 3"),
        ("--method erk --budget macs", "a budget of multiply-adds needs a method"),
        ("--method snipp", "unknown method 'snipp'"),
        ("--knob early_epochs=Infinity", "early_epochs must be a number, got inf"),
        ("--knob early_epochs=abc", "early_epochs must be a number, got 'abc'"),
        ("--knob early_epochs=99", "early_epochs=99.0 (9900 steps)"),
        ("--holdout 5000", "holdout must be from 0"),
        ("--images 5000", "a subset must have from 1"),
        ("--test-images 5000", "a subset must have from 1"),
        ("--precision fp8", "precision must be"),
        ("--device nowhere", "nowhere"),
    ],
)
@pytest.mark.parametrize("name", ["run", "sweep"])
def test_what_cannot_be_run_fails_before_there_is_a_folder(here, name, words, message):
    (here / "mine_flat.py").write_text(FLAT)
    if name == "sweep":
        words = words.replace("--method ", "--methods ").replace("--knob ", "--knob drive.")
    told = command(name, *words.split(), "--runs", "r")
    assert told.exit_code == 2, told.output
    assert message in told.stderr
    assert not (here / "r").exists()


def test_seconds_that_nobody_can_wait(here):
    for words in (("run",), ("sweep",), ("watch", "r")):
        for every in ("-1", "nan", "inf"):
            assert f"--every must be seconds, at least 0, got {every}" in command(*words, f"--every={every}").stderr


def test_erk_with_a_budget_is_an_error_in_one_line(here):
    told = command("run", "--method", "erk", "--budget", "macs", "--runs", "r", "--epochs", "1")
    assert told.exit_code == 2, told.output
    assert len(told.stderr.strip().splitlines()) == 1
    assert "budget" in told.stderr


def test_options_of_export_and_bench_that_cannot_act(here):
    assert command("run", "--method", "snip", "--epochs", "1", "--width", "0.25", "--runs", "r").exit_code == 0
    folder = next(path for path in Path("r").iterdir() if path.is_dir())
    for words in (("export", folder, "--format", "csr"), ("bench", folder)):
        for option in (("--input", "1,8,8"), ("--classes", "10")):
            told = command(*words, *option)
            assert told.exit_code == 2
            assert f"error: {option[0]} cannot act beside" in told.stderr
    told = command("export", folder, "--model", "mine_options.net", "--input", "4", "--classes", "3")
    assert "--classes cannot act beside --model mine_options.net" in told.stderr
    assert "--every cannot act" in command("watch", "r", "--every", "2").stderr


def test_preview_prints_its_table_once(here):
    told = command("preview", "mine_options.net", "mine_options.batches", "--sparsity", "0.5")
    assert told.exit_code == 0, told.output
    assert told.stdout.count("effective sparsity") == 1
