import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

import driveprune as dp
from driveprune.batches import subset
from driveprune.cli import app, main
from tests.nets import mlp


def run(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "120"})


QUICK = ("--width", "0.25", "--images", "200", "--test-images", "100", "--epochs", "2", "--threads", "1")
METHODS = {
    "drive": ("--method", "drive", "--sparsity", "0.9", "--knob", "early_epochs=1"),
    "snip": ("--method", "snip", "--sparsity", "0.9"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A store with a run of DRIVE and one of SNIP, made by the command."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("drive", "snip"):
        done = run("run", *QUICK, *METHODS[method], "--runs", str(root), "--json")
        assert done.exit_code == 0, done.output
    return root


def folder(root, method):
    return next(path for path in root.iterdir() if f"-{method}-" in path.name)


def test_run_says_what_came_out(runs):
    done = run("run", *QUICK, *METHODS["drive"], "--runs", str(runs))
    assert done.exit_code == 0, done.output
    assert "test accuracy on digits after the last epoch" in done.stdout
    assert "sparsity 89.99" in done.stdout
    assert "seconds: " in done.stdout


def test_run_repeats_a_spec_exactly(runs, tmp_path):
    first = folder(runs, "drive")
    done = run("run", "--spec", str(first / "spec.json"), "--runs", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    again = json.loads(done.stdout)
    result = json.loads((first / "result.json").read_text())
    assert again["id"] == first.name
    assert again["rows"] == result["rows"]


def test_sweep_prints_the_table_and_a_second_call_runs_nothing(tmp_path):
    words = ("sweep", "--methods", "dense,snip", "--sparsities", "0.9,0.95", *QUICK, "--runs", str(tmp_path))
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "3 runs to do, 0 done already" in done.stderr
    assert "-  " not in done.stdout  # no empty cell
    again = run(*words, "--json")
    assert json.loads(again.stdout)["skipped"] == [one["result"]["id"] for one in json.loads(again.stdout)["runs"]]


def test_a_sweep_with_a_failing_run_ends_with_exit_code_1(tmp_path, monkeypatch):
    (tmp_path / "broken_cli.py").write_text(
        "def score(model, mask, batches, *, loss, generator):\n    return 1 / 0\n"
    )
    monkeypatch.chdir(tmp_path)
    done = run("sweep", "--methods", "broken_cli,snip", "--sparsities", "0.9", *QUICK, "--runs", "r")
    assert done.exit_code == 1, done.output
    assert "ZeroDivisionError" in done.stderr
    assert "│ snip" in done.stdout


def test_report_of_runs(runs, tmp_path):
    done = run("report", str(runs))
    assert done.exit_code == 0, done.output
    assert "test accuracy in %, last epoch" in done.stdout
    assert {one["standing"] for one in json.loads(run("report", str(runs), "--json").stdout)} == {"done"}
    assert run("report", str(runs), "-o", str(tmp_path / "report.txt")).exit_code == 0
    assert "drive" in (tmp_path / "report.txt").read_text()


def test_report_as_a_page_and_as_figures(runs, tmp_path):
    done = run("report", str(runs), "-o", str(tmp_path / "report.html"), "--figures", str(tmp_path / "figures"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").read_text().lower().startswith("<!doctype html>")
    assert {path.suffix for path in (tmp_path / "figures").rglob("*") if path.is_file()} == {
        ".svg",
        ".png",
        ".csv",
        ".tex",
    }


def test_export_a_run_and_a_file(runs, tmp_path, monkeypatch):
    done = run("export", str(folder(runs, "drive")), "-o", str(tmp_path / "net.onnx"))
    assert done.exit_code == 0, done.output
    assert "multiply-adds" in done.stdout
    assert "ONNX Runtime" in done.stdout
    assert (tmp_path / "net.onnx").stat().st_size > 0
    done = run("export", str(folder(runs, "drive")), "--format", "csr", "-o", str(tmp_path / "csr"), "--json")
    assert json.loads(done.stdout)["bytes of the file"][0] > 0
    (tmp_path / "mine_export.py").write_text("from tests.nets import mlp\ndef make(): return mlp()\n")
    monkeypatch.chdir(tmp_path)
    net = mlp()
    dp.save(tmp_path / "x.safetensors", net, dp.prune(net, method="erk", sparsity=0.5))
    words = ("export", "x.safetensors", "--format", "safetensors")
    assert "name it with --model" in run(*words).stderr
    assert "--input" in run(*words, "--model", "mine_export.make").stderr
    done = run(*words, "--model", "mine_export.make", "--input", "6")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.dense.safetensors").exists()
    assert run("export", "x.safetensors", "--format", "coreml").exit_code == 2


def accuracy_of_raw_images(file, normalised=False):
    """How many of the test images a file gets right in ONNX Runtime, images as they are in the data set."""
    data = dp.datasets.load("digits")
    test = subset(data.test, 100)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    x = test.x.numpy()
    if normalised:
        x = ((x / 255 - np.array(data.mean).reshape(-1, 1, 1)) / np.array(data.deviation).reshape(-1, 1, 1)).astype(
            "f4"
        )
    else:
        assert entry.type == "tensor(uint8)"
    (logits,) = session.run(["logits"], {"image": x})
    return float((logits.argmax(1) == test.y.numpy()).mean())


def test_an_exported_run_takes_raw_images_and_is_as_accurate_as_the_run(runs, tmp_path):
    path = folder(runs, "drive")
    result = json.loads((path / "result.json").read_text())
    told = run("export", str(path), "-o", str(tmp_path / "raw.onnx"))
    assert told.exit_code == 0, told.output
    assert "it takes images, bytes from 0 to 255 of shape (N, 1, 8, 8)" in told.stdout
    for file in (path / "net.safetensors", tmp_path / "raw.onnx"):
        (line,) = [line for line in told.stdout.splitlines() if f"bytes of {file.name} " in line]
        assert f" {file.stat().st_size:,} " in line
    assert f"raw.onnx: {(tmp_path / 'raw.onnx').stat().st_size:,} bytes" in told.stdout
    assert accuracy_of_raw_images(tmp_path / "raw.onnx") == pytest.approx(result["last"], abs=1e-9)
    about = {entry.key: entry.value for entry in onnx.load(tmp_path / "raw.onnx").metadata_props}
    data = dp.datasets.load("digits")
    assert json.loads(about["classes"]) == list(data.classes)
    assert json.loads(about["mean"]) == list(data.mean)
    assert json.loads(about["deviation"]) == list(data.deviation)
    assert about["layout"] == "NCHW"
    assert about["preprocessing"] == "in the graph"
    told = run("export", str(path), "-o", str(tmp_path / "plain.onnx"), "--no-preprocess", "--json")
    assert "(pixel/255 - mean) / deviation" in json.loads(told.stdout)["input"]
    assert accuracy_of_raw_images(tmp_path / "plain.onnx", normalised=True) == pytest.approx(result["last"], abs=1e-9)


def test_what_the_files_of_earlier_versions_lack_is_told_or_read_from_the_data(runs, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(folder(runs, "snip"), old)
    net = dp.models.digits_net(width=0.25)
    mask = dp.load(old / "net.safetensors", net)
    about = {key: value for key, value in mask.provenance.items() if key != "images"}
    (old / "net.safetensors").unlink()
    dp.save(old / "net.safetensors", net, dict(mask), provenance=about)
    told = run("export", str(old), "-o", str(tmp_path / "old.onnx"), "--json")
    assert "bytes from 0 to 255" in json.loads(told.stdout)["input"]
    bare = tmp_path / "bare.safetensors"
    shutil.copy(old / "net.safetensors", bare)
    told = run("export", str(bare), "--json")
    assert "how it was normalised in training is not known here" in json.loads(told.stdout)["input"]
    told = run("export", str(bare), "--preprocess")
    assert "--preprocess cannot act beside" in told.stderr
    for format in ("csr", "safetensors", "torch-prune"):
        for word in ("--preprocess", "--no-preprocess"):
            told = run("export", str(bare), "--format", format, word)
            assert f"--preprocess cannot act beside --format {format}" in told.stderr


def test_bench_a_run_and_draw_it(runs, tmp_path):
    words = ("bench", str(folder(runs, "drive")), "--batches", "1,8", "--threads", "1", "--rounds", "1")
    done = run(*words, "-o", str(tmp_path / "bench.svg"))
    assert done.exit_code == 0, done.output
    assert "multiply-adds left, 1 thread" in done.stdout
    assert "training step" in done.stdout
    assert "picture: " in done.stdout
    assert (tmp_path / "bench.svg").stat().st_size > 0
    found = json.loads(run(*words, "--json").stdout)
    assert [(each["work"], each["batch"]) for each in found["timings"]][:2] == [("inference", 1), ("inference", 8)]
    assert found["timings"][0]["speedup"] > 0
    assert "must end with .svg" in run(*words, "-o", str(tmp_path / "bench.gif")).stderr
    assert "--batches" in run("bench", str(folder(runs, "drive")), "--batches", "x").stderr


def test_bench_measures_with_threads_that_sleep_while_they_wait(monkeypatch):
    class BeganAgainError(Exception):
        pass

    def execve(program, words, env):
        assert words[1:] == ["-m", "driveprune", "bench", "x"]
        assert env["OMP_WAIT_POLICY"] == "passive"
        raise BeganAgainError

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setattr("sys.argv", ["driveprune", "bench", "x"])
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with pytest.raises(BeganAgainError):
        main()
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with pytest.raises(SystemExit):
        main()  # there is no file x


def test_watch_shows_what_is_there(runs, tmp_path):
    done = run("watch", str(runs))
    assert done.exit_code == 0, done.output
    assert " done" in done.stdout
    assert run("watch", str(tmp_path)).exit_code == 2


def test_show_a_run_and_a_file(runs, tmp_path):
    done = run("show", str(folder(runs, "drive")))
    assert done.exit_code == 0
    assert "weights are kept" in done.stdout
    assert "effective" in done.stdout
    facts = json.loads(run("show", str(folder(runs, "drive")), "--json").stdout)
    assert facts["bytes"] < facts["dense_bytes"]
    net = mlp()
    mask = dp.prune(net, method="random", sparsity=0.5, seed=3)
    dp.save(tmp_path / "x", net, mask)
    result = run("show", str(tmp_path / "x"))
    assert result.exit_code == 0
    assert "765 of 1,530 weights are kept: sparsity 50.0000%" in result.stdout
    assert "method: random" in result.stdout


def test_compare_masks(runs):
    first, second = folder(runs, "drive"), folder(runs, "snip")
    done = run("compare", str(first), str(second))
    assert done.exit_code == 0, done.output
    assert "overlap" in done.stdout
    same = json.loads(run("compare", str(first), str(first), "--json").stdout)
    assert {layer["overlap"] for layer in same} == {1.0}
    found = json.loads(run("compare", str(first), str(second / "net.safetensors"), "--json").stdout)
    a, b = (dp.load(path / "net.safetensors", dp.models.digits_net(width=0.25)) for path in (first, second))
    name = found[0]["name"]
    assert found[0]["both"] == int((a[name] & b[name]).sum())
    assert found[0]["overlap"] == pytest.approx(int((a[name] & b[name]).sum()) / int((a[name] | b[name]).sum()))


def test_prune_and_preview_by_dotted_names(tmp_path, monkeypatch):
    (tmp_path / "mine_cli.py").write_text(
        "import torch\n"
        "from torch.nn import Linear, ReLU, Sequential\n"
        "def net():\n    return Sequential(Linear(4, 50), ReLU(), Linear(50, 3))\n"
        "def batches():\n    return [(torch.randn(20, 4), torch.randint(3, (20,)))]\n"
    )
    monkeypatch.chdir(tmp_path)
    done = run(
        "prune", "mine_cli.net", "mine_cli.batches", "--sparsity", "0.9", "--knob", "cuts=5", "-o", "n.safetensors"
    )
    assert done.exit_code == 0, done.output
    assert "35 of 350 weights are kept" in done.stdout
    assert (tmp_path / "n.safetensors").exists()
    done = run("preview", "mine_cli.net", "mine_cli.batches", "--sparsity", "0.5")
    assert done.exit_code == 0, done.output
    assert "effective sparsity" in done.stdout
    assert done.stdout.count("effective sparsity") == 1
    words = ("--methods", "synflow,snip", "--knob", "synflow.cuts=3", "--budget", "macs", "--exclude", "2.*")
    done = run("preview", "mine_cli.net", "mine_cli.batches", "--sparsity", "0.5", *words, "--frozen")
    assert done.exit_code == 0, done.output
    assert "sparsity 0.5 of the multiply-adds: of 200 weights" in done.stdout
    assert "grasp" not in done.stdout
    assert run("preview", "digits_net", "digits", "--sparsity", "0.5").exit_code == 0


def test_a_budget_of_multiply_adds(tmp_path):
    words = ("--method", "snip", "--sparsity", "0.9", "--budget", "macs", *QUICK, "--runs", str(tmp_path / "r"))
    result = json.loads(run("run", *words, "--json").stdout)
    assert 0.99 * 0.1 * result["dense_macs"] <= result["macs"] <= 0.1 * result["dense_macs"]
    assert "-macs-" in result["id"]
    assert run("run", *words[:-4], "--budget", "flops").exit_code == 2


def test_methods_lists_all_with_their_knobs():
    result = run("methods")
    assert result.exit_code == 0
    for name in dp.methods.names():
        assert name in result.stdout
    assert "early_epochs = 5.0" in result.stdout
    assert json.loads(run("methods", "--json").stdout)["drive"]["knobs"]["cuts"] == 100


def test_recipes_are_listed_and_shown():
    assert "paper-vgg16-cifar10" in run("recipes").stdout
    assert "0.002" not in run("recipes", "paper-resnet18-cifar10").stdout
    assert json.loads(run("recipes", "paper-vgg16-cifar10", "--json").stdout)["epochs"] == 150
    assert json.loads(run("recipes", "show", "paper-vgg16-cifar10", "--json").stdout)["epochs"] == 150
    assert run("recipes", "list").stdout == run("recipes").stdout
    assert run("recipes", "show", "a", "b").exit_code == 2
    assert "paper-vgg16-cifar10" in json.loads(run("recipes", "--json").stdout)


def test_data_list_and_check(tmp_path):
    assert "tiny-imagenet" in run("data", "list").stdout
    facts = json.loads(run("data", "check", "digits", "--json").stdout)
    assert (facts["training images"], facts["test images"], facts["official"]) == (1437, 360, True)
    missing = run("data", "check", "cifar10", "--data-dir", str(tmp_path))
    assert missing.exit_code == 2
    assert "driveprune data get cifar10" in missing.stderr


def test_errors_are_one_line_and_exit_code_2(tmp_path):
    torch.save(mlp().state_dict(), tmp_path / "x")
    for words in [
        ("show", str(tmp_path / "x")),
        ("show", str(tmp_path / "nothing")),
        ("show", str(tmp_path)),
        ("report", str(tmp_path)),
        ("run", "--method", "drove"),
        ("run", "--sparsity", "98"),
        ("run", "--data", "cifar11"),
        ("run", "--recipe", "papre"),
        ("run", "--knob", "cuts"),
        ("run", "--precision", "fp8"),
        ("run", "--device", "gpu"),
        ("run", "--knob", "cuts=abc"),
        ("run", "--knob", "early_epochs=-1"),
        ("run", "--spec", str(tmp_path / "x")),
        ("sweep", "--sparsities", "a,b"),
        ("sweep", "--methods", ","),
        ("run", "--set", "bogus"),
        ("run", "--threads", "0"),
        ("run", "--method", ""),
        ("run", "--model", "torch.nn.ReLU"),
        ("run", "--recipe", "os.getcwd"),
        ("sweep", "--knob", "cuts=3"),
        ("prune", "nothing.net", "digits"),
        ("preview", "digits_net", "digits", "--knob", "cuts=3"),
        ("preview", "digits_net", "digits", "--knob", "snip.cuts=3"),
        ("preview", "digits_net", "digits", "--methods", "imp"),
        ("compare", str(tmp_path / "x"), str(tmp_path / "x")),
    ]:
        result = run(*words)
        assert result.exit_code == 2, words
        assert result.stderr.startswith("error: ")
        assert len(result.stderr.strip().splitlines()) == 1
        assert "Traceback" not in result.output


def test_help_reads_well():
    result = run("--help")
    assert "small from the start" in result.stdout
    for name in (
        "run",
        "sweep",
        "prune",
        "preview",
        "data",
        "methods",
        "recipes",
        "show",
        "compare",
        "report",
        "watch",
        "export",
        "bench",
    ):
        assert name in result.stdout


def test_the_command_works_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "driveprune", "methods", "--json"],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip
    assert "drive" in json.loads(done.stdout)


def test_a_run_that_fell_is_called_unstable_wherever_it_is_shown(tmp_path):
    """Beside a dense run one with a random mask, which learns little in four epochs; two seeds are weak."""
    words = ("--epochs", "4", "--threads", "1", "--runs", str(tmp_path))
    assert run("run", "--method", "dense", *words).exit_code == 0
    fallen = ("run", "--method", "random", "--sparsity", "0.98", *words)
    result = json.loads(run(*fallen, "--json").stdout)
    assert result["last"] < 0.6
    assert result["stability"]["word"] == "unstable"
    path = result["folder"]
    for shown in (run(*fallen), run("show", path), run("compare", path, path), run("report", str(tmp_path))):
        assert shown.exit_code == 0
        assert "unstable" in shown.output
    assert json.loads(run("show", path, "--json").stdout)["stability"]["word"] == "unstable"
    found = json.loads(run("report", str(tmp_path), "--json").stdout)
    assert sorted(each["stability"]["word"] for each in found) == ["sound", "unstable"]
    assert "weak: " in run(*fallen, "--seed", "1").stdout
    assert "weak: " in run("show", path).stdout
