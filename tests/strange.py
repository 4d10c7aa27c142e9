"""Networks that do strange things in their forward pass: noise, counters, branches, tied weights, several outputs."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

WIDTH = 6

QUIRKS = (
    "relu tanh norm dropout drop noise noise_like normal_ branch numpy_branch generator count mean copied calls "
    "scale remembered mode batch_size asked masked tied weight_norm transposed added_in_place cut_in_place "
    "into_view into_input no_grad detached skip twice lazy"
).split()


class Strange(nn.Module):
    """An embedding of its input in layers, between which it does what its plan says."""

    def __init__(self, plan, output, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.plan, self.output = plan, output
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH, eps=0.1), nn.Dropout(0.3)
        for name, value in (
            ("count", torch.zeros(())),
            ("mean", torch.zeros(WIDTH)),
            ("last_seen", torch.ones(WIDTH)),
        ):
            self.register_buffer(name, value)
        self.scale, self.calls, self.seen, self.table = 1.5, 0, [], None
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x, mask=None, flag=False):
        if "into_input" in self.plan:
            x.add_(1)
        h = self.first(x)
        for number, name in enumerate(self.plan):
            h = getattr(self, f"do_{name}", self.do_plain)(h, x, name, mask, flag)
            if number % 2 == 0:
                h = self.layers[number // 2 % 3](h)
        out = self.last(h)
        return {"one": lambda: out, "two": lambda: (out, h), "named": lambda: {"out": out, "rest": [h.sum(1), x]}}[
            self.output
        ]()

    def do_plain(self, h, x, name, mask, flag):
        return {
            "relu": lambda: torch.relu(h), "tanh": h.tanh, "norm": lambda: self.norm(h),
            "drop": lambda: self.drop(h), "dropout": lambda: F.dropout(h, 0.4, self.training),
            "noise": lambda: h + 0.1 * torch.randn(WIDTH), "noise_like": lambda: h + 0.1 * torch.randn_like(h),
            "normal_": lambda: h + torch.empty(WIDTH).uniform_(), "scale": lambda: h * self.scale,
            "generator": lambda: h + torch.rand(WIDTH, generator=self.generator),
            "branch": lambda: h * 2 if random.random() < 0.5 else h,
            "numpy_branch": lambda: h - 1 if np.random.rand() < 0.5 else h,
            "mode": lambda: h if self.training else h * 0.5, "batch_size": lambda: h + 1 if len(x) > 4 else h,
            "asked": lambda: h * 3 if flag else h, "masked": lambda: h if mask is None else h * mask,
            "tied": lambda: F.linear(h, self.layers[0].weight),
            "weight_norm": lambda: h / self.layers[1].weight.norm(),
            "transposed": lambda: h @ self.layers[2].weight.t(), "detached": lambda: h + h.detach(),
            "into_input": lambda: h, "added_in_place": lambda: h.clone().add_(1).relu_(),
            "skip": lambda: h + self.layers[2](h), "twice": lambda: self.layers[0](self.layers[0](h)),
        }[name]()  # fmt: skip

    def do_count(self, h, *_):
        self.count += 1
        return h * self.count.clone()

    def do_mean(self, h, *_):
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.mean

    def do_copied(self, h, *_):
        out = h * self.last_seen.clone()
        self.last_seen.copy_(h.detach().mean(0))
        return out

    def do_calls(self, h, *_):
        self.calls += 1
        return h + self.calls

    def do_remembered(self, h, *_):
        self.seen.append(1.0)
        return h + len(self.seen)

    def do_cut_in_place(self, h, *_):
        h = h * 1.0
        h[:, 0] = 0
        return h

    def do_into_view(self, h, *_):
        h = h * 1.0
        h.view(-1).mul_(2)
        h.t()[1].add_(1)
        return h

    def do_no_grad(self, h, *_):
        with torch.no_grad():
            gate = torch.sigmoid(self.layers[1](h))
        return h * gate

    def do_lazy(self, h, *_):
        if self.table is None:
            self.table = torch.arange(1.0, WIDTH + 1)
        return h * self.table


plans = st.lists(st.sampled_from(QUIRKS), min_size=1, max_size=5)
outputs = st.sampled_from(["one", "two", "named"])
