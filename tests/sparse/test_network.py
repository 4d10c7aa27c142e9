"""Sparse networks as a whole: the same function and the same training as the masked dense network."""

import copy
import threading
import weakref
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import driveprune as dp
from driveprune.sparse.code import LANES
from driveprune.sparse.layers import SparseLayer
from driveprune.sparse.made import SparseNetwork, made_of
from tests.nets import (
    DenseLike,
    InceptionLike,
    MixerLike,
    MobileLike,
    Recurrent,
    Transformer,
    UNetLike,
    convnet,
    mlp,
    removed_are_zero,
    same,
    sequences,
    tokens,
)  # fmt: skip
from tests.sparse.literal import (
    Residual,
    Softly,
    assert_near,
    assert_same_gradients,
    floats,
    masked,
    random_mask,
    spoken,
)  # fmt: skip

NETS = {
    "residual": Residual, "dense": DenseLike, "inception": InceptionLike, "mobile": MobileLike, "unet": UNetLike,
    "mixer": MixerLike, "convnet": convnet,
}  # fmt: skip


def softly(model):
    """The network with smooth functions, so that gradients do not jump."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU | nn.ReLU6):
                setattr(module, name, Softly())
            elif isinstance(child, nn.MaxPool2d):
                setattr(module, name, nn.AvgPool2d(child.kernel_size, child.stride, child.padding))
    return model


@pytest.mark.parametrize("sparsity", [0.0, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("name", NETS)
def test_the_same_function(name, sparsity):
    net = spoken(NETS[name]().eval())
    mask = random_mask(net, sparsity)
    sparse, exact = dp.sparsify(net, mask, floats(1, 3, 8, 8), layers="sparse"), masked(net, mask).double()
    for count in (1, 3, LANES + 1):
        x = floats(count, 3, 8, 8, seed=count)
        expected = exact(x.double())
        with torch.no_grad():
            assert_near(sparse(x), expected, 5e-5)
        assert_near(sparse(x.to(memory_format=torch.channels_last)), expected, 5e-5)


@pytest.mark.parametrize("sparsity", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("name", ["residual", "inception", "convnet", "mixer"])
def test_the_same_gradients_and_statistics(name, sparsity):
    net = spoken(softly(NETS[name]()).train())
    mask = random_mask(net, sparsity)
    sparse, exact = dp.sparsify(net, mask, floats(2, 3, 8, 8), layers="sparse"), masked(net, mask).double()
    for module in (*sparse.modules(), *exact.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # random numbers differ between float32 and float64
    for count in (2, 2 * LANES + 3):
        found_x, exact_x = floats(count, 3, 8, 8).requires_grad_(), floats(count, 3, 8, 8).double().requires_grad_()
        sparse.zero_grad()
        exact.zero_grad()
        (sparse(found_x) - 1).square().sum().backward()
        (exact(exact_x) - 1).square().sum().backward()
        assert_near(found_x.grad, exact_x.grad, 1e-3)
        assert_same_gradients(sparse, exact, mask, 1e-3)
    for key, value in exact.named_buffers():
        assert_near(sparse.get_buffer(key), value, 1e-4)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=1e-3), lambda p: torch.optim.AdamW(p, lr=1e-2),
])  # fmt: skip
def test_fifty_steps(make):
    """A smooth network in float32, dense and sparse, from the same point: they stay together."""
    torch.manual_seed(0)
    net = spoken(Residual(Softly).train())
    net.left.bias.requires_grad_(False)  # before a normalisation: its gradient is rounding, which Adam makes large
    mask = random_mask(net, 0.8)
    dense = masked(net, mask)
    optimizer = make(dense.parameters())
    dp.hold(dense, optimizer, mask)
    sparse, moved = dp.sparsify(net, mask, floats(1, 3, 8, 8), make(net.parameters()), layers="sparse")
    losses = []
    for step in range(50):
        x, y = floats(13, 3, 8, 8, seed=step % 2), torch.arange(13) % 4
        for model, used in ((dense, optimizer), (sparse, moved)):
            used.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            used.step()
            losses.append(loss.item())
    assert losses[-1] < losses[1] - 0.1
    assert losses[-1] == pytest.approx(losses[-2], abs=1e-3)
    back = dp.densify(sparse)
    assert removed_are_zero(back, mask)
    dense.eval()
    back.eval()
    assert_near(back(floats(5, 3, 8, 8)), dense(floats(5, 3, 8, 8)), 1e-2)


def test_dropout_draws_the_random_numbers_of_the_dense_network():
    net = convnet().train()
    mask = random_mask(net, 0.5)
    sparse, dense = dp.sparsify(net, mask, floats(2, 3, 8, 8), layers="sparse"), masked(net, mask)
    outputs = []
    for model in (sparse, dense):
        torch.manual_seed(3)
        outputs.append(model(floats(9, 3, 8, 8)))
        outputs.append(torch.rand(1))
    assert_near(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 9), nn.Linear(9, 4)

    def forward(self, x):
        return self.b(F.dropout(torch.relu(self.a(x)), 0.5, self.training))


def test_dropout_as_a_function_follows_the_mode():
    net = FunctionalDropout()
    mask = random_mask(net, 0.3)
    sparse, dense = dp.sparsify(net, mask, floats(1, 8), layers="sparse"), masked(net, mask)
    for training in (True, False):
        outputs = []
        for model in (sparse.train(training), dense.train(training)):
            torch.manual_seed(1)
            outputs.append(model(floats(9, 8)))
        assert_near(outputs[0], outputs[1])
    assert isinstance(dp.densify(sparse), FunctionalDropout)
    assert same(dp.densify(sparse).state_dict(), dense.state_dict())


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
@pytest.mark.parametrize("name", [*NETS, "mlp", "transformer", "recurrent"])
def test_there_and_back_bit_for_bit(name):
    makes = {**NETS, "mlp": mlp, "transformer": Transformer, "recurrent": Recurrent}
    net = makes[name]()
    example = {"mlp": floats(2, 6), "transformer": tokens(2)[0], "recurrent": sequences(2)[0]}.get(
        name, floats(2, 3, 8, 8)
    )
    mask = random_mask(net, 0.7)
    before = copy.deepcopy(net.state_dict())
    sparse = dp.sparsify(net, mask, example)
    assert [key for key, _ in sparse.named_parameters()] == [key for key, _ in net.named_parameters()]
    assert [key for key in sparse.state_dict() if not key.endswith("_pattern")] == list(before)
    back = dp.densify(sparse)
    assert type(back) is type(net)
    assert same(back.state_dict(), masked(net, mask).state_dict())
    assert same(net.state_dict(), before)
    again = dp.densify(dp.sparsify(back, mask, example))
    assert same(again.state_dict(), back.state_dict())


def test_state_dict_round_trip():
    net = spoken(Residual().eval())
    mask = random_mask(net, 0.8)
    first = dp.sparsify(net, mask, floats(1, 3, 8, 8), layers="sparse")
    second = dp.sparsify(spoken(Residual().eval(), seed=9), mask, floats(1, 3, 8, 8), layers="sparse")
    x = floats(9, 3, 8, 8)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert sum(v.numel() for v in first.parameters()) < 0.4 * sum(v.numel() for v in net.parameters())


def test_a_copy_trains_by_itself():
    net = spoken(Residual().train())
    sparse = dp.sparsify(net, random_mask(net, 0.8), floats(2, 3, 8, 8))
    before = copy.deepcopy(sparse.state_dict())
    other = copy.deepcopy(sparse)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(floats(5, 3, 8, 8)).sum().backward()
    optimizer.step()
    assert same(sparse.state_dict(), before)
    assert not same(other.state_dict(), before)
    assert all(weight.grad is None for weight in sparse.parameters())
    assert same(dp.densify(other).state_dict(), dp.densify(copy.deepcopy(other)).state_dict())


def test_modes_of_single_modules():
    """A frozen normalisation keeps its statistics, there and back."""
    net = spoken(Residual().train())
    net.norm.eval()
    mask = random_mask(net, 0.5)
    sparse, dense = dp.sparsify(net, mask, floats(2, 3, 8, 8), layers="sparse"), masked(net, mask)
    assert [module.training for module in (sparse.norm, sparse.left_norm)] == [False, True]
    x = floats(9, 3, 8, 8)
    assert_near(sparse(x), dense(x))
    for key, value in dense.named_buffers():
        assert_near(sparse.get_buffer(key), value)
    assert torch.equal(sparse.norm.running_mean, net.norm.running_mean)
    assert not dp.densify(sparse).norm.training
    sparse.eval()
    assert not any(module.training for module in sparse.modules())


def test_frozen_parameters_get_no_gradient():
    net = spoken(Residual().train())
    mask = random_mask(net, 0.5)
    for weight in (net.stem.weight, net.norm.weight, net.left.bias):
        weight.requires_grad_(False)
    sparse, dense = dp.sparsify(net, mask, floats(2, 3, 8, 8), layers="sparse"), masked(net, mask)
    sparse(floats(9, 3, 8, 8)).square().sum().backward()
    dense(floats(9, 3, 8, 8)).square().sum().backward()
    assert_same_gradients(sparse, dense, mask, 1e-3)
    assert sparse.get_parameter("stem.weight").grad is None


class Odd(nn.Module):
    """Layers that the kernels do not know, and one that they do."""

    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(3, 6, 3, padding=1, groups=3)
        self.reflect = nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect")
        self.even = nn.Conv2d(6, 6, 2, padding="same")
        self.up = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.known = nn.Conv2d(6, 4, 3, padding="same", dilation=2)
        self.lines = nn.Conv1d(4, 5, 3)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight  # tied

    def forward(self, x):
        x = self.known(F.gelu(self.up(self.even(self.reflect(self.depthwise(x))))))
        return self.second(F.gelu(self.first(self.lines(x.flatten(2)).mean(2))))


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_other_layers_are_held_at_zero():
    net = Odd()
    mask = {name: floats(*weight.shape) > 0 for name, weight in net.named_parameters() if weight.dim() > 1}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sparse, moved = dp.sparsify(net, mask, floats(1, 3, 6, 6), optimizer, layers="sparse")
    assert [path for path, module in sparse.named_modules() if isinstance(module, SparseLayer)] == ["known"]
    dense = masked(net, mask)
    held = torch.optim.SGD(dense.parameters(), lr=0.05, momentum=0.9)
    dp.hold(dense, held, mask)
    for step in range(3):
        for model, used in ((sparse, moved), (dense, held)):
            used.zero_grad()
            model(floats(9, 3, 6, 6, seed=step)).square().sum().backward()
            used.step()
    back = dp.densify(sparse)
    assert removed_are_zero(back, mask)
    assert back.first.weight is back.second.weight
    for key, value in back.state_dict().items():
        assert_near(value, dense.state_dict()[key], 1e-4)


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
@pytest.mark.parametrize("make", [Transformer, Recurrent])
def test_networks_of_other_operators(make):
    net = make().eval()
    x = (tokens if make is Transformer else sequences)()[0]
    mask = random_mask(net, 0.5)
    sparse, dense = dp.sparsify(net, mask, x[:1], layers="sparse"), masked(net, mask)
    assert_near(sparse(x), dense(x))
    sparse(x).square().sum().backward()
    dense(x).square().sum().backward()
    for key, weight in dense.named_parameters():
        if weight.grad is not None and sparse.get_parameter(key).shape == weight.shape and key not in mask:
            assert_near(sparse.get_parameter(key).grad, weight.grad, 1e-4, 1e-2)


class Branching(nn.Module):
    """Control flow by the data: torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        x = self.a(x) if float(x.detach().sum()) > 0 else self.b(x)
        return self.head(torch.relu(x).mean((2, 3)))


