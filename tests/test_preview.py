import pytest
import torch

import driveprune as dp
from driveprune.mask import kept_count
from tests.nets import convnet, images, same, snapshot


def test_every_method_that_cuts_in_one_go_and_the_model_untouched(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    net = convnet()
    before, state = snapshot(net), torch.get_rng_state()
    found = dp.preview(net, [images()], sparsity=0.9)
    assert [row.method for row in found.rows] == [
        "drive", "erk", "force", "grasp", "magnitude", "random", "snip", "synflow"
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
    assert same(before, snapshot(net))
