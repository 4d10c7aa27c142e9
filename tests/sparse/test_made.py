"""Sparse networks are whole networks: instances of their class, with its methods, in files, in other processes."""

import copy
import inspect
import io
import multiprocessing
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from driveprune.export import export
from driveprune.integrations.torch_prune import from_torch, to_torch
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.made import SparseNetwork, made_of
from tests.nets import DenseLike, InceptionLike, MixerLike, Recurrent, UNetLike, convnet, same, sequences
from tests.sparse.literal import Residual, assert_near, floats, masked, random_mask, spoken

FREE = pytest.mark.filterwarnings("ignore:only .* of the masked weights")


class Talkative(Residual):
    """A network with more than a forward: attributes, methods, and names that a sparse network might use itself."""

    def __init__(self):
        super().__init__()
        self.config = {"classes": 4}
        self.dense = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x):
        return self.dense(super().forward(x)) * self.mask

    def features(self, x):
        return self.act(self.norm(self.stem(x)))

    def predict(self, x):
        return self.forward(x).argmax(1)

    def __len__(self):
        return 7


def talkative():
    net = spoken(Talkative().eval())
    mask = random_mask(net, 0.7)
    return masked(net, mask), mask, dp.sparsify(net, mask, floats(1, 3, 8, 8), layers="sparse")


@pytest.mark.parametrize("filled_in", [False, True])
def test_methods_and_attributes_of_the_model(filled_in):
    net, _, fast = talkative()
    assert isinstance(fast, SparseNetwork)
    assert made_of(fast).graphs is not None
    if filled_in:
        made_of(fast).fill_in()
    x = floats(9, 3, 8, 8)
    assert isinstance(fast, Talkative)
    assert fast.config == {"classes": 4}
    assert len(fast) == 7
    assert fast.mask.shape == (4,)
    assert isinstance(fast.dense, SparseLayer)
    assert_near(fast(x), net(x))
    assert_near(fast.features(x), net.features(x))
    assert torch.equal(fast.predict(x), net.predict(x))
    with torch.no_grad():
        for weight in fast.parameters():
            weight.mul_(1.1)
    again = dp.densify(fast)
    assert_near(fast.features(x), again.features(x))
    assert_near(fast(x), again(x))


def test_the_signature_is_the_models():
    _, _, fast = talkative()
    assert list(inspect.signature(fast.forward).parameters) == ["x"]


def test_a_sequential_is_one():
    net = convnet().eval()
    mask = random_mask(net, 0.7)
    fast = dp.sparsify(net, mask, floats(1, 3, 8, 8), layers="sparse")
    assert isinstance(fast, nn.Sequential)
    assert len(fast) == len(net)
    assert [type(each) for each in fast if not isinstance(each, SparseLayer)] == [
        type(each) for each in net if not isinstance(each, nn.Conv2d | nn.Linear)
    ]
    x, y = floats(5, 3, 8, 8), floats(5, 3, 8, 8)
    for one, other in zip(fast, masked(net, mask), strict=True):
        x, y = one(x), other(y)
    assert_near(x, y)
    assert_near(fast[:2](floats(5, 3, 8, 8)), masked(net, mask)[:2](floats(5, 3, 8, 8)))
    assert (fast[0].in_channels, fast[0].kernel_size) == (net[0].in_channels, net[0].kernel_size)


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


def test_nothing_is_added_to_the_networks_own_modules():
    net = nn.Sequential(nn.Linear(4, 8), FunctionalDropout(), nn.Linear(8, 3))
    mask = random_mask(net, 0.5)
    fast = dp.sparsify(net, mask, floats(1, 4), layers="sparse")
    assert [name for name, _ in fast.named_modules()] == [name for name, _ in net.named_modules()]
    for training in (True, False):
        outputs = []
        for each in (fast.train(training), masked(net, mask).train(training)):
            torch.manual_seed(3)
            outputs.append(each(floats(9, 4)))
        assert_near(*outputs)


NETS = {"residual": Residual, "dense": DenseLike, "inception": InceptionLike, "unet": UNetLike, "mixer": MixerLike,
        "convnet": convnet, "recurrent": Recurrent}  # fmt: skip


def pickled(net):
    return pickle.loads(pickle.dumps(net))


def saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@FREE
@pytest.mark.parametrize("carry", [pickled, saved, copy.deepcopy])
@pytest.mark.parametrize("name", NETS)
def test_copies_and_files(name, carry):
    """The same function, mask and training, in bits; and nothing shared with the first one."""
    example = sequences(2)[0] if name == "recurrent" else floats(2, 3, 8, 8)
    net = spoken(NETS[name]().train())
    mask = random_mask(net, 0.8)
    fast = dp.sparsify(net, mask, example, layers="sparse")
    twin = carry(fast)
    assert type(twin) is type(fast)
    assert same(dict(twin.mask), dict(fast.mask))
    assert same(twin.state_dict(), fast.state_dict())
    assert [key for key, _ in twin.named_parameters()] == [key for key, _ in fast.named_parameters()]
    for each in (fast, twin):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            each(example).square().sum().backward()
            optimizer.step()
        each.eval()
    assert same(twin.state_dict(), fast.state_dict())
    with torch.no_grad():
        assert torch.equal(twin(example), fast(example))
    assert same(dp.densify(twin).state_dict(), dp.densify(fast).state_dict())
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    assert all(weight.any() for key, weight in fast.named_parameters() if key in mask and weight.numel())


