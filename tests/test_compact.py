"""Compaction: the same function, and the same training, in a smaller network."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import fx, nn

import driveprune as dp
from tests.nets import DenseLike, InceptionLike, MixerLike, MobileLike, UNetLike, images

pytestmark = [
    pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning"),
    pytest.mark.filterwarnings("ignore::driveprune.ScoreWarning"),
]

NETS = {
    "alexnet": lambda: dp.models.build("alexnet", classes=4, width=0.0625),
    "vgg16": lambda: dp.models.build("vgg16", classes=4, width=0.125),
    "resnet18": lambda: dp.models.build("resnet18", classes=4, width=0.125),
    "dense": DenseLike,
    "inception": InceptionLike,
    "mobile": MobileLike,
    "unet": UNetLike,
    "mixer": MixerLike,
}
METHODS = [name for name in dp.methods.names() if name not in {"imp", "gmp"}]


def pixels(name):
    return 32 if name in {"alexnet", "vgg16", "resnet18"} else 8


def loss_of(model, batch):
    return model(batch[0]).square().mean()


def pruned(name, method, sparsity, seed=0):
    """A network in float64 with random statistics and biases, cut by a method."""
    torch.manual_seed(seed)
    net = NETS[name]().double()
    generator = torch.Generator().manual_seed(seed + 1)
    data = [images(4, pixels=pixels(name), seed=seed, dtype=torch.float64)]
    mask = dp.prune(net, data, method=method, sparsity=sparsity, loss=loss_of, seed=seed, knobs=_few(method))
    for module in net.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.dim() == 1:
                values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.data.copy_(values.abs() + 0.5 if leaf == "running_var" else values)
    return net, mask, data[0][0]


def _few(method):
    return {"cuts": 3} if "cuts" in dp.methods.knobs(method) and method != "magnitude" else {}


def assert_near(a, b, tolerance=1e-9):
    scale = max(float(b.abs().max()), 1e-30)
    assert float((a - b).abs().max()) <= tolerance * scale


SLOW = [pytest.param(sparsity, marks=pytest.mark.slow) for sparsity in (0.95, 0.98, 0.999)]


@pytest.mark.parametrize("sparsity", [0.9, 0.993, *SLOW])
@pytest.mark.parametrize("name", NETS)
def test_the_same_function(name, sparsity):
    for method in METHODS:
        net, mask, x = pruned(name, method, sparsity)
        before = copy.deepcopy(net.state_dict())
        net.eval()
        small = dp.compact(net, mask, x[:1])
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        assert not small.training
        with torch.no_grad():
            assert_near(small(x), net(x))
        assert small.gains.weights[1] <= small.gains.weights[0]


@pytest.mark.parametrize("sparsity", [0.9, 0.993, *SLOW])
@pytest.mark.parametrize("name", NETS)
def test_the_same_training(name, sparsity):
    for method in METHODS:
        net, mask, x = pruned(name, method, sparsity)
        net.train()
        small = dp.compact(net, mask, x[:1], keep="trainable")
        assert small.training
        _train_alike(net, mask, small, x)


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [0.9, 0.98, 0.999])
@pytest.mark.parametrize("method", ["imp", "gmp"])
@pytest.mark.parametrize("name", NETS)
def test_masks_that_take_training(name, method, sparsity):
    net, _, x = pruned(name, "random", 0.0)
    knobs = {"imp": {"cycles": 2, "cycle_epochs": 1.0}, "gmp": {"cuts": 2}}[method]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    pruner = dp.Pruner(
        net, optimizer, [(x,)], method=method, sparsity=sparsity, epochs=4, steps_per_epoch=1, loss=loss_of,
        knobs={key: value for key, value in knobs.items() if key in dp.methods.knobs(method)},
    )  # fmt: skip
    for _ in range(pruner.epochs):
        optimizer.zero_grad()
        loss_of(net, (x,)).backward()
        optimizer.step()
        pruner.step()
    mask, plain = pruner.mask, copy.deepcopy(net)
    assert abs(dp.sparsity(mask) - sparsity) < 0.01
    eval_same(copy.deepcopy(plain), mask, x)
    plain.train()
    _train_alike(plain, mask, dp.compact(plain, mask, x[:1], keep="trainable"), x)


def _train_alike(net, mask, small, x):
    nets, masks = (net, small), (mask, small.mask)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3, momentum=0.9) for each in nets]
    for each, optimizer, kept in zip(nets, optimizers, masks, strict=True):
        dp.hold(each, optimizer, kept)
    for step in range(20):
        outputs = []
        for each, optimizer in zip(nets, optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            output = each(x)
            (output - 1).square().mean().backward()
            outputs.append(output.detach())
            if step == 0 and each is small:
                _compare_gradients(net, small)
            optimizer.step()
        assert_near(outputs[1], outputs[0], 1e-7)
    for each in nets:
        each.eval()
    with torch.no_grad():
        assert_near(small(x), net(x), 1e-7)


def _compare_gradients(net, small):
    """What the small network has of a gradient is a part of what the big one has, and all that is not zero of it."""
    big = {name: weight.grad for name, weight in net.named_parameters() if weight.grad is not None}
    largest = max(float(each.abs().max()) for each in big.values())
    for name, weight in small.named_parameters():
        if weight.grad is not None:
            values = weight.grad.flatten().sort(descending=True, stable=True).values
            others = big[name].flatten().sort(descending=True, stable=True).values
            ends = (len(others) - len(values), int((values > 0).sum()))  # what is left out is zero
            others = torch.cat([others[: ends[1]], others[ends[1] + ends[0] :]])
            assert float((values - others).abs().max()) <= 1e-9 * largest, name


def masks(net, **dead):
    """Everything is kept but what is named: weight -> the indices that go."""
    found = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in dp.prunable(net).items()}
    for name, index in dead.items():
        found[name.replace("_", ".")][index] = False
    dp.apply(net, found)
    return found


def eval_same(net, mask, x, **options):
    net.eval()
    small = dp.compact(net, mask, x[:1], **options)
    with torch.no_grad():
        assert_near(small(x), net(x))
    return small


def sequential(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


def test_a_neuron_that_nobody_reads_or_feeds_goes():
    net = sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    mask = masks(net, **{"0_weight": (0,), "2_weight": (slice(None), 1)})
    small = eval_same(net, mask, torch.randn(7, 3).double())
    assert small.get_submodule("0").out_features == 3
    assert small.mask["0.weight"].shape == (3, 3)
    assert small.gains.channels == (7, 5)
    assert small.gains.weights == (25, 15)
    assert small.gains.macs == (25, 15)
    assert "channels" in str(small.gains)
    assert dp.compact(net, mask, torch.zeros(1, 3).double(), keep="trainable").get_submodule("0").out_features == 4


def test_a_constant_goes_into_the_bias_of_a_layer_that_has_none():
    net = sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, bias=False))
    net[1].bias.data.fill_(0.7)
    mask = masks(net, **{"0_weight": (1,)})
    small = eval_same(net, mask, torch.randn(2, 1, 8, 8).double())
    assert small.get_submodule("0").out_channels == 2
    assert small.get_submodule("3").bias is not None
    assert net[3].bias is None
    x = torch.randn(2, 1, 12, 9).double()  # another size
    with torch.no_grad():
        assert_near(small(x), net(x))


def test_one_channel_stays_for_all_constants_where_zeros_surround_the_image():
    net = sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=1))
    net[1].bias.data = torch.tensor([0.1, 0.5, 0.9, -1.0, 0.3, 0.2]).double()
    mask = masks(net, **{"0_weight": ([0, 1, 2, 3],)})
    small = eval_same(net, mask, torch.randn(2, 1, 8, 8).double())
    assert small.get_submodule("0").out_channels == 3  # two live ones and one constant; the negative one is zero
    x = torch.randn(2, 1, 5, 11).double()
    with torch.no_grad():
        assert_near(small(x), net(x))


def test_a_constant_that_is_not_the_same_everywhere_stays():
    net = sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1)
    )
    net[0].bias.data.fill_(1.0)
    mask = masks(net, **{"0_weight": (0,), "1_weight": (0, 1)})  # channel 0 of the second: fed by a constant only
    eval_same(net, mask, torch.randn(2, 1, 6, 6).double())


def test_flattened_constants_of_different_places():
    net = sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    net[0].bias.data.fill_(0.4)
    small = eval_same(net, masks(net, **{"0_weight": (1,)}), torch.randn(2, 1, 4, 4).double())
    assert small.get_submodule("4").in_features == 8


def test_a_zero_that_stays_zero_goes_in_training_too():
    net = sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2))
    mask = masks(net, **{"0_weight": (0,)})
    small = dp.compact(net, mask, torch.zeros(1, 3).double(), keep="trainable")
    assert small.get_submodule("0").out_features == 4
    _train_alike(net, mask, small, torch.randn(6, 3).double())
    biased = sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    biased[0].bias.data.zero_()  # zero now, but it learns
    small = dp.compact(biased, masks(biased, **{"0_weight": (0,)}), torch.zeros(1, 3).double(), keep="trainable")
    assert small.get_submodule("0").out_features == 5


def test_dropout_draws_the_same_numbers():
    net = sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.ReLU(), nn.Linear(50, 3))
    mask = masks(net, **{"3_weight": (slice(None), slice(0, 20))})
    small = dp.compact(net, mask, torch.zeros(1, 4).double(), keep="trainable")
    assert small.get_submodule("0").out_features == 30
    _train_alike(net, mask, small, torch.randn(16, 4).double())


def test_shared_and_tied_layers():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.outer(torch.relu(self.inner(torch.relu(self.inner(x)))))

    torch.manual_seed(0)
    net = Shared().double()
    mask = masks(net, **{"inner_weight": (2,), "outer_weight": (slice(None), 2)})
    eval_same(net, mask, torch.randn(5, 6).double())


def test_a_network_without_a_path_is_a_constant():
    net = sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    mask = masks(net, **{"0_weight": slice(None)})
    x = torch.randn(3, 1, 4, 4).double()
    net.eval()
    with pytest.warns(dp.CollapseWarning, match="the compacted network is a constant"):
        small = dp.compact(net, mask, x[:1])
    with torch.no_grad():
        assert_near(small(x), net(x))
    assert not list(small.parameters())
    with pytest.warns(dp.CollapseWarning):
        trainable = dp.compact(net, mask, x[:1], keep="trainable")
    _train_alike(net, mask, trainable, x)


def test_it_goes_on_until_nothing_more_can_go():
    net = sequential(*(layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 1))
    mask = masks(net, **{"10_weight": (0, 2)})
    small = eval_same(net, mask, torch.randn(5, 4).double())
    again = dp.compact(small, small.mask, torch.zeros(1, 4).double())
    assert again.gains.weights[0] == again.gains.weights[1]


def test_an_ordinary_module():
    net = NETS["resnet18"]()
    mask = dp.prune(net, [images(2, pixels=32)], method="synflow", sparsity=0.98, loss=loss_of, knobs={"cuts": 5})
    small = dp.compact(net, mask, images(1, pixels=32)[0])
    twin = copy.deepcopy(small)
    twin.load_state_dict(small.state_dict())
    assert twin.gains == small.gains
    assert twin.mask.keys() == small.mask.keys()
    assert all(torch.equal(kept, small.mask[name]) for name, kept in twin.mask.items())
    assert small.state_dict().keys() <= net.state_dict().keys() | {f"{name}.bias" for name, _ in net.named_modules()}
    assert small.mask.provenance == mask.provenance
    dp.apply(small, small.mask)  # its mask fits it
    big = next(net.parameters()).dtype
    assert all(weight.dtype == big for weight in small.parameters())


def dense_masks(net):
    return {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in dp.prunable(net).items()}


class Odd(nn.Module):
    """Two small layers and a function of the network's own to put them together."""

    def __init__(self, forward, **extra):
        torch.manual_seed(0)
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)
        for name, value in extra.items():
            setattr(self, name, value)
        self._way = forward
        self.double()

    def forward(self, x):
        return self._way(self, x)


