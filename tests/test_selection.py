import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import driveprune as dp
from driveprune import selection
from driveprune.mask import kept_count


def literal(scores, mask, sparsity, revive=False):
    """Sort all candidates by score, then by place, and keep the first ones."""
    places = [
        (-float(score) + 0.0, order, name, index)
        for order, name in enumerate(mask)
        for index, score in enumerate(scores[name].double().reshape(-1).tolist())
        if revive or mask[name].reshape(-1)[index]
    ]
    kept = {name: torch.zeros(m.numel(), dtype=torch.bool) for name, m in mask.items()}
    for _, _, name, index in sorted(places)[: kept_count(sum(m.numel() for m in mask.values()), sparsity)]:
        kept[name][index] = True
    return {name: kept[name].view(m.shape) for name, m in mask.items()}


def equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


SHAPES = [(4, 5), (2, 3, 4, 4), (7,), (1, 30), (6, 1, 2), (1, 1)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8]


def tensors(seed):
    """Scores with many ties, in many layouts, and a mask."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype = choose.choice(DTYPES)
    scores, mask = {}, {}
    for name in "abc"[: choose.randint(1, 3)]:
        values = torch.randn(choose.choice(SHAPES)) * choose.choice([1, 3, 1e-4])
        values = values.round() if choose.random() < 0.5 else values
        values = values.abs() if dtype == torch.uint8 else values
        values = values.to(dtype)
        if values.dim() == 4:
            values = values.to(memory_format=torch.channels_last)
        if values.dim() == 2 and choose.random() < 0.5:
            values = values.t()
        scores[name] = values
        mask[name] = torch.ones(values.shape, dtype=torch.bool)
    if choose.random() < 0.2:
        scores["wide"] = torch.randn(5, dtype=torch.float64)
        mask["wide"] = torch.ones(5, dtype=torch.bool)
    return scores, mask


@given(st.integers(0, 10**6), st.floats(0, 0.999), st.sampled_from([3, 7, 1 << 20]))
def test_equals_a_literal_sort(seed, sparsity, piece):
    scores, mask = tensors(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_PIECE", piece)
        first = dp.keep_top(scores, mask, sparsity)
        assert equal(first, literal(scores, mask, sparsity))
        again = sparsity + (1 - sparsity) / 2
        assert equal(dp.keep_top(scores, first, again), literal(scores, first, again))
        revived = dp.keep_top(scores, first, again, revive=True)
        assert equal(revived, literal(scores, first, again, revive=True))


@given(st.integers(0, 10**6), st.floats(0, 0.999))
def test_the_passes_for_other_devices_choose_the_same(seed, sparsity):
    scores, mask = tensors(seed)
    expected = dp.keep_top(scores, mask, sparsity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_compiles", lambda tensor: False)
        assert equal(dp.keep_top(scores, mask, sparsity), expected)


def test_by_hand():
    scores = {"a": torch.tensor([[0.1, 0.9], [0.5, 0.5]]), "b": torch.tensor([0.5, 0.7])}
    kept = dp.keep_top(scores, None, 0.5)
    assert kept["a"].tolist() == [[False, True], [True, False]]
    assert kept["b"].tolist() == [False, True]


def test_threads_choose_the_same():
    score = torch.randint(50, (3 << 20,)).float()
    one = dp.keep_top({"a": score}, None, 0.9)
    torch.set_num_threads(2)
    assert equal(dp.keep_top({"a": score}, None, 0.9), one)


def test_negative_zero_is_zero():
    kept = dp.keep_top({"a": torch.tensor([-0.0, 0.0, -0.0, 0.0])}, None, 0.5)
    assert kept["a"].tolist() == [True, True, False, False]


def test_negative_scores_order_below_zero():
    kept = dp.keep_top({"a": torch.tensor([-1.0, -3.0, 0.0, -2.0])}, None, 0.5)
    assert kept["a"].tolist() == [True, False, True, False]


def test_ties_do_not_depend_on_the_memory_format():
    score = torch.randint(3, (8, 6, 4, 4)).float()
    plain = dp.keep_top({"a": score}, None, 0.7)
    last = dp.keep_top({"a": score.to(memory_format=torch.channels_last)}, None, 0.7)
    assert equal(plain, last)


def test_by_layer_every_layer_has_the_sparsity():
    scores = {"a": torch.rand(40), "b": torch.rand(3, 10) + 5}
    kept = dp.keep_top(scores, None, 0.9, scope="layer")
    assert {name: int(k.sum()) for name, k in kept.items()} == {"a": 4, "b": 3}


def test_by_allocation():
    scores = {"a": torch.rand(40), "b": torch.rand(30)}
    kept = dp.keep_top(scores, None, 0.9, scope={"b": 30, "a": 0})
    assert {name: int(k.sum()) for name, k in kept.items()} == {"a": 0, "b": 30}


@given(st.integers(0, 10**6), st.floats(0, 0.95), st.integers(0, 3))
def test_min_kept_is_the_best_choice_under_the_floor(seed, sparsity, floor):
    scores, mask = tensors(seed)
    count = kept_count(sum(m.numel() for m in mask.values()), sparsity)
    needed = sum(min(floor, m.numel()) for m in mask.values())
    if needed > count:
        with pytest.raises(ValueError, match=f"min_kept={floor} asks for {needed}"):
            dp.keep_top(scores, mask, sparsity, min_kept=floor)
        return
    kept = dp.keep_top(scores, mask, sparsity, min_kept=floor)
    # The best `floor` of each layer first, then the best of the rest.
    reserved = dp.keep_top(scores, mask, 0, scope={n: min(floor, m.numel()) for n, m in mask.items()})
    rest = literal(scores, {n: m & ~reserved[n] for n, m in mask.items()}, 0)
    order = sorted(
        (
            (-float(v), o, n, i)
            for o, n in enumerate(mask)
            for i, v in enumerate(scores[n].double().reshape(-1).tolist())
            if rest[n].reshape(-1)[i]
        ),
    )[: count - needed]
    expected = {n: r.clone().reshape(-1) for n, r in reserved.items()}
    for _, _, n, i in order:
        expected[n][i] = True
    assert equal(kept, {n: e.view(mask[n].shape) for n, e in expected.items()})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_scores_that_are_not_finite_name_the_layer(bad, dtype):
    scores = {"good": torch.rand(3).to(dtype), "layer7.weight": torch.tensor([1.0, bad]).to(dtype)}
    with pytest.raises(ValueError, match="scores of layer7.weight hold NaN or infinity"):
        dp.keep_top(scores, None, 0.5)


def test_removed_places_may_hold_anything():
    kept = dp.keep_top({"a": torch.tensor([float("nan"), 1.0])}, {"a": torch.tensor([False, True])}, 0.5)
    assert kept["a"].tolist() == [False, True]


def test_the_largest_finite_scores_are_finite():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        top = torch.finfo(dtype).max
        assert dp.keep_top({"a": torch.tensor([-top, top], dtype=dtype)}, None, 0.5)["a"].tolist() == [False, True]


def test_bad_arguments():
    scores = {"a": torch.rand(4)}
    with pytest.raises(ValueError, match="did you mean 0.9"):
        dp.keep_top(scores, None, 90)
    with pytest.raises(ValueError, match="only one of them has b"):
        dp.keep_top(scores, {"a": torch.ones(4, dtype=torch.bool), "b": torch.ones(4, dtype=torch.bool)}, 0.5)
    with pytest.raises(ValueError, match="must be boolean of shape"):
        dp.keep_top(scores, {"a": torch.ones(4)}, 0.5)
    with pytest.raises(ValueError, match="scope must be"):
        dp.keep_top(scores, None, 0.5, scope="net")
    with pytest.raises(ValueError, match="keeps 5 weights of a, which has 4"):
        dp.keep_top(scores, None, 0.5, scope={"a": 5})
    with pytest.raises(ValueError, match="only 1 are candidates"):
        dp.keep_top(scores, {"a": torch.tensor([True, False, False, False])}, 0.5)
    with pytest.raises(ValueError, match="no scores"):
        dp.keep_top({}, None, 0.5)


def test_more_weights_than_a_float_can_count():
    """Past 2^24 a float32 counter stops; the count stays exact."""
    size = 2**24 + 3
    scores = {"a": torch.arange(size, dtype=torch.float64), "b": torch.zeros(5)}
    kept = dp.keep_top(scores, None, 0.25)
    assert sum(int(k.sum()) for k in kept.values()) == kept_count(size + 5, 0.25)
    assert kept["a"][-1]
    assert not kept["a"][0]


@pytest.mark.slow
def test_more_weights_than_an_int32_can_count():
    size = 2**31 + 8
    scores = {"a": torch.tensor([1.0, 0.0]).repeat(4).expand(size // 8, 8)}
    kept = dp.keep_top(scores, None, 0.75)["a"]
    assert int(kept.sum()) == kept_count(size, 0.75)
    assert not kept[:, 1].any()


def test_more_bad_arguments():
    with pytest.raises(ValueError, match="min_kept must be a whole number of at least 0, got -1"):
        dp.keep_top({"a": torch.rand(4)}, None, 0.5, min_kept=-1)
    with pytest.raises(ValueError, match="keeps 2.5 weights of a"):
        dp.keep_top({"a": torch.rand(4)}, None, 0.5, scope={"a": 2.5})
    with pytest.raises(ValueError, match="min_kept asks for 8 weights, but only 2 are kept"):
        dp.keep_top({"a": torch.rand(4), "b": torch.rand(4)}, None, 0.5, scope={"a": 1, "b": 1}, min_kept=4)


def test_a_floor_under_an_allocation_takes_from_the_largest():
    scores = {"a": torch.rand(40), "b": torch.rand(30), "c": torch.rand(2)}
    kept = dp.keep_top(scores, None, 0.5, scope={"a": 20, "b": 5, "c": 0}, min_kept=6)
    assert {name: int(k.sum()) for name, k in kept.items()} == {"a": 17, "b": 6, "c": 2}


def test_empty_tensors_are_nothing():
    kept = dp.keep_top({"none": torch.zeros(0, 3), "a": torch.rand(4)}, None, 0.5, scope="layer")
    assert kept["none"].shape == (0, 3)
    assert int(kept["a"].sum()) == 2


def literal_within(scores, candidates, costs, sparsity):
    """By definition: in the order of score per cost, ties by place, as long as it fits; at least the first."""
    order = sorted(
        ((-float(score) / costs[name], place, number, name)
         for place, name in enumerate(scores)
         for number, score in enumerate(scores[name].double().flatten())
         if candidates[name].flatten()[number])
    )  # fmt: skip
    left = (1 - sparsity) * sum(costs[name] * score.numel() for name, score in scores.items()) * (1 + 1e-12)
    kept = {name: torch.zeros(score.numel(), dtype=torch.bool) for name, score in scores.items()}
    for rank, (_, _, number, name) in enumerate(order):
        if costs[name] > left:
            if rank == 0:
                kept[name][number] = True
            break
        kept[name][number] = True
        left -= costs[name]
    return {name: kept[name].view(score.shape) for name, score in scores.items()}


@given(st.data())
def test_within_a_budget_of_costs(data):
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    values = st.integers(-3, 12).map(lambda number: number / 4)
    scores = {f"w{i}": torch.tensor(data.draw(st.lists(values, min_size=n, max_size=n))) for i, n in enumerate(sizes)}
    costs = {name: data.draw(st.sampled_from([1.0, 4.0, 16.0, 64.0])) for name in scores}
    flags = {
        name: torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(score), max_size=len(score))))
        for name, score in scores.items()
    }
    flags["w0"][0] = True
    sparsity = data.draw(st.floats(0, 0.99))
    found = dp.keep_top(scores, flags, sparsity, costs=costs)
    wanted = literal_within(scores, flags, costs, sparsity)
    assert all(torch.equal(found[name], wanted[name]) for name in scores)


def test_costs_that_make_no_sense():
    scores = {"a": torch.ones(3)}
    with pytest.raises(ValueError, match="no cost for the weights of a"):
        dp.keep_top(scores, None, 0.5, costs={})
    with pytest.raises(ValueError, match="must cost more than 0, got 0"):
        dp.keep_top(scores, None, 0.5, costs={"a": 0})
    with pytest.raises(ValueError, match="global scope without min_kept"):
        dp.keep_top(scores, None, 0.5, costs={"a": 1}, min_kept=1)
    with pytest.raises(ValueError, match="NaN"):
        dp.keep_top({"a": torch.tensor([float("nan")])}, None, 0.5, costs={"a": 1})
