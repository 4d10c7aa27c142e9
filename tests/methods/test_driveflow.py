import copy
import warnings

import pytest
import torch

import driveprune as dp
from driveprune.methods import drive, driveflow, synflow
from tests.methods import literal
from tests.methods.test_synflow import literal_score, masked
from tests.nets import batch, convnet, images, mlp

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
NETS = [(mlp, batch), (convnet, images)]


def literal_mean(model, theta, mask, data):
    """√(S·|θ·g|): SynFlow by absolute values written into a copy, |θ·g| as the root of |θ · ∂L/∂m · ∂L/∂θ|."""
    flow = literal_score(masked(model, theta, mask), mask, data[0])
    by_mask, by_theta = literal.two_gradients(model, theta, mask, data)
    product = {name: (theta[name] * by_mask[name] * by_theta[name]).abs().sqrt() for name in mask}
    return {name: (flow[name].detach() * product[name]).sqrt() for name in mask}


@pytest.mark.parametrize(("build", "draw"), NETS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.98])
def test_masks_are_bit_equal_to_a_literal_loop_in_float64(build, draw, seed, sparsity):
    data = [draw(size=16, seed=number, dtype=torch.float64) for number in range(10)]
    net = build(seed, torch.float64)
    expected = literal.iterate(copy.deepcopy(net), data, sparsity, 10, literal_mean)[-1]
    kept = dp.prune(net, data, method="driveflow", sparsity=sparsity, knobs={"cuts": 10})
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


def score(net, data, loss=dp.gradients.cross_entropy, of=driveflow.score, **knobs):
    mask = {name: torch.ones(w.shape, dtype=torch.bool) for name, w in dp.prunable(net).items()}
    return of(net, mask, iter(data), loss=loss, generator=torch.Generator(), **knobs)


@pytest.mark.parametrize(("build", "draw"), NETS)
def test_the_square_is_the_product_of_both_scores(build, draw):
    data = [draw(seed=number, dtype=torch.float64) for number in range(3)]
    found = score(build(dtype=torch.float64), data)
    flows = score(build(dtype=torch.float64), data, of=synflow.score)
    drives = score(build(dtype=torch.float64), data, of=drive.score)
    for name, value in found.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value.square(), flows[name] * drives[name], rtol=1e-12, atol=0)


def test_products_that_underflow_rank_right_and_zeros_stay_lowest(monkeypatch):
    tiny = torch.tensor([0.0, 5e-324, 1e-300, 1e-200])
    flows = torch.tensor([1e300, 5e-324, 1e-300, 1e-200], dtype=torch.float64)
    monkeypatch.setattr(synflow, "score", lambda *_, **__: {"0.weight": flows})
    ranks = torch.tensor([0.0, 1e-44, 1e-40, 1e-38])
    found = score(mlp(), [batch()], rank=lambda *_, **__: {"0.weight": ranks})["0.weight"]
    assert found[0] == 0
    assert (found[1:] > found[:-1]).all()
    assert (flows.float() * ranks)[1:].eq(0).all()
    found = score(mlp(), [batch()], rank=lambda *_, **__: {"0.weight": torch.where(flows > 1, tiny[0], flows)})
    assert (found["0.weight"][1:] > found["0.weight"][:-1]).all()


def test_it_sees_the_batches_that_drive_sees():
    def seen(method):
        drawn = []

        def loss(model, one):
            drawn.append(one[0][0, 0].item())
            return dp.gradients.cross_entropy(model, one)

        knobs = {"cuts": 3, "batches_per_cut": 2}
        dp.prune(mlp(), [batch(seed=n) for n in range(9)], method=method, sparsity=0.9, knobs=knobs, loss=loss)
        return list(dict.fromkeys(drawn))  # SynFlow looks at the first one for its shape

    assert seen("driveflow") == seen("drive")


def test_its_plan_is_that_of_drive_with_the_same_knobs():
    assert dp.methods.knobs("driveflow") == dp.methods.knobs("drive")
    plans = [dp.methods.make_plan(name, 0.98, 99, 10, {"window": 2.0, "cuts": 5}) for name in ("drive", "driveflow")]
    for own, other in zip(*plans, strict=True):
        assert type(own) is type(other)
        assert getattr(own, "until", None) == getattr(other, "until", None)
        assert getattr(own, "path", None) == getattr(other, "path", None)


def test_a_cut_after_training_and_in_float32_is_near_the_exact_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error", dp.ScoreWarning)
        net = convnet()
        net.train()(images(seed=9)[0])
        exact = copy.deepcopy(net).double()
        kept = dp.prune(net, [images()], method="driveflow", sparsity=0.9, knobs={"cuts": 10})
        wide = dp.prune(exact, [images(dtype=torch.float64)], method="driveflow", sparsity=0.9, knobs={"cuts": 10})
    assert literal.overlap(kept, wide) >= 0.99