def test_networks_that_cannot_be_traced():
    net = Branching()
    mask = random_mask(net, 0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sparse, moved = dp.sparsify(net, mask, floats(1, 3, 6, 6), optimizer)
    dense = masked(net, mask)
    for x in (floats(5, 3, 6, 6).abs(), -floats(5, 3, 6, 6).abs(), floats(1, 3, 6, 6).abs()):
        sparse.zero_grad()
        dense.zero_grad()
        assert_near(sparse(x), dense(x))
        sparse(x).sum().backward()
        dense(x).sum().backward()
        assert_same_gradients(sparse, dense, mask)
    moved.step()
    assert removed_are_zero(dp.densify(sparse), mask)


def test_a_network_of_one_layer():
    for net, x in ((nn.Linear(6, 5), floats(4, 6)), (nn.Conv2d(3, 4, 3), floats(4, 3, 6, 6))):
        mask = {"weight": floats(*net.weight.shape) > 0}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        sparse, moved = dp.sparsify(net, mask, x[:1], optimizer)
        assert_near(sparse(x), masked(net, mask)(x))
        assert_near(sparse(x[0]), masked(net, mask)(x[0]))
        sparse(x).sum().backward()
        moved.step()
        dense, _ = dp.densify(sparse, moved)
        assert type(dense) is type(net)
        assert removed_are_zero(dense, mask)


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (3, 3, 8, 8), (9, 3, 13, 6), (130, 3, 8, 8), (0, 3, 8, 8)])
def test_inputs_of_other_sizes_than_the_example(shape):
    net = spoken(Residual().eval())
    mask = random_mask(net, 0.8)
    sparse, exact = dp.sparsify(net, mask, floats(2, 3, 11, 11), layers="sparse"), masked(net, mask).double()
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            assert_near(sparse(floats(*shape)), exact(floats(*shape).double()))