ODD = {
    "an in-place module whose input is used again": lambda s, x: (h := s.c(x)) + s.b(s.a(s.relu(h))),
    "a gate decided by a comparison": lambda s, x: (s.b(s.a(x).relu()) > 0).to(x.dtype) * s.c(x),
    "where": lambda s, x: torch.where(s.b(s.a(x)) > 0, s.c(x), x),
    "a number beside the output": lambda s, x: (s.c(x), s.b(s.a(x).relu()).square().mean()),
    "a product over features": lambda s, x: s.c(x) * s.a(x).prod(1, keepdim=True),
    "a parameter of one dimension": lambda s, x: s.b(s.gain * s.a(x)),
    "a bias that is read elsewhere": lambda s, x: s.b(s.a(x).relu()) + s.b.bias,
    "topk": lambda s, x: s.c(x) * s.a(x).topk(2).values.sum(1, keepdim=True),
    "chunks": lambda s, x: s.c(s.a(x).chunk(2, 1)[0] * s.a(x).chunk(2, 1)[1]),
    "axis instead of dim": lambda s, x: s.b(torch.cat([s.a(x)[:, :4], s.c(x)], axis=1)),
    "another tensor's size": lambda s, x: s.b(s.a(x).relu()).view(-1, s.c(x).size(1)),
    "a pool over features": lambda s, x: s.b(nn.functional.max_pool1d(s.a(x), 3, 1, 1)),
}


