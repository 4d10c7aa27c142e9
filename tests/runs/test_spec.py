import dataclasses
import hashlib
import json

import pytest

from driveprune import datasets, recipes
from driveprune.batches import Data
from driveprune.plan import Prune, Reinit, Rewind, Shuffle, Train
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec, checked, make_spec

DIGITS = datasets.load("digits")
DEMO = recipes.get("demo-digits")


def spec(**options) -> Spec:
    return make_spec(DEMO, DIGITS, **{"method": "drive", "sparsity": 0.98, **options})


def test_ids_are_frozen():
    """If one of these changes, results of old stores are no longer found: then SCHEMA must go up."""
    assert DIGITS.fingerprint[:12] == FINGERPRINT
    assert spec().id == IDS["drive"]
    assert spec(method="imp", sparsity=0.9, seed=2, threads=2).id == IDS["imp"]
    assert make_spec(DEMO, DIGITS, method="dense", sparsity=0.5).id == IDS["dense"]
    assert spec(check="shuffle", holdout=100, knobs={"cuts": 3}).id == IDS["shuffle"]
    assert spec().beginning == IDS["beginning"]


@pytest.mark.parametrize("method", ["drive", "snip", "grasp", "force"])
def test_a_knob_that_came_later_is_in_the_id_only_where_it_is_not_the_default(method):
    """Runs from before `mode` was a knob have the ids that they had."""
    plain = spec(method=method)
    assert "mode" not in plain.knobs
    assert "mode" not in plain.to_json()["knobs"]
    assert spec(method=method, knobs={"mode": "training"}).id == plain.id == LATER[method]
    other = spec(method=method, knobs={"mode": "evaluation"})
    assert other.id != plain.id
    assert other.knobs["mode"] == "evaluation"
    assert Spec.from_json(json.loads(json.dumps(other.to_json()))).id == other.id
    assert plain.plan(10) is not None


@pytest.mark.parametrize("method", ["drive", "synflow", "magnitude"])
def test_runs_from_before_there_were_windows_keep_their_ids(method):
    plain = spec(method=method)
    assert not {"window", "path"} & plain.knobs.keys()
    assert "cuts" not in plain.knobs or method != "magnitude"
    same = spec(method=method, knobs={"window": 0, "path": "exponential", "cuts": 100})
    assert same.id == plain.id == BEFORE_WINDOWS[method]
    other = spec(method=method, knobs={"window": 2, "cuts": 10, "path": "cubic"})
    assert other.id != plain.id
    assert (other.knobs["window"], other.knobs["cuts"], other.knobs["path"]) == (2.0, 10, "cubic")
    assert Spec.from_json(json.loads(json.dumps(other.to_json()))).id == other.id
    with pytest.raises(ValueError, match=r"window=99.0 \(9900 steps\)"):
        spec(method=method, knobs={"window": 99.0})


def test_a_budget_that_a_method_cannot_keep_is_refused_before_a_run_begins():
    with pytest.raises(ValueError, match="a budget of multiply-adds needs a method whose weights compete globally"):
        spec(method="erk", budget="macs")
    assert spec(method="synflow", budget="macs").budget == "macs"
    assert make_spec(DEMO, DIGITS, method="dense", sparsity=0.5, budget="macs").budget == "weights"


LATER = {
    "drive": "digits-digits_net-drive-98-seed0-58ce42570d42",
    "snip": "digits-digits_net-snip-98-seed0-ee4302490faa",
    "grasp": "digits-digits_net-grasp-98-seed0-266782b79192",
    "force": "digits-digits_net-force-98-seed0-fb699ca49319",
}
BEFORE_WINDOWS = {
    "drive": LATER["drive"],
    "synflow": "digits-digits_net-synflow-98-seed0-efde1b7dad16",
    "magnitude": "digits-digits_net-magnitude-98-seed0-b731ea30590a",
}
FINGERPRINT = "1a8cd0073907"
IDS = {
    "drive": "digits-digits_net-drive-98-seed0-58ce42570d42",
    "imp": "digits-digits_net-imp-90-seed2-0a324a13cd07",
    "dense": "digits-digits_net-dense-0-seed0-43c21a84a18f",
    "shuffle": "digits-digits_net-drive-98-shuffle-seed0-e206df39e4f7",
    "beginning": "9c4344822f1ac51d53b9",
}


def test_everything_that_decides_the_result_is_in_the_id():
    first = spec()
    others = [
        spec(seed=1), spec(sparsity=0.9), spec(method="snip"), spec(knobs={"cuts": 99}), spec(check="reinit"),
        spec(holdout=10), spec(threads=2), spec(precision="bf16"), spec(channels_last=True), spec(device="meta"),
        dataclasses.replace(first, fingerprint="other"), dataclasses.replace(first, schema=2),
        make_spec(recipes.scaled(DEMO, epochs=13), DIGITS, method="drive", sparsity=0.98),
        make_spec(dataclasses.replace(DEMO, rate=0.06), DIGITS, method="drive", sparsity=0.98),
    ]  # fmt: skip
    assert len({first.id, *(other.id for other in others)}) == 1 + len(others)