def test_features_of_more_dimensions_than_the_example():
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    mask = random_mask(net, 0.5)
    sparse, dense = dp.sparsify(net, mask, floats(1, 6), layers="sparse"), masked(net, mask)
    for shape in ((6,), (3, 6), (3, 7, 6), (2, 3, 7, 6)):
        assert_near(sparse(floats(*shape)), dense(floats(*shape)))
    image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    kept = random_mask(image, 0.5)
    assert_near(dp.sparsify(image, kept, floats(1, 3, 6, 6))(floats(3, 6, 6)), masked(image, kept)(floats(3, 6, 6)))


def test_inputs_that_do_not_fit_are_errors():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)).eval()
    sparse = dp.sparsify(net, random_mask(net, 0.5), floats(1, 3, 6, 6), layers="sparse")
    for learns in (True, False):
        for count in (1, 9):
            with torch.set_grad_enabled(learns):
                for size in ((2, 6, 6), (3, 8, 8), (3, 3, 3), (3, 2, 6)):  # channels, features, pooling, kernel
                    with pytest.raises(ValueError, match="was given|does not fit"):
                        sparse(floats(count, *size))
    for arguments, named in (((floats(1, 3, 6, 6), 1), {}), ((floats(1, 3, 6, 6),), {"extra": 1})):
        with pytest.raises(TypeError, match="the network takes"):
            sparse(*arguments, **named)


