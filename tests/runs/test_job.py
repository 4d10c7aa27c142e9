"""One run: what it says of itself while it works."""

import pytest

from driveprune import datasets
from driveprune.runs import job
from driveprune.runs.store import read_run
from tests.runs.kills import small_spec


def test_a_run_shorter_than_a_second_says_where_it_went_on(tmp_path, monkeypatch):
    def end(moment):
        if moment.step == 4:
            raise KeyboardInterrupt

    data, spec = datasets.load("digits"), small_spec("snip")
    with pytest.raises(KeyboardInterrupt):
        job.carry_out(tmp_path, spec, data, every=0, watch=end)
    monkeypatch.setattr(job.time, "time", lambda: 1e9)
    job.carry_out(tmp_path, spec, data, every=0)
    assert read_run(tmp_path / spec.id).status["began_step"] == 4
