import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import driveprune as dp
from driveprune.files import read_tensors, write_tensors
from driveprune.netfile import _packed, _unpacked
from tests.nets import Recurrent, Transformer, batch, convnet, images, mlp, same, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


def pruned(net, density=0.2):
    torch.manual_seed(1)
    mask = dp.Mask({name: torch.rand(w.shape) < density for name, w in dp.prunable(net).items()}, {"method": "dice"})
    dp.apply(net, mask)
    return mask


@pytest.mark.parametrize("build", [mlp, convnet, Transformer, Recurrent])
def test_round_trip_is_bit_exact(build, tmp_path):
    net = build()
    mask = pruned(net)
    dp.save(tmp_path / "net.safetensors", net, mask)
    fresh = build(seed=5)
    again = dp.load(tmp_path / "net.safetensors", fresh)
    assert same(net.state_dict(), fresh.state_dict())
    assert same(dict(mask), dict(again))
    assert again.provenance == {"method": "dice"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_odd_values(dtype, tmp_path):
    net = mlp(dtype=dtype)
    mask = pruned(net)
    with torch.no_grad():
        kept = net[0].weight[mask["0.weight"]]
        kept[:4] = torch.tensor([-0.0, float("inf"), float("nan"), torch.finfo(dtype).tiny], dtype=dtype)
        net[0].weight[mask["0.weight"]] = kept
    dp.save(tmp_path / "x", net, mask)
    fresh = mlp(seed=1, dtype=dtype)
    dp.load(tmp_path / "x", fresh)
    a, b = (n[0].weight.detach().view(torch.int16 if dtype.itemsize == 2 else torch.int64) for n in (net, fresh))
    assert torch.equal(a, b)


@given(st.lists(st.booleans(), max_size=70))
def test_masks_as_bits(flags):
    kept = torch.tensor(flags, dtype=torch.bool)
    assert torch.equal(_unpacked(_packed(kept), [len(flags)]), kept)
    assert len(_packed(kept)) == (len(flags) + 7) // 8


def test_channels_last_and_wrapped_models(tmp_path):
    net = convnet().to(memory_format=torch.channels_last)
    mask = pruned(net)
    dp.save(tmp_path / "x", torch.compile(net, backend="eager"), mask)
    fresh = convnet(seed=1)
    dp.load(tmp_path / "x", nn.DataParallel(fresh))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), fresh.parameters(), strict=True))


def test_tied_weights_are_stored_once(tmp_path):
    def build():
        net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        net[1].weight = net[0].weight
        return net

    net = build()
    dp.save(tmp_path / "x", net, pruned(net))
    with safe_open(tmp_path / "x", "pt") as file:
        assert "1.weight:kept" not in file.keys()  # noqa: SIM118
    fresh = build()
    dp.load(tmp_path / "x", fresh)
    assert same(net.state_dict(), fresh.state_dict())


def test_the_file_is_small(tmp_path):
    net = nn.Linear(1000, 1000)
    mask = dp.prune(net, method="magnitude", sparsity=0.98)
    dp.save(tmp_path / "x", net, mask)
    assert (tmp_path / "x").stat().st_size < 20_000 * 4 + 1_000_000 / 8 + 4_000 + 2_000


def test_provenance_of_a_real_cut(tmp_path):
    net = convnet()
    mask = dp.prune(net, [images()], sparsity=0.9, seed=3, knobs={"cuts": 4})
    dp.save(tmp_path / "x", net, mask)
    about = dp.load(tmp_path / "x", convnet(seed=1)).provenance
    assert about["method"] == "drive"
    assert about["knobs"]["cuts"] == 4
    assert about["seed"] == 3
    assert about["sparsity"] == 0.9
    assert about["versions"].keys() >= {"torch", "driveprune", "python"}
    dp.save(tmp_path / "x", net, mask, provenance={"by": "me"})
    assert dp.load(tmp_path / "x", net).provenance == {"by": "me"}


def test_removed_weights_that_are_not_zero(tmp_path):
    net = mlp()
    mask = pruned(net)
    with torch.no_grad():
        net[2].weight.add_(1)
    with pytest.raises(ValueError, match=r"removed weights of 2.weight are not zero: hold"):
        dp.save(tmp_path / "x", net, mask)
    assert not (tmp_path / "x").exists()


def test_files_that_do_not_fit_change_nothing(tmp_path):
    net = mlp()
    dp.save(tmp_path / "x", net, pruned(net))
    for other, message in [
        (convnet(), "does not fit the model: only the file has 2.bias"),
        (mlp(dtype=torch.float64), r"0.weight is float32 of shape \(40, 6\) in the file and float64"),
        (nn.Sequential(*mlp(), nn.Linear(3, 3)), "only the model has 5.bias, 5.weight"),
        (nn.Sequential(nn.Linear(7, 40), *list(mlp())[1:]), r"in the file and float32 of shape \(40, 7\)"),
    ]:
        before = snapshot(other)
        with pytest.raises(ValueError, match=message):
            dp.load(tmp_path / "x", other)
        assert same(before, snapshot(other))


