import pytest
import torch

import driveprune as dp
from driveprune.models.width import scaled

COUNTS = [
    (dp.models.alexnet, 10, 23_262_912, 32),
    (dp.models.vgg16, 10, 14_715_584, 32),
    (dp.models.vgg16, 100, 14_761_664, 32),
    (dp.models.vgg16, 200, 14_812_864, 64),
    (dp.models.resnet18, 10, 11_164_352, 32),
    (dp.models.resnet18, 100, 11_210_432, 32),
    (dp.models.resnet18, 200, 11_261_632, 64),
    (dp.models.resnet18, 1000, 11_671_232, 32),
]


@pytest.mark.parametrize(("build", "classes", "count", "size"), COUNTS)
def test_prunable_counts_are_those_of_the_paper(build, classes, count, size):
    net = build(classes)
    assert sum(w.numel() for w in dp.prunable(net).values()) == count
    assert net.eval()(torch.zeros(1, 3, size, size)).shape == (1, classes)


@pytest.mark.parametrize("build", [dp.models.alexnet, dp.models.vgg16, dp.models.resnet18])
def test_width(build):
    counts = [sum(w.numel() for w in dp.prunable(build(width=width)).values()) for width in (0.25, 0.5)]
    assert 3.5 < counts[1] / counts[0] < 4.2
    assert build(7, width=0.01)(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_alexnet_at_other_sizes():
    assert dp.models.alexnet(size=64, width=0.1)(torch.zeros(1, 3, 64, 64)).shape == (1, 10)
    with pytest.raises(ValueError, match="multiple of 16, got 30"):
        dp.models.alexnet(size=30)


def test_the_demo_net():
    net = dp.models.digits_net()
    assert sum(w.numel() for w in dp.prunable(net).values()) == 89_632
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_widths_must_be_positive():
    assert scaled(3, 0.01) == 1
    with pytest.raises(ValueError, match="width must be positive, got 0"):
        dp.models.vgg16(width=0)


@pytest.mark.parametrize("build", [dp.models.vgg16, dp.models.resnet18, dp.models.digits_net])
def test_weights_can_be_drawn_anew(build):
    torch.manual_seed(0)
    net = build(width=0.1)
    before = net.state_dict()["0.weight"].clone()
    torch.manual_seed(0)
    assert torch.equal(build(width=0.1).state_dict()["0.weight"], before)
    net.reset_parameters()
    assert not torch.equal(net.state_dict()["0.weight"], before)
