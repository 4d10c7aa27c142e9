import json
import os
import runpy
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import driveprune as dp
from driveprune import files, netfile
from driveprune.cli.delivery import _network_of
from driveprune.container import Kind
from driveprune.files import read_tensors, write_tensors
from driveprune.gaps import entropy_bits, width
from tests.fuzz.mutations import sealed, split
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


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.98, 0.993, 0.999])
@pytest.mark.parametrize(("values", "width"), [("exact", 4), ("fp16", 2)])
@pytest.mark.parametrize("kind", ["at random", "by magnitude", "in one corner"])
def test_the_file_is_near_the_entropy_bound(sparsity, values, width, kind, tmp_path):
    net = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 400))
    method = "random" if kind == "at random" else "magnitude"
    if kind == "in one corner":
        with torch.no_grad():
            net[0].weight.copy_(torch.linspace(1, 0, 10**6).view(1000, 1000))
    mask = dp.prune(net, method=method, sparsity=sparsity)
    saved = dp.save(tmp_path / "x", net, mask, values=values)
    kept = {name: int(each.sum()) for name, each in mask.items()}
    bits = sum(entropy_bits(kept[name], each.numel()) for name, each in mask.items())
    bound = bits / 8 + width * sum(kept.values()) + 4 * 1400
    assert saved.bound_bytes == pytest.approx(bound, abs=2)
    assert saved.bytes == (tmp_path / "x").stat().st_size
    assert saved.bytes <= 1.15 * bound + 2500  # the head of the file counts only for small networks
    assert saved.dense_bytes == 4 * (1_400_000 + 1400)


def test_values_in_half_precision_and_their_error(tmp_path):
    net = mlp()
    mask = pruned(net)
    saved = dp.save(tmp_path / "x", net, mask, values="fp16")
    fresh = mlp(seed=3)
    again = dp.load(tmp_path / "x", fresh)
    assert torch.equal(fresh[0].weight, net[0].weight.half().float())
    assert torch.equal(fresh[0].bias, net[0].bias)
    lost = sum(float((net.state_dict()[name] - fresh.state_dict()[name]).double().square().sum()) for name in mask)
    whole = sum(float(net.state_dict()[name].double().square().sum()) for name in mask)
    assert saved.error == pytest.approx((lost / whole) ** 0.5)
    assert 0 < saved.error < 1e-3
    assert again.provenance["values"] == {"stored_as": "fp16", "relative_error": saved.error}
    with torch.no_grad():
        net[0].weight[mask["0.weight"]] = 1e6
    with pytest.raises(ValueError, match="0.weight holds 1e.06, too large for fp16"):
        dp.save(tmp_path / "x", net, mask, values="fp16")
    with pytest.raises(ValueError, match="values must be"):
        dp.save(tmp_path / "x", net, mask, values="fp8")


def test_loading_needs_little_more_memory_than_the_model(tmp_path):
    """A child process loads a network of 200 MB; its peak is measured by the system."""
    code = """
import resource, sys, torch, driveprune as dp
net = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(50)))
small = torch.nn.Sequential(torch.nn.Linear(10, 10))
if sys.argv[2] == "save":
    dp.save(sys.argv[1], net, dp.prune(net, method="random", sparsity=0.5))
else:
    dp.save(sys.argv[1] + "2", small, dp.prune(small, method="random", sparsity=0.5))
    dp.load(sys.argv[1] + "2", small)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mask = dp.load(sys.argv[1], net)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    path = str(tmp_path / "net")
    subprocess.run([sys.executable, "-c", code, path, "save"], check=True)
    done = subprocess.run([sys.executable, "-c", code, path, "load"], check=True, capture_output=True, text=True)
    extra = int(done.stdout) * 1024
    held = (tmp_path / "net").stat().st_size  # 107 MB: so that the model is changed only if all of it is right
    assert extra < held + 50_000_000 + 50_000_000  # the mask, and room for a few tensors of 4 MB; no second model


HUGE = (100_000, 30_000)


def forged(path, shape=HUGE, places=(5, 7, 123, 456, 789), **about):
    """A file of less than a kilobyte that keeps five of three thousand million weights."""
    size = shape[0] * shape[1]
    k = width(len(places), size)
    gaps = np.diff(np.array(places), prepend=-1) - 1
    high = np.packbits(np.concatenate([[*[0] * (gap >> k), 1] for gap in gaps]).astype(np.uint8))
    low = np.packbits([gap >> bit & 1 for gap in gaps for bit in reversed(range(k))]).astype(np.uint8)
    streams = {"fc.weight:high": torch.from_numpy(high), "fc.weight:low": torch.from_numpy(low)}
    facts = {"shape": list(shape), "dtype": "float32", "listed": len(places), "inverted": False, "k": k}
    metadata = {"layers": json.dumps({"fc.weight": facts}), "tied": "{}", "provenance": json.dumps(about)}
    values = torch.arange(1.0, 1 + len(places))
    write_tensors(path, {"fc.weight:kept": values, **streams}, {"format": netfile.FORMAT, **metadata})


LIMITED = """
import json, resource, sys
import driveprune
from driveprune.cli import app
free = next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]
limit = int(free) * 1024 + 400_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for words in json.loads(sys.argv[1]):
    try:
        app(words, standalone_mode=False)
    except BaseException:
        pass
