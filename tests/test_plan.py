import pytest

import driveprune as dp
from driveprune.plan import early, total_steps


def test_steps_are_counted_over_cycles():
    plan = [dp.Train(10), dp.Rewind(4), dp.Train(10), dp.Rewind(0), dp.Train(30)]
    assert total_steps(plan) == 10 + 6 + 30


def test_impossible_plans():
    with pytest.raises(ValueError, match="epochs before the cut are more"):
        total_steps([dp.Train(10), dp.Train(5)])
    with pytest.raises(ValueError, match="rewinds to step 7, but has only reached step 5"):
        total_steps([dp.Train(5), dp.Rewind(7)])


def test_early_training():
    assert early(0, 10) == []
    assert early(1.5, 10) == [dp.Train(15)]


def test_phases_are_data():
    assert dp.Train(3) == dp.Train(3)
    with pytest.raises(AttributeError):
        dp.Train(3).until = 4
