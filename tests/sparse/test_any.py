"""Networks made at random: any operations in any order, with values that several others use."""

import random

import pytest
import torch
from torch import nn

import driveprune as dp
from tests.sparse.literal import assert_near, floats, masked, spoken

KINDS = "conv conv conv norm relu add cat max average dropout same tanh global".split()


class Made(nn.Module):
    """Each step takes one or two earlier values; the last three come out."""

    def __init__(self, seed):
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.steps, self.plan = nn.ModuleList(), []
        values = [floats(1, 3, 9, 7)]
        for _ in range(choose.randint(4, 10)):
            kind, first = choose.choice(KINDS), choose.randrange(len(values))
            shape = values[first].shape
            fitting = [n for n, v in enumerate(values) if v.shape[2:] == shape[2:] and v.shape[1] == shape[1]]
            self.plan.append((kind, first, choose.choice(fitting)))
            self.steps.append(self.step(kind, shape, choose))
            values.append(self.value(self.steps[-1].eval(), self.plan[-1], values).detach())

    @staticmethod
    def step(kind, shape, choose):
        size = choose.choice([1, 3])
        small = min(shape[2:]) < 3
        return {
            "conv": nn.Conv2d(shape[1], choose.choice([2, 3, 4, 9]), size, choose.choice([1, 1, 2]),
                              choose.choice([size // 2, 1]), bias=choose.random() < 0.5),
            "norm": nn.BatchNorm2d(shape[1]), "relu": nn.ReLU(), "dropout": nn.Dropout(0.3), "tanh": nn.Tanh(),
            "max": nn.Identity() if small else nn.MaxPool2d(3, 2, 1),
            "average": nn.Identity() if small else nn.AvgPool2d(3, 2, 1), "global": nn.AdaptiveAvgPool2d(1),
        }.get(kind, nn.Identity())  # fmt: skip

    @staticmethod
    def value(step, planned, values):
        kind, first, second = planned
        if kind == "add":
            return values[first] + values[second]
        return torch.cat([values[first], values[second]], 1) if kind == "cat" else step(values[first])

    def forward(self, x):
        values = [x]
        for step, planned in zip(self.steps, self.plan, strict=True):
            values.append(self.value(step, planned, values))
        return tuple(values[-3:])


def check(seed):
    net = spoken(Made(seed).eval(), seed)
    mask = {name: floats(*p.shape, seed=seed) > 0.3 for name, p in net.named_parameters() if p.dim() == 4}
    sparse, exact = dp.sparsify(net, mask, floats(1, 3, 9, 7), layers="sparse"), masked(net, mask).double()
    for count in (1, 2, 11):
        x = floats(count, 3, 9, 7, seed=seed)
        for learns in (True, False):
            with torch.set_grad_enabled(learns):
                for found, expected in zip(sparse(x), exact(x.double()), strict=True):
                    assert_near(found, expected, 5e-5)
    if [kind for kind, _, _ in net.plan].count("dropout") > 1:
        return  # side by side they may draw in another order
    outputs, models = [], (sparse.train(), masked(net, mask).train())
    for model in models:
        torch.manual_seed(1)  # dropout draws the same
        outputs.append(model(floats(11, 3, 9, 7)))
    for found, expected in zip(*outputs, strict=True):
        assert_near(found, expected, 1e-3)
    for name, value in models[1].named_buffers():
        assert_near(sparse.get_buffer(name), value, 1e-3)


@pytest.mark.parametrize("seed", range(40))
def test_the_same_function_and_statistics(seed):
    check(seed)


@pytest.mark.slow
def test_many_more():
    for seed in range(40, 1000):
        check(seed)