def test_what_the_recipe_says_of_other_methods_is_not_in_the_id():
    other = dataclasses.replace(DEMO, sparsities=(0.5,), knobs={**DEMO.knobs, "imp": {"cycles": 3}})
    assert make_spec(other, DIGITS, method="drive", sparsity=0.98).id == spec().id


def test_knobs_are_resolved_so_that_defaults_said_or_not_are_the_same_run():
    assert spec(knobs={"cuts": 100, "fresh": True}).id == spec().id
    assert spec(knobs={"early_epochs": 1}).id == spec().id  # the same number
    assert spec().knobs["early_epochs"] == 1.0  # the recipe's
    assert spec().knobs["combine"] == "mean"  # the method's


def test_runs_that_begin_alike_share_a_beginning():
    alike = [spec(), spec(sparsity=0.9), spec(method="imp"), spec(knobs={"cuts": 3}), spec(check="shuffle")]
    assert len({one.beginning for one in alike}) == 1
    other = [spec(seed=1), spec(holdout=5), spec(threads=2), spec(precision="bf16")]
    assert len({one.beginning for one in (alike[0], *other)}) == 5


def test_json_and_back():
    one = spec(check="random", knobs={"terms": ["magnitude", "connection"]})
    again = Spec.from_json(json.loads(json.dumps(one.to_json())))
    assert again.id == one.id
    assert again.to_json() == one.to_json()
    with pytest.raises(ValueError, match="no spec of this version"):
        Spec.from_json({**one.to_json(), "more": 1})


def test_what_cannot_run_is_an_error_before_anything_runs():
    for options, message in [
        ({"method": "drove"}, "unknown method 'drove'"),
        ({"sparsity": 98}, "did you mean 0.98"),
        ({"knobs": {"cut": 3}}, "no knob 'cut'"),
        ({"check": "shuffled"}, "check must be one of shuffle, reinit, random"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"knobs": {"early_epochs": 50}}, "more than the whole training has"),
        ({"method": "dense", "check": "reinit"}, "dense runs have no knobs and no checks"),
        ({"knobs": {"cuts": "abc"}}, "cuts must be a whole number, got 'abc'"),
        ({"knobs": {"cuts": 2.5}}, "cuts must be a whole number, got 2.5"),
        ({"knobs": {"early_epochs": float("inf")}}, "early_epochs must be a number, got inf"),
        ({"knobs": {"fresh": "abc"}}, "fresh must be true or false, got 'abc'"),
        ({"knobs": {"combine": "foo"}}, 'combine must be "mean" or "squares"'),
        ({"knobs": {"batches_per_cut": 0}}, "batches_per_cut must be a whole number of at least 1"),
        ({"method": "imp", "knobs": {"rewind_epochs": -1}}, "rewind_epochs must be a number of at least 0, got -1"),
        ({"precision": "half"}, "precision must be fp32, bf16, fp16, got 'half'"),
    ]:
        with pytest.raises(ValueError, match=message):
            spec(**options)


def test_names_cannot_leave_the_store():
    data = Data("../../x y", DIGITS.train, DIGITS.test, DIGITS.classes, DIGITS.mean, DIGITS.deviation, False)
    odd = make_spec(dataclasses.replace(DEMO, data="../../etc/x y"), data, method="snip", sparsity=0.5)
    assert "/" not in odd.id
    assert not odd.id.startswith(".")


def test_checks_come_after_the_last_cut_and_its_rewind():
    cut = Prune(None, (0.9,))
    assert checked([cut, Train(9)], "shuffle", 1) == [cut, Shuffle(1), Train(9)]
    assert checked([Train(5), cut, Train(9)], "random", 1) == [Train(5), cut, Shuffle(1), Reinit(1), Train(9)]
    plan = [Train(5), cut, Rewind(0), Train(5), cut, Rewind(0), Train(9)]
    assert checked(plan, "reinit", 1) == [*plan[:6], Reinit(1), Train(9)]
    assert checked(plan, "", 1) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "/../../../x"}, "must be whole numbers, got '/../../../x'"),
        ({"schema": 99}, "its schema is 99, not 1"),
        ({"check": "zzz"}, "check must be one of"),
        ({"knobs": 3}, "knobs must be names and values, got 3"),
        ({"precision": "half"}, "precision must be"),
        ({"sparsity": 2}, "sparsity must be in"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_a_spec_that_no_run_can_have_is_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Spec.from_json({**spec().to_json(), **change})


def test_the_users_own_code_is_part_of_what_a_run_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "own_code_of_test.py"
    score = (
        "def score(model, mask, batches, *, loss, generator):\n    return {n: m.float() for n, m in mask.items()}\n"
        "def net():\n    raise AssertionError\n"
    )
    own.write_text(score)
    mine = dataclasses.replace(DEMO, model="own_code_of_test.net")
    before = make_spec(mine, DIGITS, method="own_code_of_test", sparsity=0.5)
    assert before.model_code == before.method_code == hashlib.sha256(score.encode()).hexdigest()
    own.write_text(score + "# changed\n")
    after = make_spec(mine, DIGITS, method="own_code_of_test", sparsity=0.5)
    assert after.id != before.id
    assert after.beginning != before.beginning
    with pytest.raises(ValueError, match="the code of own_code_of_test.net is not that of the run"):
        carry_out(tmp_path / "runs", before, DIGITS)
    assert spec().model_code == spec().method_code == ""