def test_a_compacted_network_in_a_file():
    net = spoken(Residual().eval())
    mask = random_mask(net, 0.95)
    small = dp.compact(net, mask, floats(1, 3, 8, 8))
    fast = dp.sparsify(small, small.mask, floats(1, 3, 8, 8), layers="sparse")
    for filled_in in (False, True):
        if filled_in:
            fast.fill_in()
        for twin in (pickled(fast), copy.deepcopy(fast)):
            assert_near(twin(floats(5, 3, 8, 8)), small(floats(5, 3, 8, 8)))


def test_a_file_is_small():
    """Kept values, their places and the mask in bits: no full weights, and no tables."""
    net = nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 500))
    fast = dp.sparsify(net, random_mask(net, 0.98), floats(1, 500), layers="sparse")
    fast(floats(9, 500)).sum().backward()
    fast.zero_grad(set_to_none=True)
    made_of(fast).fill_in()
    fast(floats(9, 500)).sum().backward()
    fast.zero_grad(set_to_none=True)
    assert len(pickle.dumps(fast)) < 500_000 / 8 + 10_000 * 8 + 60_000


def _answer(net, x, queue):
    with torch.no_grad():
        queue.put(net(x).numpy())


def test_other_processes():
    net = spoken(Residual().eval())
    fast = dp.sparsify(net, random_mask(net, 0.8), floats(1, 3, 8, 8), layers="sparse")
    context = multiprocessing.get_context("spawn")
    queue, x = context.Queue(), floats(3, 3, 8, 8)
    process = context.Process(target=_answer, args=(fast, x, queue))
    process.start()
    found = queue.get(timeout=300)
    process.join()
    with torch.no_grad():
        assert_near(torch.from_numpy(found), fast(x))


X, Y = floats(20, 3, 8, 8), torch.arange(20) % 4
BATCHES = [(X, Y)]
CALLS = {
    "prune": lambda net, mask: dp.prune(net, BATCHES, sparsity=0.9, method="snip"),
    "prune with a mask": lambda net, mask: dp.prune(net, BATCHES, sparsity=0.9, method="snip", mask=mask),
    "hold": lambda net, mask: dp.hold(net, None, mask),
    "hold with an optimiser": lambda net, mask: dp.hold(net, torch.optim.SGD(net.parameters(), lr=0.1), mask),
    "save": lambda net, mask: dp.save("never.safetensors", net, mask),
    "compact": lambda net, mask: dp.compact(net, mask, X[:1]),
    "sparsify": lambda net, mask: dp.sparsify(net, mask, X[:1]),
    "bench": lambda net, mask: dp.bench(net, mask, X[:1], batches=[1], rounds=1),
    "preview": lambda net, mask: dp.preview(net, BATCHES, sparsity=0.9),
    "summary": lambda net, mask: dp.summary(mask, net, X[:1]),
    "effective_sparsity": lambda net, mask: dp.effective_sparsity(net, mask, X[:1]),
    "Pruner": lambda net, mask: dp.Pruner(
        net, torch.optim.SGD(net.parameters(), lr=0.1), BATCHES, sparsity=0.9, epochs=10, steps_per_epoch=1
    ),
    "fit": lambda net, mask: dp.fit(net, ((X, Y), (X, Y)), sparsity=0.9, epochs=1, progress=False),
    "apply": dp.apply,
    "prunable": lambda net, mask: dp.prunable(net),
    "mask_of": lambda net, mask: dp.mask_of(net),
    "export": lambda net, mask: export("never", net, mask, X[:1], format="csr"),
    "to_torch": to_torch,
    "from_torch": lambda net, mask: from_torch(net),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["in regions", "layer by layer", "wrapped", "a part"])
@pytest.mark.parametrize("name", CALLS)
def test_what_needs_an_ordinary_network_says_so(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = spoken(Residual().eval())
    mask = random_mask(net, 0.8)
    fast = dp.sparsify(net, mask, X[:1], layers="sparse")
    if kind == "layer by layer":
        made = made_of(fast)
        fast.__class__, made.graphs = Residual, None
    wrapped = {"wrapped": torch.optim.swa_utils.AveragedModel(fast), "a part": nn.Sequential(fast, nn.ReLU())}
    asked = wrapped.get(kind, fast)
    before, random = copy.deepcopy(fast.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"a sparse network made by sparsify.*call densify\(model\) first"):
        CALLS[name](asked, mask)
    assert same(fast.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert not list(tmp_path.iterdir())
    assert all(weight.grad is None for weight in fast.parameters())


def test_load_says_so(tmp_path):
    net = spoken(Residual().eval())
    mask = random_mask(net, 0.8)
    dp.save(tmp_path / "net.safetensors", masked(net, mask), mask)
    fast = dp.sparsify(net, mask, X[:1], layers="sparse")
    with pytest.raises(ValueError, match=r"call densify\(model\) first"):
        dp.load(tmp_path / "net.safetensors", fast)
    assert not any(hasattr(module, "_made_by_sparsify") for module in dp.densify(fast).modules())
    dp.load(tmp_path / "net.safetensors", dp.densify(fast))
