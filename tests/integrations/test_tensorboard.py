import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import driveprune as dp
from driveprune.integrations.tensorboard import Board
from tests.nets import batch, mlp

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


def curves(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_mask(tmp_path):
    with Board(tmp_path) as board:
        board.mask({"a": torch.ones(2, dtype=torch.bool), "b": torch.zeros(2, dtype=torch.bool)}, step=3)
    assert curves(tmp_path) == {"sparsity": [(3, 0.5)], "density/a": [(3, 1.0)], "density/b": [(3, 0.0)]}


def test_watching_a_fit(tmp_path):
    data = (batch(64), batch(64))
    with Board(tmp_path) as board:
        trained = dp.fit(
            mlp(), data, method="drive", sparsity=0.9, epochs=4, knobs={"early_epochs": 2}, watch=board, seed=1
        )
    found = curves(tmp_path)
    assert set(found) == {"rate", "loss", "sparsity", "test"}
    assert found["test"] == [(number, pytest.approx(row["test"])) for number, row in enumerate(trained.rows, 1)]
    assert found["sparsity"][0] == (1, 0.0)
    assert found["sparsity"][-1][1] == pytest.approx(0.9, abs=1e-3)