@pytest.mark.filterwarnings("ignore::driveprune.CompactWarning")
@pytest.mark.parametrize("keep", ["function", "trainable"])
@pytest.mark.parametrize("name", ODD)
def test_odd_networks_compute_the_same(name, keep):
    net = Odd(ODD[name], relu=nn.ReLU(inplace=True), gain=nn.Parameter(torch.rand(8)))
    x = torch.randn(5, 4).double()
    for seed in range(4):
        torch.manual_seed(seed)
        mask = {key: torch.rand(kept.shape) < 0.5 for key, kept in dense_masks(net).items()}
        mask["a.weight"][seed] = False
        masked = copy.deepcopy(net)
        dp.apply(masked, mask)
        masked.eval()
        small = dp.compact(net, mask, x[:1], keep=keep).eval()
        with torch.no_grad():
            for ours, wanted in zip(
                *(out if isinstance(out, tuple) else (out,) for out in (small(x), masked(x))), strict=True
            ):
                assert_near(ours, wanted)


def test_a_network_that_cannot_be_followed_comes_back_as_it_is():
    net = Odd(lambda s, x: s.b(s.a(x.float().double())).view(-1, s.c(x).size(1)))
    mask = dense_masks(net)
    mask["a.weight"][0] = False
    x = torch.randn(3, 4).double()
    net.eval()
    with pytest.warns(dp.CompactWarning) if not _is_smaller(net, mask, x) else contextlib.nullcontext():
        small = dp.compact(net, mask, x)
    dp.apply(net, mask)
    with torch.no_grad():
        assert_near(small(x), net(x))


