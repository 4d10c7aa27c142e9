"""Every format is read back by the program that it is for."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import scipy.sparse
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import prune as torch_prune

import driveprune as dp
from driveprune import export as exports
from driveprune.export import Pixels, export
from driveprune.export import onnx as onnx_export
from driveprune.export.onnx import to_onnx
from tests.nets import (
    DenseLike,
    InceptionLike,
    MixerLike,
    MobileLike,
    Recurrent,
    Transformer,
    UNetLike,
    convnet,
    images,
)

pytestmark = pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")


def pruned(net, sparsity=0.9):
    return dp.prune(net, method="erk", sparsity=sparsity)


def test_formats():
    assert exports.names() == ["csr", "onnx", "safetensors", "torch-prune"]
    with pytest.raises(ValueError, match="format must be one of csr, onnx, safetensors, torch-prune, got 'tflite'"):
        export("x", nn.Linear(2, 2), {}, None, format="tflite")


@pytest.mark.parametrize("build", [convnet, DenseLike, InceptionLike, MobileLike, UNetLike, MixerLike])
def test_onnx_runtime_computes_what_torch_does_for_any_batch(build, tmp_path):
    net = build()
    mask = pruned(net)
    training = net.training
    export(tmp_path / "net.onnx", net, mask, images()[0][:1], format="onnx")
    assert net.training == training
    onnx.checker.check_model(str(tmp_path / "net.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    net.eval()
    for size in (1, 3, 8):
        x = images(size, seed=size)[0]
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            wanted = net(x).numpy()
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_onnx_is_of_the_compacted_network(tmp_path):
    net = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 3))
    mask = pruned(net, 0.95)
    export(tmp_path / "net.onnx", net, mask, torch.zeros(1, 6), format="onnx")
    small = dp.compact(net, mask, torch.zeros(1, 6))
    shapes = [tuple(each.dims) for each in onnx.load(tmp_path / "net.onnx").graph.initializer]
    assert small.get_submodule("0").out_features < 20
    assert any(small.get_submodule("0").out_features in shape for shape in shapes)
    assert not any(100 in shape for shape in shapes)


def test_a_network_without_a_path_is_a_constant_in_onnx(tmp_path):
    net = convnet().eval()
    mask = {name: torch.zeros_like(w, dtype=torch.bool) for name, w in dp.prunable(net).items()}
    export(tmp_path / "net.onnx", net, mask, images()[0][:1], format="onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: images(4)[0].numpy()})
    assert np.allclose(found, net[-1].bias.detach().expand(4, 4).numpy(), atol=1e-6)


def test_what_cannot_be_followed_is_written_as_it_is(tmp_path):
    class Untraceable(nn.Sequential):
        def forward(self, x):
            return torch.from_numpy(super().forward(x).detach().numpy())

    net = Untraceable(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    mask = pruned(net, 0.5)
    with pytest.warns(UserWarning, match="the network is not made smaller: torch.fx cannot"):
        export(tmp_path / "net.onnx", net, mask, torch.zeros(1, 6), format="onnx")
    shapes = [tuple(each.dims) for each in onnx.load(tmp_path / "net.onnx").graph.initializer]
    assert any(20 in shape for shape in shapes)


@pytest.mark.filterwarnings("ignore:the network is not made smaller")
def test_onnx_is_for_networks_of_any_number_of_examples(tmp_path):
    class Graph(nn.Linear):
        def forward(self, x, edges):
            return edges @ super().forward(x)

    net = Graph(6, 3)
    with pytest.raises(ValueError, match=r"for ONNX dimension 0 .* any number of examples") as caught:
        export(tmp_path / "x", net, pruned(net, 0.5), (torch.ones(5, 6), torch.ones(5, 5)), format="onnx")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_wrong_onnx_file_is_not_kept(tmp_path, monkeypatch):
    net = nn.Sequential(nn.Linear(6, 3))
    monkeypatch.setattr("driveprune.export.onnx.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="does not compute what torch does"):
        export(tmp_path / "net.onnx", net, pruned(net, 0.5), torch.zeros(1, 6), format="onnx")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="the example must be tensors"):
        to_onnx(net, {"x": 3})


def test_the_dense_state_dict(tmp_path):
    for net in (convnet(), Transformer(), Recurrent()):
        mask = pruned(net, 0.5)
        export(tmp_path / "net", net, mask, None, format="safetensors")
        found = load_file(tmp_path / "net")
        assert found.keys() == net.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())


def test_removed_weights_are_zero_whatever_the_model_holds(tmp_path):
    net = nn.Linear(4, 4)
    kept = torch.eye(4, dtype=torch.bool)
    export(tmp_path / "net", net, {"weight": kept}, None, format="safetensors")
    assert torch.equal(load_file(tmp_path / "net")["weight"], net.weight.detach() * kept)
    assert net.weight.count_nonzero() == 16


def test_torch_prune_loads_it(tmp_path):
    net = convnet()
    mask = pruned(net)
    export(tmp_path / "net", net, mask, None, format="torch-prune")
    other = convnet(seed=5)
    for name, kept in mask.items():
        path, _, leaf = name.rpartition(".")
        torch_prune.custom_from_mask(other.get_submodule(path), leaf, torch.ones_like(kept))
    other.load_state_dict(load_file(tmp_path / "net"))
    x = images()[0]
    net.eval()
    other.eval()
    assert torch.equal(net(x), other(x))
    for name in mask:
        path, _, leaf = name.rpartition(".")
        torch_prune.remove(other.get_submodule(path), leaf)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in net.state_dict().items())


def test_scipy_loads_it(tmp_path):
    net = convnet()
    mask = pruned(net)
    export(tmp_path / "net", net, mask, None, format="csr")
    shapes = json.loads((tmp_path / "net" / "shapes.json").read_text())
    dense = np.load(tmp_path / "net" / "dense.npz")
    for name, value in net.state_dict().items():
        if name in mask:
            matrix = scipy.sparse.load_npz(tmp_path / "net" / f"{name}.npz")
            assert matrix.nnz == int(mask[name].sum())
            found = matrix.toarray().reshape(shapes[name])
        else:
            found = dense[name]
        assert np.array_equal(found, value.numpy())


def test_tied_weights_are_masked_under_each_name(tmp_path):
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    net[1].weight = net[0].weight
    kept = torch.eye(6, dtype=torch.bool)
    export(tmp_path / "net", net, {"0.weight": kept}, None, format="safetensors")
    found = load_file(tmp_path / "net")
    assert found["0.weight"].count_nonzero() == found["1.weight"].count_nonzero() == 6


def test_any_name_of_a_buffer(tmp_path):
    net = nn.Linear(3, 3)
    net.register_buffer("file", torch.ones(2))
    export(tmp_path / "net", net, {}, None, format="csr")
    assert np.load(tmp_path / "net" / "dense.npz")["file"].tolist() == [1, 1]


def test_what_onnx_cannot_take_is_one_clear_error(tmp_path):
    net = nn.Linear(3, 3).bfloat16()
    with pytest.raises(ValueError, match="ONNX") as caught:
        export(tmp_path / "net.onnx", net, pruned(net, 0.5), torch.zeros(1, 3).bfloat16(), format="onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.parametrize("channels", [1, 3])
def test_onnx_normalises_images_as_a_training_does(channels, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    mean, deviation = (0.1, 0.5, 0.9)[:channels], (0.2, 0.3, 0.05)[:channels]
    mask = pruned(net, 0.5)
    pixels = Pixels(mean, deviation, tuple("abcd"))
    export(tmp_path / "x", net, mask, torch.zeros(1, channels, 8, 8), format="onnx", pixels=pixels)
    raw = dp.Images(torch.randint(256, (9, channels, 8, 8)).byte(), torch.zeros(9, dtype=torch.long))
    ((x, _),) = dp.Batches(raw, 9, mean=mean, deviation=deviation, shuffle=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "x"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["logits"], {"image": raw.x.numpy()})
    with torch.no_grad():
        assert np.allclose(found, net(x).numpy(), rtol=1e-4, atol=1e-5)
    about = {entry.key: entry.value for entry in onnx.load(tmp_path / "x").metadata_props}
    assert json.loads(about["classes"]) == list("abcd")
    assert torch.equal(pixels.normalised(raw.x), x)


def test_pixels_are_for_images_and_for_onnx(tmp_path):
    net = nn.Linear(6, 3)
    pixels = Pixels((0.5,), (0.2,))
    with pytest.raises(ValueError, match="pixels are for networks of images"):
        export(tmp_path / "x", net, pruned(net, 0.5), torch.zeros(1, 6), format="onnx", pixels=pixels)
    with pytest.raises(ValueError, match="pixels are for the format onnx"):
        export(tmp_path / "x", net, pruned(net, 0.5), torch.zeros(1, 6), format="csr", pixels=pixels)
    assert not list(tmp_path.iterdir())
    for odd in (((), (0.2,)), ((0.5,), (0.0,)), ((0.5,), ("a",)), ((float("nan"),), (1.0,)), ((0.5,), (1.0,), (3,))):
        with pytest.raises(ValueError, match="must be"):
            Pixels(*odd)


def test_a_wrong_normalisation_is_not_kept(tmp_path, monkeypatch):
    """The comparison with torch is made with bytes, through the normalisation."""
    seen = []
    compare = onnx_export._compare
    monkeypatch.setattr(onnx_export, "_compare", lambda model, running, given: seen.append((model, given)))
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)).eval()
    export(
        tmp_path / "x", net, pruned(net, 0.5), torch.zeros(1, 1, 8, 8), format="onnx", pixels=Pixels((0.5,), (0.2,))
    )
    ((model, given),) = seen
    assert given["image"].dtype == torch.uint8
    running = onnx_export.session(onnxruntime, (tmp_path / "x").read_bytes())
    compare(model, running, given)
    model.shift += 0.01
    with pytest.raises(ValueError, match="does not compute what torch does"):
        compare(model, running, given)


class Named(nn.Module):
    """Several inputs, some of them optional; what it gives is in a dictionary."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 20), nn.Linear(20, 3)

    def forward(self, x, mask=None, *, shift=None):
        hidden = self.first(x).relu()
        return {"logits": self.second(hidden if mask is None else hidden * mask) + shift, "parts": (hidden, None)}


