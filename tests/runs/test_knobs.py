"""Methods × knobs in the command `run`: another value of a knob changes what comes out, or is refused."""

import json

import pytest
from typer.testing import CliRunner

import driveprune as dp
from driveprune import datasets, models
from driveprune.cli import app
from tests.methods.test_knobs import CASES, QUICK, beside, check_acts

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
SMALL = ("--epochs", 6, "--width", 0.25, "--images", 100, "--test-images", 20, "--sparsity", 0.9, "--every", 99)


def by_run(method, knobs):
    """The weights and the sparsities after each epoch, from the run's folder in the current one."""
    knobs = {**QUICK.get(method, {}), **knobs}
    words = [word for name, value in knobs.items() for word in ("--knob", f"{name}={json.dumps(value)}")]
    told = CliRunner().invoke(app, [*map(str, ("run", "--method", method, *SMALL)), *words, "--json"])
    if told.exit_code:
        raise ValueError(told.stderr)
    result = json.loads(told.stdout)
    model = models.build("digits_net", classes=10, width=0.25, inputs=1, size=8)
    dp.load(f"{result['folder']}/net.safetensors", model)
    rows = [(row["cycle"], row["epoch"], row["sparsity"]) for row in result["rows"]]
    return {name: weight.tolist() for name, weight in model.named_parameters()}, rows


@pytest.mark.parametrize(("method", "knob"), CASES)
def test_another_value_changes_what_comes_out_or_is_refused(method, knob, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert datasets.embedded("digits")
    check_acts(by_run, method, knob, beside(method, knob))