def _is_smaller(net, mask, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gains = dp.compact(net, mask, x).gains
    return gains.weights[1] < gains.weights[0]


def test_modes_are_those_of_the_original():
    net = sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 2))
    net.train()
    net[1].eval()
    mask = masks(net, **{"4_weight": (slice(None), 0)})
    small = dp.compact(net, mask, torch.zeros(2, 4).double(), keep="trainable")
    assert small.training
    assert not small.get_submodule("1").training
    assert small.get_submodule("0").out_features == 5


def test_what_differs_between_training_and_evaluation():
    class Twofold(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.b(self.a(x)) * (2 if self.training else 1)

    torch.manual_seed(0)
    net = Twofold().double().train()
    mask = masks(net, **{"b_weight": (slice(None), 0)})
    small = dp.compact(net, mask, torch.zeros(1, 3).double())
    x = torch.randn(4, 3).double()
    with torch.no_grad():
        assert_near(small.eval()(x), net.eval()(x))
    with pytest.warns(dp.CompactWarning, match="something else in training than in evaluation"):
        whole = dp.compact(net, mask, x, keep="trainable")
    assert type(whole) is Twofold
    assert whole.mask == mask


def test_one_dropout_for_tensors_of_different_sizes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.drop = nn.Linear(3, 6), nn.Linear(6, 8), nn.Linear(8, 2), nn.Dropout(0.4)

        def forward(self, x):
            return self.c(self.drop(self.b(self.drop(self.a(x)))))

    torch.manual_seed(0)
    net = Net().double()
    mask = masks(net, **{"b_weight": (slice(None), [0, 1]), "c_weight": (slice(None), [2])})
    small = dp.compact(net, mask, torch.zeros(1, 3).double(), keep="trainable")
    assert small.gains.channels == (16, 13)
    _train_alike(net, mask, small, torch.randn(9, 3).double())


def test_constants_of_networks_without_a_batch_or_with_several_inputs():
    net = sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1))
    mask = masks(net, **{"0_weight": slice(None)})
    eval_same_unbatched = torch.randn(3, 5, 5).double()
    net.eval()
    small = dp.compact(net, mask, eval_same_unbatched)
    with torch.no_grad():
        assert_near(small(eval_same_unbatched), net(eval_same_unbatched))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x, y):
            return self.a(x + y)

    torch.manual_seed(0)
    two = Two().double().eval()
    mask = masks(two, **{"a_weight": slice(None)})
    x = torch.randn(4, 3).double()
    with torch.no_grad():
        assert_near(dp.compact(two, mask, (x[:1], x[:1]))(x, x), two(x, x))


