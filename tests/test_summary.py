import torch

import driveprune as dp
from tests.nets import convnet, images


def test_counts_by_layer():
    mask = {"a": torch.tensor([[True, False], [False, False]]), "b": torch.zeros(3, dtype=torch.bool)}
    found = dp.summary(mask)
    assert [(layer.name, layer.shape, layer.weights, layer.kept) for layer in found.layers] == [
        ("a", (2, 2), 4, 1),
        ("b", (3,), 3, 0),
    ]
    assert found.layers[0].density == 0.25
    assert found.sparsity == dp.sparsity(mask) == 1 - 1 / 7
    assert found.effective_sparsity is None
    assert "empty" in str(found)
    assert "1 of 7 weights are kept" in str(found)


def test_with_a_model_it_knows_paths_and_multiply_adds():
    net = convnet()
    mask = {name: torch.ones(w.shape, dtype=torch.bool) for name, w in dp.prunable(net).items()}
    mask["0.weight"][3] = False
    example = images()[0][:1]
    found = dp.summary(mask, net, example)
    assert found.effective_sparsity == dp.effective_sparsity(net, mask, example) > found.sparsity
    assert found.layers[1].effective == 1152 - 16 * 9
    assert found.macs == (216 - 27) * 64 + 1152 * 16 + 256
    assert found.dense_macs == 216 * 64 + 1152 * 16 + 256
    assert "on a path" in str(found)
    assert "multiply-adds" in str(found)


def test_names_with_brackets_are_shown_as_they_are():
    assert "a[b].weight" in str(dp.summary({"a[b].weight": torch.ones(2, dtype=torch.bool)}))
    assert "a[/b]" in str(dp.summary({"a[/b]": torch.ones(2, dtype=torch.bool)}))
