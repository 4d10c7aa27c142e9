"""Does `layers="auto"` keep a network from becoming slower? Networks in the styles of others, dense against auto.

python benchmarks/auto.py                      # about 15 minutes on 2 cores
python benchmarks/auto.py --sparsity 0.98 --seconds 3 --threads 1

The networks are small ones in the styles of MobileNet, squeeze-and-excitation, RegNet, ConvNeXt, DenseNet, and of
timm's normalisations that have an activation inside; masks are random. Dense is the ordinary network, zeros in place,
in the same process; both run in turn, round after round. A ratio is the time of the dense network as a multiple of
that of auto: 1 where auto stays with torch, more where the sparse kernels pay. The limit is 0.97; what misses it is
measured once more, for longer, because on a shared machine single comparisons do.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from functools import partial

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import driveprune as dp

LIMIT = 0.97


class NormAct(nn.BatchNorm2d):
    """A batch normalisation with an activation inside, as timm's BatchNormAct2d."""

    def __init__(self, channels: int, act: type[nn.Module] | None = nn.ReLU) -> None:
        super().__init__(channels)
        self.act = act() if act is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The activation of the normalised input."""
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(x)


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


def unit(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1,
         act: type[nn.Module] | None = nn.ReLU) -> nn.Sequential:  # fmt: skip
    return nn.Sequential(conv(inputs, outputs, kernel, stride, groups), NormAct(outputs, act))


class SqueezeExcite(nn.Module):
    """Channels are weighted by what is in all of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The input, its channels weighted."""
        return x * self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


class Around(nn.Module):
    """A block with a way around it where shapes allow."""

    def __init__(self, *layers: nn.Module, around: bool = True) -> None:
        super().__init__()
        self.layers, self.around = nn.Sequential(*layers), around

    def forward(self, x: Tensor) -> Tensor:
        """What the layers find, and the input."""
        return x + self.layers(x) if self.around else self.layers(x)


def inverted(inputs: int, outputs: int, stride: int, act: type[nn.Module], excite: bool) -> nn.Module:
    wide = 4 * inputs
    layers = [unit(inputs, wide, act=act), unit(wide, wide, 3, stride, wide, act)]
    layers += [SqueezeExcite(wide)] if excite else []
    return Around(*layers, unit(wide, outputs, act=None), around=stride == 1 and inputs == outputs)


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def mobile(act: type[nn.Module] = nn.ReLU6, excite: bool = False) -> nn.Module:
    blocks = [inverted(a, b, s, act, excite) for a, b, s in ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1))]
    return nn.Sequential(unit(3, 16, 3, act=act), *blocks, unit(40, 160, act=act), *head(160))


def regnet() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        parts = (
            unit(inputs, outputs),
            unit(outputs, outputs, 3, stride, outputs // 8),
            unit(outputs, outputs, act=None),
        )
        return nn.Sequential(Around(*parts, around=stride == 1 and inputs == outputs), nn.ReLU(inplace=True))

    return nn.Sequential(
        unit(3, 24, 3), block(24, 48, 2), block(48, 48, 1), block(48, 96, 2), block(96, 96, 1), *head(96)
    )


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, normalised."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    def block(channels: int) -> nn.Module:
        deep = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        wide = nn.Conv2d(channels, 4 * channels, 1), nn.GELU(), nn.Conv2d(4 * channels, channels, 1)
        return Around(deep, LayerNorm2d(channels), *wide)

    down = LayerNorm2d(32), nn.Conv2d(32, 64, 2, 2)
    return nn.Sequential(nn.Conv2d(3, 32, 2, 2), block(32), block(32), *down, block(64), block(64), *head(64))


class Concatenating(nn.Module):
    """A layer of a DenseNet: what it finds is added to what it was given."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(NormAct(channels), conv(channels, 4 * growth), NormAct(4 * growth),
                                    conv(4 * growth, growth, 3))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The input, and more channels."""
        return torch.cat([x, self.layers(x)], 1)


def densenet() -> nn.Module:
    blocks = [Concatenating(24 + 12 * number, 12) for number in range(4)]
    more = [Concatenating(36 + 12 * number, 12) for number in range(4)]
    down = NormAct(72), conv(72, 36), nn.AvgPool2d(2)
    return nn.Sequential(conv(3, 24, 3), *blocks, *down, *more, NormAct(84), *head(84))


def residual(act: type[nn.Module] = nn.ReLU) -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        parts = unit(inputs, outputs, 3, stride, act=act), unit(outputs, outputs, 3, act=None)
        return nn.Sequential(Around(*parts, around=stride == 1 and inputs == outputs), act())

    return nn.Sequential(unit(3, 32, 3, act=act), block(32, 32, 1), block(32, 64, 2), block(64, 64, 1), *head(64))


class Patches(nn.Module):
    """A small vision transformer, whose attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 96, 4, 4), nn.Linear(96, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(4))
        self.qkv, self.out = nn.Linear(96, 288), nn.Linear(96, 96)
        self.up, self.down = nn.Linear(96, 384), nn.Linear(384, 96)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patch(x).flatten(2).mT
        for number in (0, 2):
            q, k, v = self.qkv(self.norms[number](x)).unflatten(2, (3, 4, 24)).permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + self.down(F.gelu(self.up(self.norms[number + 1](x))))
        return self.head(x.mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "MobileNetV2-like": mobile, "MobileNetV3-like": lambda: mobile(nn.Hardswish, excite=True),
    "EfficientNet-like": lambda: mobile(nn.SiLU, excite=True), "RegNetX-like": regnet, "ConvNeXt-like": convnext,
    "DenseNet-like": densenet, "ResNet with BatchNormAct": residual, "ResNet with SiLU": lambda: residual(nn.SiLU),
    "ViT-like": Patches, "MLP": mlp,
}  # fmt: skip


