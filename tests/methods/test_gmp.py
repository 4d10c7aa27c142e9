import pytest

import driveprune as dp
from driveprune.plan import Prune, Train
from tests.nets import mlp


def test_cuts_are_spread_between_begin_and_end_along_a_cubic_path():
    plan = dp.methods.make_plan("gmp", 0.8, 1000, 10, {"cuts": 3, "begin": 0.2, "end": 0.6})
    assert [phase.until for phase in plan if isinstance(phase, Train)] == [333, 467, 600, 1000]
    assert [phase.path[0] for phase in plan if isinstance(phase, Prune)] == pytest.approx(
        [0.8 * (1 - (2 / 3) ** 3), 0.8 * (1 - (1 / 3) ** 3), 0.8]
    )


def test_bad_knobs():
    with pytest.raises(ValueError, match=r"begin=0.9, end=0.5"):
        dp.Pruner(
            mlp(), None, method="gmp", sparsity=0.8, epochs=10, steps_per_epoch=1, knobs={"begin": 0.9, "end": 0.5}
        )