def test_truncated_foreign_and_tampered_files(tmp_path):
    net = mlp()
    path = tmp_path / "x"
    dp.save(path, net, pruned(net))
    whole = path.read_bytes()
    before = snapshot(net)
    for bit in range(0, len(whole) * 8, 997):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged|not written by driveprune"):
            dp.load(path, net)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        dp.load(path, net)
    save_file(net.state_dict(), path)
    with pytest.raises(ValueError, match="was not written by driveprune"):
        dp.load(path, net)
    write_tensors(path, {}, {"format": "driveprune-99"})
    with pytest.raises(ValueError, match="its format is 'driveprune-99'"):
        dp.load(path, net)
    torch.save(net.state_dict(), path)
    with pytest.raises(ValueError, match="no safetensors file"):
        dp.load(path, net)
    assert same(before, snapshot(net))


def test_a_forged_file_with_a_right_checksum(tmp_path):
    net = mlp()
    path = tmp_path / "x"
    dp.save(path, net, pruned(net))
    tensors, metadata = read_tensors(path)
    fewer = {**tensors, "0.weight:kept": tensors["0.weight:kept"][1:]}
    write_tensors(path, fewer, metadata)
    with pytest.raises(ValueError, match="values and mask of 0.weight do not agree"):
        dp.load(path, net)
    write_tensors(path, tensors, {**metadata, "shapes": json.dumps({"0.weight": [10**9, 10**9]})})
    with pytest.raises(ValueError, match="is damaged"):
        dp.load(path, net)
    write_tensors(path, tensors, {"format": metadata["format"]})
    with pytest.raises(ValueError, match="is damaged"):
        dp.load(path, net)
    without = {name: value for name, value in tensors.items() if name != "0.weight:mask"}
    write_tensors(path, without, metadata)
    with pytest.raises(ValueError, match="is damaged"):
        dp.load(path, net)


def test_loading_under_a_hold_keeps_the_hold(tmp_path):
    net = mlp()
    dp.save(tmp_path / "x", net, pruned(net))
    fresh = mlp(seed=2)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    held = dp.hold(fresh, optimizer, dp.load(tmp_path / "x", fresh))
    torch.nn.functional.cross_entropy(fresh(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert all(not fresh.state_dict()[name][~kept].any() for name, kept in held.mask.items())


def test_an_untied_file_does_not_fit_a_tied_model(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    dp.save(tmp_path / "x", net, pruned(net))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    before = snapshot(tied)
    with pytest.raises(ValueError, match="1.weight and 0.weight are tied in the model, not in the file"):
        dp.load(tmp_path / "x", tied)
    assert same(before, snapshot(tied))


def test_a_buffer_that_cannot_be_written_to_leaves_the_model_as_it_was(tmp_path):
    def build(expand):
        net = mlp()
        net.register_buffer("scale", torch.ones(1).expand(4) if expand else torch.ones(4))
        return net

    net = build(False)
    dp.save(tmp_path / "x", net, pruned(net))
    other = build(True)
    before = snapshot(other)
    with pytest.raises(RuntimeError, match="single memory location"):
        dp.load(tmp_path / "x", other)
    assert same(before, snapshot(other))


def test_what_a_file_cannot_hold(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return 99

        def set_extra_state(self, state):
            pass

    with pytest.raises(ValueError, match="has an extra state"):
        dp.save(tmp_path / "x", Extra(3, 3), {})
    with pytest.raises(ValueError, match="run one forward first"):
        dp.save(tmp_path / "x", nn.LazyLinear(3), {})
    dp.save(tmp_path / "x", nn.Linear(3, 3), {})
    with pytest.raises(ValueError, match="meta device"):
        dp.load(tmp_path / "x", nn.Linear(3, 3, device="meta"))


def test_buffers_that_overlap(tmp_path):
    def build():
        net = nn.Linear(3, 3)
        net.register_buffer("whole", torch.randn(8))
        net.register_buffer("part", net.whole[:4])
        return net

    net = build()
    dp.save(tmp_path / "x", net, pruned(net))
    fresh = build()
    dp.load(tmp_path / "x", fresh)
    assert same(net.state_dict(), fresh.state_dict())


def test_links_and_missing_folders(tmp_path):
    net = mlp()
    mask = pruned(net)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    dp.save(tmp_path / "link", net, mask)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").is_file()
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere to write net to"):
        dp.save(tmp_path / "nowhere" / "net", net, mask)