def test_networks_that_are_refused():
    for dtype in (torch.float64, torch.bfloat16):
        net = nn.Sequential(nn.Linear(4, 3)).to(dtype)
        with pytest.raises(ValueError, match=f"compute in float32, but 0.weight is {dtype}"):
            dp.sparsify(net, {"0.weight": torch.ones(3, 4, dtype=torch.bool)}, floats(1, 4).to(dtype))
    net = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="layers must be 'auto' or 'sparse', got 'dense'"):
        dp.sparsify(net, {"0.weight": torch.ones(3, 4, dtype=torch.bool)}, floats(1, 4), layers="dense")
    with pytest.raises(TypeError, match="densify takes a network that sparsify made, got Sequential"):
        dp.densify(net)


def test_one_value_for_each_channel_in_training_is_an_error():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
    sparse = dp.sparsify(net, random_mask(net, 0.5), floats(2, 4), layers="sparse")
    for model in (net, sparse):
        with pytest.raises(ValueError, match="(?i)more than (1|one) value"):
            model(floats(1, 4))
    assert sparse(floats(2, 4)).shape == (2, 3)


def test_a_collapsed_network_trains_its_biases():
    torch.manual_seed(
        0
    )  # normalising a constant makes rounding 300 times larger, for some weights above the tolerance
    net = spoken(Residual(Softly).train())
    mask = random_mask(net, 0.0)
    mask["left.weight"] = torch.zeros_like(mask["left.weight"])
    mask["right.weight"] = torch.zeros_like(mask["right.weight"])
    sparse, dense = dp.sparsify(net, mask, floats(2, 3, 8, 8), layers="sparse"), masked(net, mask)
    assert sparse.get_parameter("left.weight").shape == (0,)
    for model in (sparse, dense):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(floats(9, 3, 8, 8)).square().sum().backward()
        optimizer.step()
    assert_same_gradients(sparse, dense, mask, 1e-3)
    assert removed_are_zero(dp.densify(sparse), mask)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_contexts(context):
    net = spoken(Residual().eval())
    mask = random_mask(net, 0.8)
    dense = masked(net, mask)
    with context():
        sparse = dp.sparsify(net, mask, floats(1, 3, 8, 8), layers="sparse")
        for count in (1, 9):
            assert_near(sparse(floats(count, 3, 8, 8)).float(), dense(floats(count, 3, 8, 8)).float(), 0.02)
    with torch.autocast("cpu"):
        sparse(floats(9, 3, 8, 8).bfloat16()).float().square().sum().backward()  # still to be trained
    assert all(weight.grad is not None for weight in sparse.parameters())


