import pytest
import torch
from torch import nn

import driveprune as dp
from driveprune.mask import kept_count
from driveprune.preview import one_go
from tests.nets import batch, convnet, images, mlp, same, snapshot


def test_every_method_that_cuts_in_one_go_and_the_model_untouched(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    net = convnet()
    before, state = snapshot(net), torch.get_rng_state()
    found = dp.preview(net, [images()], sparsity=0.9)
    assert [row.method for row in found.rows] == [
        "drive", "driveflow", "erk", "force", "grasp", "magnitude", "random", "snip", "synflow"
    ]  # fmt: skip
    assert same(before, snapshot(net))
    assert torch.equal(state, torch.get_rng_state())
    for row in found.rows:
        kept = sum(int(k.sum()) for k in row.mask.values())
        assert kept == kept_count(1624, 0.9)
        assert row.densities["4.weight"] == int(row.mask["4.weight"].sum()) / 1152
        assert row.effective_sparsity + 1e-3 >= 0.9
        assert row.macs == sum(
            int(row.mask[name].sum()) * positions
            for name, positions in (("0.weight", 64), ("4.weight", 16), ("10.weight", 1))
        )
    assert found.macs == 216 * 64 + 1152 * 16 + 256
    printed = capsys.readouterr().out
    for word in (
        "drive*",
        "synflow",
        "1,152",
        "effective",
        "multiply-adds",
        "1,624 weights and 32,512 multiply-adds",
    ):
        assert word in printed


def test_rows_are_what_prune_gives():
    found = dp.preview(convnet(), [images()], sparsity=0.9, methods=["snip"], show=False)
    kept = dp.prune(convnet(), [images()], method="snip", sparsity=0.9)
    assert same(dict(found.rows[0].mask), dict(kept))


def test_collapse_is_shown():
    found = dp.preview(convnet(), [images()], sparsity=0.999, methods=["random", "synflow"], show=False)
    cut, whole = found.rows
    assert not cut.connected
    assert cut.empty_layers
    assert "cut" in str(found)
    assert "empty" in str(found)
    assert not whole.empty_layers or not whole.connected
    assert repr(found) == "<preview of random, synflow at sparsity 0.999>"


def test_methods_of_ones_own():
    def score(model, mask, batches, *, loss, generator):
        return {name: torch.rand(kept.shape, generator=generator) for name, kept in mask.items()}

    found = dp.preview(convnet(), [images()], sparsity=0.5, methods=[score], show=False)
    assert found.rows[0].method.endswith("score")


def test_bad_input():
    net = convnet()
    before = snapshot(net)
    with pytest.raises(ValueError, match="did you mean 0.98"):
        dp.preview(net, [images()], sparsity=98)
    with pytest.raises(ValueError, match="batches is empty"):
        dp.preview(net, [], sparsity=0.9)
    with pytest.raises(ValueError, match="imp trains between its cuts"):
        dp.preview(net, [images()], sparsity=0.9, methods=["imp"])
    with pytest.raises(ValueError, match="synflow has no knob 'cut'; it has early_epochs, cuts, window, path"):
        dp.preview(net, [images()], sparsity=0.9, knobs={"synflow": {"cut": 3}})
    with pytest.raises(ValueError, match="knobs are given for imp, which is not among the methods: snip, erk"):
        dp.preview(net, [images()], sparsity=0.9, methods=["snip", "erk"], knobs={"imp": {"cycles": 3}})
    for knobs in ({"drive": 5}, [1], "cuts"):
        with pytest.raises(TypeError, match="knobs are given by method, as"):
            dp.preview(net, [images()], sparsity=0.9, knobs=knobs)
    for methods in ((), ["snip", "erk", "snip"]):
        with pytest.raises(
            ValueError, match="methods must be one or more different ones, got (none|snip, erk, snip)"
        ):
            dp.preview(net, [images()], sparsity=0.9, methods=methods)
    with pytest.raises(ValueError, match="unknown method 'snap'"):
        dp.preview(net, [images()], sparsity=0.9, methods=["snap"])
    with pytest.raises(ValueError, match="budget must be"):
        dp.preview(net, [images()], sparsity=0.9, budget="flops")
    with pytest.raises(ValueError, match="exclude pattern 'nope' matches no weight"):
        dp.preview(net, [images()], sparsity=0.9, exclude="nope")
    assert same(before, snapshot(net))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"frozen": "no"}, "frozen must be true or false, got 'no'"),
        ({"show": "no"}, "show must be true or false, got 'no'"),
        ({"min_kept": 2.5}, "min_kept must be a whole number, got 2.5"),
        ({"seed": 1.7}, "seed must be a whole number, got 1.7"),
        ({"loss": nn.CrossEntropyLoss()}, r"loss must be a function of \(model, batch\)"),
        ({"exclude": 3}, "exclude must be a pattern"),
        ({"knobs": {"drive": {"early_epochs": 2.0}}}, "early_epochs=2.0 would do nothing"),
    ],
)
def test_an_option_of_all_methods_is_checked_before_any_is_tried(option, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dp.preview(mlp(), [batch()], sparsity=0.9, **option)


def test_methods_that_are_left_out_for_one_reason_are_named_together():
    def detached(net, batch):
        return nn.functional.cross_entropy(net(batch[0]), batch[1]).detach()

    found = dp.preview(mlp(), [batch()], sparsity=0.9, loss=detached, show=False)
    assert (
        "drive, driveflow, force, grasp, snip are left out, they cannot work here: the loss has no gradient"
        in " ".join(str(found).split())
    )


class Named(nn.Module):
    """A network whose output is no tensor."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return {"logits": self.net(x)}


def loss_of_named(net, batch):
    return nn.functional.cross_entropy(net(batch[0])["logits"], batch[1])


def test_a_method_that_cannot_work_is_left_out_and_the_reason_is_said():
    net = Named()
    before = snapshot(net)
    found = dp.preview(net, [batch()], sparsity=0.9, loss=loss_of_named, show=False)
    assert [row.method for row in found.rows] == [name for name in one_go() if name != "grasp"]
    assert list(found.skipped) == ["grasp"]
    assert "set the knob temperature=1" in found.skipped["grasp"]
    assert "grasp is left out, it cannot work here: grasp divides the model's output" in " ".join(str(found).split())
    assert same(before, snapshot(net))
    cured = dp.preview(
        net, [batch()], sparsity=0.9, loss=loss_of_named, knobs={"grasp": {"temperature": 1.0}}, show=False
    )
    assert [row.method for row in cured.rows] == one_go()
    assert not cured.skipped


def test_an_error_of_a_method_is_not_hidden_behind_cannot_work():
    def broken(model, mask, batches, *, loss, generator):
        return {}["no such thing"]

    net = convnet()
    before, state = snapshot(net), torch.get_rng_state()
    found = dp.preview(net, [images()], sparsity=0.9, methods=[broken, "erk"], show=False)
    ((method, reason),) = found.skipped.items()
    assert method.endswith("broken")
    assert reason == "KeyError: 'no such thing'"
    assert "KeyError: 'no such thing'" in " ".join(str(found).split())
    with pytest.raises(ValueError, match="no method can work on this network: KeyError: 'no such thing'") as caught:
        dp.preview(net, [images()], sparsity=0.9, methods=[broken])
    assert isinstance(caught.value.__cause__, KeyError)
    assert same(before, snapshot(net))
    assert torch.equal(state, torch.get_rng_state())


def test_knobs_and_the_options_of_prune_are_passed_on():
    options = {"min_kept": 5, "exclude": "0.weight"}
    found = dp.preview(
        convnet(), [images()], sparsity=0.95, methods=["synflow", "drive"], knobs={"synflow": {"cuts": 3}},
        show=False, **options,
    )  # fmt: skip
    for row, knobs in zip(found.rows, ({"cuts": 3}, None), strict=True):
        alone = dp.prune(convnet(), [images()], method=row.method, sparsity=0.95, knobs=knobs, **options)
        assert same(dict(row.mask), dict(alone))
    frozen = convnet()
    frozen[0].weight.requires_grad_(False)
    for admitted in (False, True):
        seen = dp.preview(frozen, [images()], sparsity=0.9, methods="snip", frozen=admitted, show=False)
        assert ("0.weight" in seen.rows[0].mask) is admitted


def test_a_budget_of_multiply_adds():
    found = dp.preview(convnet(), [images()], sparsity=0.9, budget="macs", show=False)
    assert "erk" in found.skipped
    assert "a budget of multiply-adds needs a method whose weights compete globally" in found.skipped["erk"]
    assert all(row.macs <= 0.1 * found.macs for row in found.rows)
    assert "sparsity 0.9 of the multiply-adds" in str(found)


def test_why_paths_cannot_be_followed_is_said():
    class Stubborn(nn.Linear):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            return super().forward(x)

    found = dp.preview(Stubborn(6, 3), [batch()], sparsity=0.5, methods=["snip"], show=False)
    assert found.rows[0].flow is None
    assert "?: paths through the network could not be followed: TypeError: float32 only" in " ".join(
        str(found).split()
    )

    def bare(net, batch):
        return net.net(batch[0]).square().mean()

    found = dp.preview(Named(), [batch()], sparsity=0.5, methods=["snip"], loss=bare, show=False)
    assert "the loss does not call the model itself" in found.not_followed