print("used", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def limited(path):
    """Commands on a file under a limit of memory: what they say, and the kilobytes that they take."""
    words = [[*each.split(), str(path)] for each in ("show", "export", "bench", f"compare {path}")]
    command = [sys.executable, "-c", LIMITED, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said, _, used = (done.stderr + done.stdout).rpartition("used ")
    return " ".join(said.split()), int(used)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_a_small_file_of_a_huge_network_takes_little_memory(tmp_path):
    """It may be honest: five weights are kept. It is shown and compared by counting, and not made dense."""
    huge, small = tmp_path / "huge", tmp_path / "small"
    sizes = {"name": "digits_net", "classes": 10, "inputs": 1, "size": 8}
    forged(huge, network={**sizes, "width": 1000.0})
    forged(small, (6, 300), network={**sizes, "width": 1.0})
    assert huge.stat().st_size < 1000
    said, used = limited(huge)
    assert "5 of 3,000,000,000 weights are kept" in said
    assert "100.0%" in said
    assert said.count("has the width 1000.0, not one up to 64") == 2
    honest, enough = limited(small)
    assert "5 of 1,800 weights are kept" in honest
    assert honest.count("does not fit the model") == 2
    assert used <= 2 * enough


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 60.0}, r"so much is made only for a model that you name"),
        ({"width": 0.5}, "does not fit the model: .* in the file and"),
        ({"width": float("inf")}, "has the width inf"),
        ({"width": "wide"}, "has the width 'wide'"),
        ({"classes": 10**30}, "has the classes 10000"),
        ({"classes": 11}, "does not fit the model"),
        ({"inputs": True}, "has the inputs True"),
        ({"size": -8}, "has the size -8"),
        ({"size": 10**5}, "has the size 100000"),
        ({"size": 512}, "does not fit the model"),
        ({"name": "os.system"}, "does not say which model"),
        ({"name": ["digits_net"]}, "does not say which model"),
    ],
)
def test_sizes_that_a_file_names_are_compared_with_its_shapes_before_anything_is_made(
    change, message, tmp_path, monkeypatch
):
    sizes = {"name": "digits_net", "classes": 10, "inputs": 1, "size": 8, "width": 1.0}
    net, path = dp.models.digits_net(), tmp_path / "x"
    dp.save(path, net, pruned(net, 0.01), provenance={"network": sizes})
    real = []
    build = dp.models.build
    monkeypatch.setattr(dp.models, "build", lambda **kwargs: real.append(build(**kwargs)) or real[-1])
    assert _network_of(path, {}, None, None, 10)[1] == (1, 8, 8)
    assert len(real) == 2
    tensors, metadata = read_tensors(path)
    odd = {**metadata, "provenance": json.dumps({"network": {**sizes, **change}})}
    if change.get("width") == 60.0:  # its shapes agree: only its size is against it
        with torch.device("meta"):
            shapes = {name: list(tensor.shape) for name, tensor in build(**sizes | change).state_dict().items()}
        layers = {name: {**facts, "shape": shapes[name]} for name, facts in json.loads(metadata["layers"]).items()}
        odd["layers"] = json.dumps(layers)
        monkeypatch.setattr(netfile, "_check_layer", _trusting)
    write_tensors(path, tensors, odd)
    with pytest.raises(ValueError, match=message):
        _network_of(path, {}, None, None, 10)
    assert all(parameter.is_meta for each in real[2:] for parameter in each.parameters())


def _trusting(found, name):
    found.kinds[name] = Kind(torch.float32, tuple(found.layers[name]["shape"]))