def test_the_same_bits_every_time():
    torch.set_num_threads(2)
    net = spoken(Residual().train())
    mask = random_mask(net, 0.5)
    runs = []
    for _ in range(3):
        sparse = dp.sparsify(net, mask, floats(2, 3, 8, 8), layers="sparse")
        optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            sparse(floats(50, 3, 8, 8, seed=step)).square().sum().backward()
            optimizer.step()
        runs.append(sparse.state_dict())
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


def test_several_threads_at_once():
    net = spoken(Residual().eval())
    sparse = dp.sparsify(net, random_mask(net, 0.8), floats(1, 3, 8, 8), layers="sparse")
    inputs = [floats(1 if number % 2 else 9, 3, 8, 8, seed=number) for number in range(4)]
    with torch.no_grad():
        expected = [sparse(x) for x in inputs]
    wrong = []

    def work(number):
        try:
            with torch.no_grad():
                agree = [torch.equal(sparse(inputs[number]), expected[number]) for _ in range(50)]
            wrong.extend([number] * agree.count(False))
        except Exception as error:  # what a thread raises is lost otherwise
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")  # torch's own
def test_inside_a_compiled_network():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return torch.tanh(self.inner(x * 2))

    net = spoken(Residual().eval())
    mask = random_mask(net, 0.8)
    sparse = dp.sparsify(net, mask, floats(1, 3, 8, 8), layers="sparse")
    compiled = torch.compile(Around(sparse), backend="eager")
    x = floats(9, 3, 8, 8)
    assert_near(compiled(x), Around(masked(net, mask))(x))
    compiled(x).sum().backward()
    assert sparse.get_parameter("stem.weight").grad is not None


class Constants(nn.Module):
    """Tensors that are no parameters, one with a batch of one, and names like those of regions."""

    def __init__(self):
        super().__init__()
        self.region_0, self.conv = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.place = nn.Parameter(torch.randn(1, 4, 6, 6))
        self.factor = torch.tensor([2.0, 3.0]).view(1, 2, 1, 1)
        self.register_buffer("shift", torch.randn(1, 4, 6, 6), persistent=False)

    def forward(self, x):
        return self.conv(self.region_0(x) + self.place + self.shift) * self.factor + torch.ones(2, 1, 1)


class InPlace(nn.Module):
    """Writes into a value after a layer has read it."""

    def __init__(self):
        super().__init__()
        self.layer, self.clip = nn.Linear(4, 4), nn.Hardtanh(-0.1, 0.1, inplace=True)

    def forward(self, x):
        y = x * 2
        read = self.layer(y)
        return read + self.clip(y)


