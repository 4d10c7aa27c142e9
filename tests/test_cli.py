import torch
from typer.testing import CliRunner

import driveprune as dp
from driveprune.cli import app
from tests.nets import mlp


def run(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "120"})


def test_methods_lists_all_with_their_knobs():
    result = run("methods")
    assert result.exit_code == 0
    for name in dp.methods.names():
        assert name in result.stdout
    assert "early_epochs = 5.0" in result.stdout


def test_show(tmp_path):
    net = mlp()
    mask = dp.prune(net, method="random", sparsity=0.5, seed=3)
    dp.save(tmp_path / "x", net, mask)
    result = run("show", str(tmp_path / "x"))
    assert result.exit_code == 0
    assert "765 of 1,530 weights are kept: sparsity 50.0000%" in result.stdout
    assert "method: random" in result.stdout


def test_errors_are_one_line_and_exit_code_2(tmp_path):
    torch.save(mlp().state_dict(), tmp_path / "x")
    for path in ("x", "nothing"):
        result = run("show", str(tmp_path / path))
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.output


def test_help_reads_well():
    result = run("--help")
    assert "small from the start" in result.stdout
    assert "methods" in result.stdout