def test_what_is_made_after_the_word_of_a_file_alone_is_bounded_by_its_bytes(tmp_path):
    path = tmp_path / "x"
    forged(path)
    with pytest.raises(ValueError, match="its network has 12,000,000,000 bytes, but is a file of"):
        netfile.read(path)
    outline = netfile.outline(path)
    assert outline.kept == {"fc.weight": 5}
    assert outline.dense_bytes == 4 * HUGE[0] * HUGE[1]
    assert outline.bytes == path.stat().st_size
    with pytest.raises(ValueError, match="does not fit the model"):
        dp.load(path, nn.Sequential(OrderedDict(fc=nn.Linear(3, 4, bias=False))))
    forged(path, (6000, 1800))  # 43 MB, and again under a second name
    tensors, metadata = read_tensors(path)
    netfile.outline(path).check_size()
    write_tensors(path, tensors, {**metadata, "tied": '{"fc2.weight": "fc.weight"}'})
    with pytest.raises(ValueError, match="its network has 86,400,000 bytes"):
        netfile.outline(path).check_size()
    forged(path, (6, 300))
    fitting = nn.Sequential(OrderedDict(fc=nn.Linear(300, 6, bias=False)))
    dp.load(path, fitting)
    assert fitting.fc.weight.detach().reshape(-1).nonzero().reshape(-1).tolist() == [5, 7, 123, 456, 789]
    assert netfile.read(path)[0]["fc.weight"].count_nonzero() == 5


@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 0.5, 0.7, 1.0])
def test_counts_are_those_of_the_masks(density, tmp_path):
    nets = [convnet(), convnet(seed=3)]
    masks = [pruned(net, each) for net, each in zip(nets, (density, 0.4), strict=True)]
    for name, net, mask in zip("ab", nets, masks, strict=True):
        dp.save(tmp_path / name, net, mask)
    first, second = masks
    outline = netfile.outline(tmp_path / "a")
    assert outline.kept == {name: int(kept.sum()) for name, kept in first.items()}
    assert outline.dense_bytes == sum(t.numel() * t.element_size() for t in nets[0].state_dict().values())
    for order in (1, -1):
        found = netfile.shared(*[tmp_path / name for name in "ab"[::order]])
        assert {name: each.both for name, each in found.items()} == {
            name: int((kept & second[name]).sum()) for name, kept in first.items()
        }


def test_a_tied_network_is_counted_once(tmp_path):
    net = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    net[1].weight = net[0].weight
    dp.save(tmp_path / "x", net, pruned(net))
    outline = netfile.outline(tmp_path / "x")
    assert outline.dense_bytes == 4 * 30 * 30
    assert outline.kinds.keys() == {"0.weight", "1.weight"}


def test_a_file_that_changes_while_it_is_loaded_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    net, other = (nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 100)) for _ in range(2))
    path, filled, count = tmp_path / "x", files._filled, 0
    dp.save(path, net, pruned(net, 0.4))
    before = snapshot(other)

    def changing(file, room):
        nonlocal count
        count += 1
        if count == 4:
            os.truncate(path, path.stat().st_size - 100)
        return filled(file, room)

    monkeypatch.setattr(files, "_filled", changing)
    with pytest.raises(ValueError, match="is damaged"):
        dp.load(path, other)
    assert count >= 4
    assert same(before, snapshot(other))


def test_numbers_of_a_provenance_that_json_does_not_know(tmp_path):
    net = mlp()
    dp.save(tmp_path / "x", net, pruned(net), provenance={"loss": float("nan"), "path": tmp_path, 3: [float("inf")]})
    tensors, metadata = read_tensors(tmp_path / "x")
    assert json.loads(metadata["provenance"], parse_constant=pytest.fail)["loss"] == "nan"
    write_tensors(tmp_path / "x", tensors, {**metadata, "provenance": '{"loss": NaN}'})  # as it was written before
    assert dp.load(tmp_path / "x", mlp()).provenance["loss"] != 0
    write_tensors(tmp_path / "x", tensors, {**metadata, "provenance": "[" * 10_000})
    with pytest.raises(ValueError, match="x is damaged: the provenance is damaged: it is nested too deeply"):
        dp.load(tmp_path / "x", mlp())


