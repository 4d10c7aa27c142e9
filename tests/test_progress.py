import io

from rich.console import Console

from driveprune.progress import shown
from driveprune.train import Moment

ROW = {"cycle": 0, "epoch": 1, "loss": 0.5, "rate": 0.1, "sparsity": 0.0, "test": 0.9}


def watched(console: Console, **options) -> str:
    rows = []
    with shown("mine", console=console, **options) as watch:
        watch(Moment(0, 10, "early training", rows))
        watch(Moment(5, 10, "pruning", rows))
        rows.append(ROW)
        watch(Moment(6, 10, "evaluation", rows))
        rows.append({**ROW, "cycle": 2, "epoch": 2, "test": 0.95, "holdout": 0.8})
        watch(Moment(10, 10, "evaluation", rows))
    return console.file.getvalue()


def test_plain_lines_in_a_log():
    assert watched(Console(file=io.StringIO(), width=40)).splitlines() == [
        "mine: pruning (step 5 of 10)",
        "mine: epoch 1, loss 0.5000, sparsity 0.0%, test 90.00%",
        "mine: cycle 2, epoch 2, loss 0.5000, sparsity 0.0%, holdout 80.00%, test 95.00%",
    ]


def test_a_bar_on_a_terminal():
    text = watched(Console(file=io.StringIO(), width=200, force_terminal=True))
    assert "10/10 steps" in text
    assert "test 95.00%" in text


def test_nothing_if_nothing_is_wanted():
    assert watched(Console(file=io.StringIO()), enabled=False) == ""