def inference(net: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        net(x)


def training(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def jobs(nets: dict[str, nn.Module], batch: int, train: bool) -> dict[str, Callable[[], object]]:
    x, y = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
    found: dict[str, Callable[[], object]] = {}
    for name, net in nets.items():
        net.train(train)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
        found[name] = partial(training, net, optimizer, x, y) if train else partial(inference, net, x)
    return found


def in_turn(work: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Rounds for so long, and at least six of them."""
    found = measure.interleaved(work, 2, warmup=2)
    start = time.perf_counter()
    while len(found["dense"]) < 6 or time.perf_counter() - start < seconds:
        for name, values in measure.interleaved(work, 2, warmup=0).items():
            found[name] += values
    return found


def rows(name: str, sparsity: float, seconds: float) -> list[dict[str, object]]:
    torch.manual_seed(0)
    net = NETS[name]()
    mask = {key: torch.rand(weight.shape) >= sparsity for key, weight in dp.prunable(net).items()}
    dp.apply(net, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dp.SparseWarning)
        begin = time.perf_counter()
        fast = dp.sparsify(net, mask, torch.randn(1, 3, 32, 32))
    took, facts = time.perf_counter() - begin, dp.explain(fast)
    found: list[dict[str, object]] = []
    for work, batch in (("inference", 1), ("inference", 32), ("training step", 32)):
        todo = jobs({"dense": copy.deepcopy(net), "auto": fast}, batch, work != "inference")
        times = in_turn(todo, seconds)
        if measure.ratio(times, "dense", "auto") < LIMIT:
            times = in_turn(todo, 3 * seconds)
        ratio = measure.ratio(times, "dense", "auto")
        chosen = facts.inference if work == "inference" else facts.training
        found.append({
            "network": name, "sparsity": sparsity, "work": work, "batch": batch, "chosen": chosen,
            "sparse_share": round(facts.sparse_share, 3), "dense_over_auto": round(ratio, 3), "limit": LIMIT,
            "holds": ratio >= LIMIT, **measure.each(times), "sparsify_s": round(took, 1),
        })  # fmt: skip
        print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.9, 0.98])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--networks", nargs="*", default=list(NETS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    measure.write("auto", [
        row for name in given.networks for sparsity in given.sparsity for row in rows(name, sparsity, given.seconds)
    ])  # fmt: skip