def test_provenance_of_a_real_cut(tmp_path):
    net = convnet()
    mask = dp.prune(net, [images()], sparsity=0.9, seed=3, knobs={"cuts": 4})
    dp.save(tmp_path / "x", net, mask)
    about = dp.load(tmp_path / "x", convnet(seed=1)).provenance
    assert about["method"] == "drive"
    assert about["knobs"]["cuts"] == 4
    assert about["seed"] == 3
    assert about["asked"] == 0.9
    assert about["sparsity"] == dp.sparsity(mask)
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
    for bit in range(0, len(whole) * 8, 64):
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
    layers = json.loads(metadata["layers"])
    odd = [{"shape": [10**9, 10**9]}, {"shape": [3]}, {"k": -1}, {"k": 63}, {"listed": 1}, {"inverted": True},
           {"dtype": "float33"}, {"dtype": "nn"}, {"shape": None}]  # fmt: skip
    for change in odd:
        forged = {**layers, "0.weight": {**layers["0.weight"], **change}}
        write_tensors(path, tensors, {**metadata, "layers": json.dumps(forged)})
        with pytest.raises(ValueError, match="is damaged|does not fit"):
            dp.load(path, net)
    write_tensors(path, tensors, {"format": metadata["format"]})
    with pytest.raises(ValueError, match="is damaged"):
        dp.load(path, net)
    without = {name: value for name, value in tensors.items() if name != "0.weight:high"}
    write_tensors(path, without, metadata)
    with pytest.raises(ValueError, match="is damaged"):
        dp.load(path, net)


def test_a_tied_file_fills_an_untied_model(tmp_path):
    tied, untied = (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2))
    tied[1].weight = tied[0].weight
    dp.save(tmp_path / "x", tied, pruned(tied))
    dp.load(tmp_path / "x", untied)
    assert torch.equal(untied[1].weight, tied[0].weight)


@pytest.mark.parametrize(
    "change", [{"inverted": None}, {"inverted": []}, {"k": 1.0}, {"listed": True}, {"shape": [30.0, 40]}]
)
def test_a_forged_second_layer_leaves_the_first_alone(change, tmp_path):
    net, path = mlp(), tmp_path / "x"
    dp.save(path, net, pruned(net))
    tensors, metadata = read_tensors(path)
    layers = json.loads(metadata["layers"])
    forged = {**layers, "2.weight": {**layers["2.weight"], **change}}
    other = mlp(seed=4)
    before = snapshot(other)
    for about in (
        {"layers": json.dumps(forged)},
        {"provenance": "[]"},
        {"tied": json.dumps({"0.weight": "2.weight"})},
    ):
        write_tensors(path, tensors, {**metadata, **about})
        with pytest.raises(ValueError, match="is damaged"):
            dp.load(path, other)
    write_tensors(path, {**tensors, "0.weight:kept": tensors["0.weight:kept"] * 1j}, metadata)
    with pytest.raises(ValueError, match="is damaged"):
        dp.load(path, other)
    assert same(before, snapshot(other))


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
    with pytest.raises(ValueError, match="scale cannot be written to: it is an expanded tensor"):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 0.9, 1.0])
def test_numpy_alone_reads_the_file(density, dtype, tmp_path):
    script = Path(__file__).parent.parent / "examples" / "read_net.py"
    read_net = runpy.run_path(str(script))["read_net"]
    net = convnet().to(dtype)
    net.append(nn.Linear(4, 4, dtype=dtype)).append(nn.Linear(4, 4, dtype=dtype))
    net[-1].weight = net[-2].weight
    dp.save(tmp_path / "x", net, pruned(net, density))
    found = read_net(tmp_path / "x")
    assert found.keys() == net.state_dict().keys()
    for name, value in net.state_dict().items():
        assert found[name].dtype == value.numpy().dtype
        assert np.array_equal(found[name], value.numpy())


def test_the_reader_is_twenty_lines():
    text = (Path(__file__).parent.parent / "examples" / "read_net.py").read_text()
    body = text.partition("def read_net(path):\n")[2].partition("\n\n\nif __name__")[0]
    assert len(body.strip().splitlines()) <= 1 + 20  # a docstring and the code


def test_a_part_of_a_layer_is_no_tensor_of_its_own(tmp_path):
    """A name that is tied may be none of the streams, which would be another tensor for whoever reads the file."""
    model = mlp()
    dp.save(tmp_path / "net", model, dp.prune(model, [batch()], method="magnitude", sparsity=0.5))
    head, body = split((tmp_path / "net").read_bytes())
    layer = next(iter(json.loads(head["__metadata__"]["layers"])))
    head["__metadata__"]["tied"] = json.dumps({f"{layer}:high": layer})
    (tmp_path / "net").write_bytes(sealed(head, body))
    with pytest.raises(ValueError, match=f"net is damaged: {layer}:high is stored, or tied"):
        netfile.read(tmp_path / "net")