class Reads(nn.Module):
    """Uses the weight of a layer without calling the layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.other(x), self.layer.weight * 2) + self.layer(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
@pytest.mark.parametrize("filled_in", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"), [(Constants, (3, 6, 6)), (InPlace, (4,)), (Reads, (4,)), (Encoder, (5, 8))]
)
def test_networks_that_do_unusual_things(make, shape, filled_in):
    net = make().eval()
    mask = {name: floats(*p.shape) > 0 for name, p in net.named_parameters() if p.dim() > 1 and "place" not in name}
    sparse, dense = dp.sparsify(net, mask, floats(1, *shape), layers="sparse"), masked(net, mask)
    assert any(isinstance(module, SparseLayer) for module in sparse.modules())
    if filled_in and isinstance(sparse, SparseNetwork):
        sparse.fill_in()
        sparse = copy.deepcopy(sparse)
    for count in (1, 2, 9):
        for learns in (True, False):
            with torch.set_grad_enabled(learns):
                x = floats(count, *shape)
                assert_near(sparse(x.clone()), dense(x.clone()))
    assert same(dp.densify(sparse).state_dict(), dense.state_dict())


def test_modules_that_write_in_place_stay_as_they_are():
    """The graph calls twins of them that do not; torch's way calls the network's own code, and them."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardtanh(-0.1, 0.1, inplace=True), nn.Flatten(), nn.Linear(64, 2))
    mask = {"0.weight": floats(4, 3, 3, 3) > 0, "3.weight": floats(2, 64) > 0}
    sparse = dp.sparsify(net, mask, floats(1, 3, 6, 6), layers="sparse")
    for _ in range(2):
        assert sparse.get_submodule("1").inplace
        assert_near(sparse(floats(5, 3, 6, 6)), masked(net, mask)(floats(5, 3, 6, 6)))
        sparse.fill_in()


def test_values_are_given_up_after_their_last_use():
    seen = []

    def doubled(x):
        result = 2 * x
        seen.append(weakref.ref(result))
        return result

    def alive(x):
        return x, [each() is not None for each in seen]

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    twice = graph.call_function(doubled, (x,))
    both = graph.call_function(torch.add, (graph.call_function(doubled, (twice,)), twice))
    graph.output(graph.call_function(alive, (both,)))
    net = dp.sparsify(nn.Sequential(nn.Linear(3, 2)), {"0.weight": floats(2, 3) > 0}, floats(1, 3), layers="sparse")
    found, lives = made_of(net).graphs.run(net, graph, [torch.ones(3)])
    assert found.tolist() == [6, 6, 6]
    assert lives == [False, False]


Pair = namedtuple("Pair", ["left", "right"])


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, *, y=None, scale=2.0):
        return {"a": self.a(x), "more": [self.b(x) * scale, Pair(x, (x,))]}


def test_structured_inputs_and_outputs():
    net = Structured()
    mask = random_mask(net, 0.3)
    sparse, dense = dp.sparsify(net, mask, floats(1, 4), layers="sparse"), masked(net, mask)
    found, expected = sparse(floats(3, 4), scale=3.0), dense(floats(3, 4), scale=3.0)
    assert type(found) is dict
    assert type(found["more"]) is list
    assert type(found["more"][1]) is Pair
    assert type(found["more"][1].right) is tuple
    assert_near(found["a"], expected["a"])
    assert_near(found["more"][0], expected["more"][0])


def test_masks_of_biases_are_held():
    net = nn.Sequential(nn.Linear(4, 4))
    mask = {"0.weight": floats(4, 4) > 0, "0.bias": torch.tensor([True, False, True, False])}
    sparse, optimizer = dp.sparsify(net, mask, floats(1, 4), torch.optim.SGD(net.parameters(), lr=0.1))
    sparse(floats(5, 4)).square().sum().backward()
    optimizer.step()
    dense = dp.densify(sparse)
    assert removed_are_zero(dense, mask)
    assert dense[0].bias[mask["0.bias"]].all()


