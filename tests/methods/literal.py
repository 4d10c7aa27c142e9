"""The paper's equations, written down as they stand: explicit mask parameters, two gradients, sorting."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import driveprune as dp


def two_gradients(model, theta, mask, batch, loss=None):
    """∂L(f(θ⊙m; x), y)/∂m and ∂L(f(θ⊙m; x), y)/∂θ by automatic differentiation with respect to both."""
    net = copy.deepcopy(model).train()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    m = {name: kept.to(theta[name].dtype).requires_grad_() for name, kept in mask.items()}
    t = {name: theta[name].detach().clone().requires_grad_() for name in mask}
    rest = {name: p for name, p in net.named_parameters() if name not in mask}
    x, y = batch
    output = functional_call(net, {**rest, **{name: t[name] * m[name] for name in mask}}, (x,))
    value = F.cross_entropy(output, y)
    found = torch.autograd.grad(value, [*m.values(), *t.values()])
    return dict(zip(mask, found[: len(m)], strict=True)), dict(zip(mask, found[len(m) :], strict=True))


def drive_metric(model, theta, mask, batch):
    """z = |S| / Σ|S| with S = θ ⊙ ∂L/∂m ⊙ ∂L/∂θ."""
    by_mask, by_theta = two_gradients(model, theta, mask, batch)
    metric = {name: (theta[name] * by_mask[name] * by_theta[name]).abs() for name in mask}
    total = sum(s.sum() for s in metric.values())
    return {name: s / total for name, s in metric.items()}


def snip_metric(model, theta, mask, batch):
    """z = |∂L/∂m| / Σ|∂L/∂m|."""
    by_mask, _ = two_gradients(model, theta, mask, batch)
    total = sum(g.abs().sum() for g in by_mask.values())
    return {name: g.abs() / total for name, g in by_mask.items()}


def best(scores, mask, count, revive=False):
    """The mask of the `count` best by sorting; ties by position."""
    places = sorted(
        (-float(score), order, name, index)
        for order, name in enumerate(mask)
        for index, score in enumerate(scores[name].reshape(-1).tolist())
        if revive or mask[name].reshape(-1)[index]
    )
    kept = {name: torch.zeros(m.numel(), dtype=torch.bool) for name, m in mask.items()}
    for _, _, name, index in places[:count]:
        kept[name][index] = True
    return {name: kept[name].view(m.shape) for name, m in mask.items()}


def iterate(model, batches, sparsity, cuts, metric, revive=False):
    """N cuts, each on the next batch; after cut n a fraction 1 - (1 - κ)^(n/N) is gone. All masks on the way."""
    theta = {name: w.detach().clone() for name, w in dp.prunable(model).items()}
    mask = {name: torch.ones(w.shape, dtype=torch.bool) for name, w in theta.items()}
    size = sum(w.numel() for w in theta.values())
    masks = []
    for n in range(1, cuts + 1):
        scores = metric(model, theta, mask, batches[(n - 1) % len(batches)])
        reached = sparsity if n == cuts else 1 - (1 - sparsity) ** (n / cuts)
        mask = best(scores, mask, max(1, round((1 - reached) * size)), revive)
        masks.append(mask)
    return masks


def overlap(a, b):
    """Intersection over union of two masks."""
    both = sum(int((a[name] & b[name]).sum()) for name in a)
    either = sum(int((a[name] | b[name]).sum()) for name in a)
    return both / either