def test_a_layer_that_the_network_does_not_use_and_hooks():
    class Aux(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.unused = nn.Linear(3, 2), nn.Linear(7, 7)

        def forward(self, x):
            return self.a(x)

    torch.manual_seed(0)
    net = Aux().double()
    small = eval_same(net, masks(net, **{"a_weight": (0, 0)}), torch.randn(4, 3).double())
    assert small.mask.keys() == {"a.weight"}
    net.a.register_forward_hook(lambda module, args, output: output * 2)
    small = eval_same(net, masks(net, **{"a_weight": (0, 0)}), torch.randn(4, 3).double())
    assert isinstance(small, fx.GraphModule)


def test_a_tied_bias_takes_no_constant():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.c.bias = self.b.bias

        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    torch.manual_seed(0)
    net = Tied().double()
    net.a.bias.data.fill_(1.0)
    eval_same(net, masks(net, **{"a_weight": (0,)}), torch.randn(5, 3).double())


def test_what_it_cannot_do():
    net = nn.Linear(2, 2)
    mask = {"weight": torch.ones(2, 2, dtype=torch.bool)}
    with pytest.raises(ValueError, match="keep must be 'function' or 'trainable', got 'all'"):
        dp.compact(net, mask, torch.zeros(1, 2), keep="all")
    with pytest.raises(ValueError, match="an example input is needed"):
        dp.compact(net, mask, None)
    with pytest.raises(ValueError, match="an example input is needed"):
        dp.compact(net, mask, torch.zeros(0, 2))