class Shared(nn.Module):
    """One layer under three names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.again, self.both = self.first, nn.Sequential(self.first, nn.BatchNorm2d(4))

    def forward(self, x):
        return self.both(self.again(self.first(x)))


def test_a_shared_layer_keeps_its_momentum():
    net = Shared().train()
    mask = {"first.weight": floats(4, 4, 3, 3) > 0}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    held = dp.hold(net, optimizer, mask)
    net(floats(5, 4, 6, 6)).square().sum().backward()
    optimizer.step()
    held.release()
    sparse, moved = dp.sparsify(net, mask, floats(1, 4, 6, 6), optimizer, layers="sparse")
    assert moved.state[sparse.get_parameter("again.weight")]["momentum_buffer"].dim() == 1
    assert_near(sparse(floats(9, 4, 6, 6)), net(floats(9, 4, 6, 6)))
    dense, back = dp.densify(sparse, moved)
    assert dense.first is dense.again is dense.both[0]
    expected = optimizer.state[net.first.weight]["momentum_buffer"]
    assert torch.equal(back.state[dense.first.weight]["momentum_buffer"], expected)
    assert [key for key in sparse.state_dict() if not key.endswith("_pattern")] == list(net.state_dict())


class AnyNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, *inputs, **_):
        return sum(self.layer(x) for x in inputs)


def test_several_inputs():
    net = AnyNumber()
    mask = random_mask(net, 0.3)
    sparse, dense = dp.sparsify(net, mask, (floats(1, 4), floats(1, 4))), masked(net, mask)
    for count in (1, 3):
        assert_near(sparse(*[floats(9, 4)] * count), dense(*[floats(9, 4)] * count))
    bilinear = Sum().eval()
    kept = random_mask(bilinear, 0.3)
    sparse, dense = dp.sparsify(bilinear, kept, (floats(1, 4), floats(1, 3))), masked(bilinear, kept)
    for first, second in ((9, 9), (1, 1), (9, 1), (1, 9)):  # also where torch stretches a batch of one
        with torch.no_grad():
            assert_near(sparse(floats(first, 4), y=floats(second, 3)), dense(floats(first, 4), floats(second, 3)))


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, x, y):
        return torch.relu(self.a(x) + self.b(y))


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
def test_an_optimiser_of_a_part_of_the_network():
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 4))
    mask = {"0.weight": floats(4, 2, 3, 3) > 0, "2.weight": floats(4, 4) > 0}
    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)
    sparse, moved = dp.sparsify(net, mask, floats(1, 4, 3, 3), optimizer)
    before = sparse.get_parameter("0.weight").clone()
    sparse(floats(5, 4, 3, 3)).square().sum().backward()
    moved.step()
    assert torch.equal(sparse.get_parameter("0.weight"), before)
    assert not before[~mask["0.weight"]].any()
    assert not sparse.get_parameter("0.weight").grad[~mask["0.weight"]].any()


def test_a_network_that_was_made_double_says_so():
    net = nn.Sequential(nn.Linear(4, 3)).eval()
    sparse = dp.sparsify(net, random_mask(net, 0.3), floats(1, 4), layers="sparse").double()
    for count in (1, 9):
        for learns in (True, False):
            with torch.set_grad_enabled(learns), pytest.raises(ValueError, match="compute in float32 on the CPU"):
                sparse(floats(count, 4).double())
    sparse.float()
    assert sparse(floats(1, 4)).shape == (1, 3)


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
def test_layers_with_hooks_stay_as_they_are():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    mask = random_mask(net, 0.3)
    sparse = dp.sparsify(net, mask, floats(1, 4))
    before = len(seen)
    assert_near(sparse(floats(3, 4)), masked(nn.Sequential(*copy.deepcopy(net)), mask)(floats(3, 4)))
    assert len(seen) > before
    assert isinstance(sparse[1], SparseLayer)


def test_after_compaction():
    torch.manual_seed(0)
    net = spoken(Residual().train())
    mask = random_mask(net, 0.9)
    small = dp.compact(net, mask, floats(1, 3, 8, 8), keep="trainable")
    sparse = dp.sparsify(small, small.mask, floats(1, 3, 8, 8), layers="sparse")
    x = floats(9, 3, 8, 8)
    assert_near(sparse.eval()(x), masked(net, mask).eval()(x), 1e-4)


@pytest.mark.parametrize("smaller", [False, True])
def test_paper_networks_run_in_one_region(smaller):
    for name in ("alexnet", "vgg16", "resnet18"):
        net = dp.models.build(name, classes=4, width=0.125).eval()
        mask = random_mask(net, 0.9)
        if smaller:
            net = dp.compact(net, mask, floats(1, 3, 32, 32))
            mask = net.mask
        sparse = dp.sparsify(net, mask, floats(1, 3, 32, 32), layers="sparse")
        assert len(sparse.regions) == 1, name
        assert sum(node.op != "placeholder" for node in sparse.graph.nodes) == 2, name  # the region and the output
        exact = dp.densify(sparse).double()
        for count in (1, 9):
            with torch.no_grad():
                assert_near(sparse(floats(count, 3, 32, 32)), exact(floats(count, 3, 32, 32).double()), 1e-4)