@pytest.mark.filterwarnings("ignore:the network is not made smaller")
@pytest.mark.parametrize("inputs", [("x", "shift"), ("shift", "mask", "x")])
def test_onnx_names_inputs_and_outputs_as_the_network_does(inputs, tmp_path):
    net = Named().eval()
    sizes = {"x": 6, "mask": 20, "shift": 3}
    example = {name: torch.randn(1, sizes[name]) for name in inputs}
    export(tmp_path / "x", net, pruned(net, 0.5), {"mask": None, **example}, format="onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "x"), providers=["CPUExecutionProvider"])
    assert {each.name for each in session.get_inputs()} == set(inputs)
    assert [each.name for each in session.get_outputs()] == ["logits", "parts.0"]
    batch = {name: torch.randn(4, sizes[name]) for name in inputs}
    found = session.run(["logits"], {name: x.numpy() for name, x in batch.items()})[0]
    with torch.no_grad():
        assert np.allclose(found, net(**batch)["logits"].numpy(), rtol=1e-4, atol=1e-6)


def test_what_is_no_tensor_is_not_lost_in_onnx(tmp_path):
    class Counting(Named):
        def forward(self, x):
            return {"logits": self.second(self.first(x)), "examples": x.shape[0]}

    net = Counting()
    with pytest.raises(ValueError, match="gives 2 outputs, and the network gives 1 tensors: all .* must be tensors"):
        export(tmp_path / "x", net, pruned(net, 0.5), torch.zeros(1, 6), format="onnx")
