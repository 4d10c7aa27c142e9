"""The README's code runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import driveprune as dp
from tests.nets import batch, mlp

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 7
    for number, block in enumerate(BLOCKS):
        model = mlp()
        names = {
            "model": model,
            "loader": [batch(seed=0), batch(seed=1)],
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            "loss": nn.CrossEntropyLoss(),
            "torch": torch,
            "x": batch()[0],
            "y": batch()[1],
        }
        if "dp.compact" in block or "dp.sparsify" in block:
            names["mask"] = dp.prune(model, method="erk", sparsity=0.5)
        exec(("" if number == 0 else "import driveprune as dp\n") + block, names)
    assert (tmp_path / "net.safetensors").exists()


def test_the_two_commands_are_there():
    assert "make demo" in README
    assert "make test" in README
