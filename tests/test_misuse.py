"""What people pass by mistake: each entry point answers with an error that teaches, and nothing has happened."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import driveprune as dp
from tests.nets import batch, mlp

X, Y = batch()
MASK = dp.prune(mlp(), method="random", sparsity=0.5)


def pruned():
    net = mlp()
    dp.apply(net, MASK)
    return net


def made_for_inference():
    with torch.inference_mode():
        return mlp()


NETWORKS = {
    "meta": (lambda: mlp().to("meta"), "0.weight has no values .it is on the meta device.: build the model for real"),
    "traced": (
        lambda: torch.jit.trace(mlp(), X),
        "must be a plain torch.nn.Module.*TopLevelTracedModule.*was made",
    ),
    "scripted": (lambda: torch.jit.script(mlp()), "must be a plain torch.nn.Module.*RecursiveScriptModule"),
    "inference": (made_for_inference, "0.weight was made in torch.inference_mode.*build or load the model outside"),
    "class": (lambda: nn.Linear, "model must be a torch.nn.Module, got <class .*Linear"),
    "weights": (lambda: mlp().state_dict(), "model must be a torch.nn.Module, got a OrderedDict"),
    "mask": (lambda: MASK, "model must be a torch.nn.Module, got a "),
}
ENTRIES = {
    "prune": lambda net, _: dp.prune(net, [(X, Y)], sparsity=0.5),
    "Pruner": lambda net, _: dp.Pruner(net, None, [(X, Y)], sparsity=0.5, epochs=9, steps_per_epoch=1),
    "fit": lambda net, _: dp.fit(net, (X, Y), sparsity=0.5, epochs=9, progress=False),
    "preview": lambda net, _: dp.preview(net, [(X, Y)], sparsity=0.5),
    "prunable": lambda net, _: dp.prunable(net),
    "mask_of": lambda net, _: dp.mask_of(net),
    "apply": lambda net, _: dp.apply(net, MASK),
    "hold": lambda net, _: dp.hold(net, None, MASK),
    "save": lambda net, path: dp.save(path, net, MASK),
    "load": lambda net, path: dp.load(path, net),
    "compact": lambda net, _: dp.compact(net, MASK, X[:1]),
    "sparsify": lambda net, _: dp.sparsify(net, MASK, X[:1]),
    "bench": lambda net, _: dp.bench(net, MASK, X[:1]),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", NETWORKS)
def test_what_is_no_network_with_weights_is_named(kind, entry, tmp_path):
    build, message = NETWORKS[kind]
    path = tmp_path / "net.safetensors"
    if entry == "load":
        dp.save(path, pruned(), MASK)
    with pytest.raises(dp.OptionError, match=message):
        ENTRIES[entry](build(), path)
    assert path.exists() is (entry == "load")


def test_swapped_arguments_are_told_the_order(tmp_path):
    net, path = pruned(), tmp_path / "net.safetensors"
    dp.save(path, net, MASK)
    for call, message in (
        (lambda: dp.load(net, path), r"the order is load\(path, model\)"),
        (lambda: dp.save(net, path, MASK), r"the order is save\(path, model, mask\)"),
        (lambda: dp.prune([(X, Y)], net, sparsity=0.5), r"the order is prune\(model, batches\)"),
        (lambda: dp.fit((X, Y), net, sparsity=0.5), r"the order is fit\(model, data\)"),
        (lambda: dp.apply(MASK, net), "model must be a torch.nn.Module, got a "),
        (lambda: dp.compact(net, X[:1], MASK), "mask must be parameter name -> boolean tensor, .* got a Tensor"),
        (lambda: dp.sparsify(net, X[:1], MASK), "mask must be parameter name -> boolean tensor, .* got a Tensor"),
        (lambda: dp.sparsity(net), "mask must be parameter name -> boolean tensor, .* got a Sequential"),
    ):
        with pytest.raises(dp.OptionError, match=message):
            call()


class Criterion(nn.Module):
    """A loss of somebody's own, in the way of torch."""

    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels)


class Smooth(nn.CrossEntropyLoss):
    """One of torch's, changed."""

    def forward(self, input, target):
        return super().forward(input, target)


LOSSES = {
    "torch's": nn.CrossEntropyLoss(),
    "torch's class": nn.CrossEntropyLoss,
    "torch's function": F.cross_entropy,
    "a partial of torch's": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "derived from torch's": Smooth(),
    "a module": Criterion(),
    "a function": lambda output, target: F.cross_entropy(output.float(), target),
    "of one argument": lambda model: 0,
    "a name": "cross_entropy",
}
LOOKING = {
    "prune": lambda data, **o: dp.prune(mlp(), data, sparsity=0.5, **o),
    "Pruner": lambda data, **o: dp.Pruner(
        mlp(), None, data, method="snip", sparsity=0.5, epochs=9, steps_per_epoch=1, **o
    ),
    "fit": lambda data, **o: dp.fit(mlp(), data, method="snip", sparsity=0.5, epochs=2, progress=False, **o),
    "preview": lambda data, **o: dp.preview(mlp(), data, sparsity=0.5, **o),
}


@pytest.mark.parametrize("entry", LOOKING)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_of_outputs_and_targets_is_told_how_to_be_written(kind, entry):
    message = r"loss must be a function of \(model, batch\).*write loss=lambda model, batch: criterion\(model\(batch"
    with pytest.raises(ValueError, match=message):
        LOOKING[entry]([(X, Y)], loss=LOSSES[kind])


@pytest.mark.parametrize(
    "loss",
    [
        lambda net, data: F.cross_entropy(net(data[0]), data[1]),
        lambda *both: F.cross_entropy(both[0](both[1][0]), both[1][1]),
        functools.partial(lambda model, xy, scale: scale * F.cross_entropy(model(xy[0]), xy[1]), scale=2.0),
    ],
)
def test_a_loss_of_model_and_batch_may_be_written_in_any_way(loss):
    assert dp.prune(mlp(), [(X, Y)], sparsity=0.5, loss=loss)


class Stream(IterableDataset):
    """Examples, one after the other."""

    def __iter__(self):
        return iter(TensorDataset(X, Y))

    def __len__(self):
        return len(X)


SINGLE = {
    "a list": lambda: list(TensorDataset(X, Y)),
    "a zip": lambda: list(zip(X, Y, strict=True)),
    "a loader without batches": lambda: DataLoader(TensorDataset(X, Y), batch_size=None),
    "a stream": Stream,
}


@pytest.mark.parametrize("entry", [entry for entry in LOOKING if entry != "preview"])
@pytest.mark.parametrize("kind", SINGLE)
def test_single_examples_are_no_batches(kind, entry):
    """One example a cut would be scored, and one a step trained; preview says why it leaves methods out."""
    with pytest.raises((ValueError, TypeError), match="single example.*DataLoader"):
        LOOKING[entry](SINGLE[kind]())
