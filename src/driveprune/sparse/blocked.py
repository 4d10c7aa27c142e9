"""Operations on blocked tensors that autograd knows: (blocks, channels, height, width, LANES), float32, contiguous.

Images that fill up the last block are zeros on the way in; on the way back, their gradients are zero everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from driveprune.compact import SameDropout
from driveprune.compiled import threads, use_threads
from driveprune.noise import dropout_of_ones
from driveprune.sparse import both_kernels, kernels, plane_kernels
from driveprune.sparse.code import LANES, LINE
from driveprune.sparse.memory import Floats, Lease, empty
from driveprune.sparse.tile import SPARE
from driveprune.sparse.tiling import Layer, Tiling, backward, blocks_for, both, forward

STREAM_BYTES = 2_000_000
"""Larger tensors are written past the caches."""


def pack(x: Tensor) -> Tensor:
    """(N, C, H, W) or (N, C) as a blocked tensor."""
    images = x.float() if x.dim() == 4 else x.float()[:, :, None, None]
    blocks = -(-len(images) // LANES)
    images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, blocks * LANES - len(images)))
    return images.reshape(blocks, LANES, *images.shape[1:]).movedim(1, -1).contiguous()


def unpack(x: Tensor, count: int, dims: int) -> Tensor:
    """The `count` images of a blocked tensor as (N, C, H, W), or (N, C), in the order of memory that torch has."""
    images = x.movedim(-1, 1).reshape(-1, *x.shape[1:-1])[:count].contiguous()
    return images if dims == 4 else images.flatten(1)


def run(kernel: Callable[..., object], *args: Any) -> None:
    """Run a kernel; tensors are given as flat arrays."""
    use_threads()
    kernel(*(flat(each) if isinstance(each, Tensor) else each for each in args))


def streams(out: Tensor) -> bool:
    """Whether what is computed is too large to stay in a cache until it is read."""
    return out.numel() * 4 > STREAM_BYTES


def check_kind(values: Tensor) -> None:
    """An error if a network was made another one than the kernels know after it was made sparse."""
    if values.dtype != torch.float32 or values.device.type != "cpu":
        raise ValueError(
            f"the sparse kernels compute in float32 on the CPU, but the weights are {values.dtype} on {values.device}"
        )


def flat(x: Tensor) -> Floats:
    """A contiguous tensor as a flat array on the same memory."""
    found: Floats = (x.detach() if x.requires_grad else x).numpy().reshape(-1)
    return found


TILINGS_KNOWN = 48
"""A layer keeps so many tables: those of six sizes of inputs or more, in training."""


class Kernel:
    """A layer's kept weights and the tables of its kernels, made when they are first needed."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self._lease = layer, Lease()
        self._tilings: dict[tuple[Any, ...], Tiling] = {}

    def __deepcopy__(self, _: Any) -> Kernel:
        return self  # nothing in it changes

    def __reduce__(self) -> tuple[Any, ...]:
        one = self.layer
        sides = one.outputs, one.inputs, *one.kernel
        places = np.ravel_multi_index(tuple(one.places.T), sides) if one.places.size else np.zeros(0, np.int64)
        small = places.astype(np.int32 if np.prod(sides, dtype=np.int64) < 2**31 else np.int64)
        return _kernel, (sides, one.stride, one.padding, one.dilation, small)

    def tiling(self, make: Callable[[Layer, int, int, int], Tiling], height: int, width: int, blocks: int) -> Tiling:
        """The tables for a size of image."""
        key, known = (make, height, width, blocks), self._tilings
        if key not in known:  # a new dictionary: other threads may be reading the old one
            made = make(self.layer, height, width, blocks)
            self._tilings = known = {**dict([*known.items()][1 - TILINGS_KNOWN :]), key: made}
        return known[key]

    def output(
        self, x: Tensor, values: Tensor, bias: Tensor | None, *, plus: Tensor | None = None, relu: bool = False
    ) -> Tensor:
        """The layer's output, plus another tensor, clipped at zero."""
        self.layer.check(x.shape[1])
        size = x.shape[2], x.shape[3]
        out = empty(x.shape[0], self.layer.outputs, *self.layer.size(*size), LANES)
        self._correlate(forward, size, x, values, bias, out, plus, relu)
        return out

    def input_gradient(
        self, slope: Tensor, values: Tensor, size: tuple[int, int], *, plus: Tensor | None = None
    ) -> Tensor:
        """The gradient of the layer's input, of a size, from that of its output; plus another tensor."""
        out = empty(slope.shape[0], self.layer.inputs, *size, LANES)
        self._correlate(backward, size, slope, values, None, out, plus, False)
        return out

    def _correlate(
        self, make: Any, size: tuple[int, int], x: Tensor, values: Tensor, bias: Tensor | None, out: Tensor,
        plus: Tensor | None, relu: bool,
    ) -> None:  # fmt: skip
        check_kind(values)
        if not len(values):
            _constant(out, bias, plus, relu)
            return
        whole_lines = make is forward or self.layer.stride[1] == 1  # not every other vector
        given = np.zeros(out.shape[1], np.float32) if bias is None else flat(bias)
        count = threads()
        for first, jobs, tiling in self.pieces(make, size, (out.shape[2], out.shape[3]), out.shape[0]):
            weights = flat(values) if tiling.order is None else flat(values)[tiling.order]
            scratch = _scratch(count, tiling)
            run(
                kernels.correlate, x, out, out if plus is None else plus, plus is not None, weights, given, first,
                jobs, -(-count // jobs), tiling.sizes, tiling.bands, tiling.runs, tiling.inward, tiling.outward,
                tiling.starts, tiling.offsets, scratch, relu, streams(out) and whole_lines,
            )  # fmt: skip

    def pieces(
        self, make: Any, size: tuple[int, int], out: tuple[int, int], blocks: int
    ) -> list[tuple[int, int, Tiling]]:
        """(first block, number of pieces, tables): pieces of several blocks, and what is left over."""
        at_once = min(blocks, blocks_for(out))
        whole, rest = divmod(blocks, at_once)
        found = [(0, whole, self.tiling(make, *size, at_once))]
        if rest:
            found.append((whole * at_once, 1, self.tiling(make, *size, rest)))
        return found

    def weight_gradient(self, x: Tensor, slope: Tensor) -> Tensor:
        """The gradient of the kept values."""
        if not len(self.layer.places):
            return x.new_empty(0)
        count, found = threads(), x.new_zeros(len(self.layer.places))
        for first, jobs, tiling in self.pieces(
            forward, (x.shape[2], x.shape[3]), (slope.shape[2], slope.shape[3]), x.shape[0]
        ):
            scratch, sums = _scratch(count, tiling), empty(count, len(tiling.slots) + SPARE).numpy()
            run(
                kernels.add_weight_sums, x, slope, first, jobs, tiling.sizes, tiling.bands, tiling.runs,
                tiling.inward, tiling.outward, tiling.counted, tiling.starts, tiling.offsets, scratch, sums,
                tiling.slots, found,
            )  # fmt: skip
        return found

    def both_gradients(
        self, x: Tensor, slope: Tensor, values: Tensor, *, plus: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the layer's input, plus another tensor, and of the kept values: together."""
        check_kind(values)
        dx, found, count = empty(*x.shape), values.new_zeros(len(values)), threads()
        if not len(values):
            _constant(dx, None, plus, False)
            return dx, found
        size = x.shape[2], x.shape[3]
        whole_lines = self.layer.stride[1] == 1 or LANES % LINE == 0
        for first, jobs, tiling in self.pieces(both, size, size, x.shape[0]):
            weights = flat(values) if tiling.order is None else flat(values)[tiling.order]
            parts, pieces = shares(count, jobs)
            sums = empty(pieces, tiling.sums).numpy()
            run(
                both_kernels.turn, slope, x, dx, dx if plus is None else plus, plus is not None,
                streams(dx) and whole_lines, weights, first, jobs, parts, tiling.sizes, tiling.bands, tiling.runs,
                tiling.inward, tiling.outward, tiling.counted, tiling.starts, tiling.offsets,
                _scratch(count, tiling), sums, tiling.slots, found,
            )  # fmt: skip
        return dx, found


def _kernel(sides: Any, stride: Any, padding: Any, dilation: Any, places: Any) -> Kernel:
    """A kernel from the places of its weights in the flattened full tensor."""
    rows = np.stack(np.unravel_index(places, sides), 1).astype(np.int64)
    return Kernel(Layer(sides[0], sides[1], (sides[2], sides[3]), stride, padding, dilation, rows))


def shares(count: int, jobs: int) -> tuple[int, int]:
    """In how many parts so many threads do a job, and in how many pieces all of them: two for a thread, or more."""
    parts = -(-count // jobs)
    return parts, jobs * parts if parts > 1 else min(jobs, 2 * count if count > 1 else 1)


def _constant(out: Tensor, bias: Tensor | None, plus: Tensor | None, relu: bool) -> None:
    """The output of a layer that has no weights left."""
    out.zero_() if bias is None else out.copy_(bias.detach().view(1, -1, 1, 1, 1).expand_as(out))
    if plus is not None:
        out.add_(plus.detach())
    if relu:
        out.relu_()


def _scratch(count: int, tiling: Tiling) -> Floats:
    """A scratch for each thread, in lines of the cache of its own."""
    found: Floats = empty(count, -(-tiling.scratch // 16) * 16).numpy()
    return found


class _Convolve(Function):
    """A layer; and its input for others, whose gradients come back through here and are added on the way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, kernel: Kernel, relu: bool
    ) -> tuple[Tensor, Tensor]:
        out = kernel.output(x, values, bias, relu=relu)
        ctx.save_for_backward(x, values, out if relu else None)
        ctx.kernel, ctx.relu, ctx.has_bias = kernel, relu, bias is not None
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor | None, others: Tensor | None) -> tuple[Tensor | None, ...]:
        x, values, out = ctx.saved_tensors
        if slope is None:  # nobody used the output
            return others, None, None, None, None
        slope, dbias = slope.contiguous(), None
        if ctx.relu or (ctx.has_bias and ctx.needs_input_grad[2]):
            slope, dbias = _clip_backward(slope, out)
        needs_x, needs_values, needs_bias = ctx.needs_input_grad[:3]
        dx, dvalues = others if needs_x else None, None
        plus = None if others is None else others.contiguous()
        if needs_x and needs_values and len(values):
            dx, dvalues = ctx.kernel.both_gradients(x, slope, values, plus=plus)
        elif needs_x and (len(values) or others is None):
            dx = ctx.kernel.input_gradient(slope, values, (x.shape[2], x.shape[3]), plus=plus)
        if needs_values and dvalues is None:
            dvalues = ctx.kernel.weight_gradient(x, slope)
        return dx, dvalues, dbias if needs_bias else None, None, None


def _clip_backward(slope: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient before the clip of `out` (if there was one), and the sum of it for each channel."""
    dy = slope if out is None else empty(*slope.shape)
    dbias = slope.new_empty(slope.shape[1])
    blocks, channels, plane = _planes(slope)
    other = slope if out is None else out
    run(plane_kernels.clip_backward, slope, other, dy, dbias, blocks, channels, plane, out is not None, streams(dy))
    return dy, dbias


def _planes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], x.shape[2] * x.shape[3] * LANES


def convolve(x: Tensor, values: Tensor, bias: Tensor | None, kernel: Kernel, *, relu: bool = False) -> Tensor:
    """A sparse convolution, or linear layer, of a blocked tensor."""
    return convolve_and_pass(x, values, bias, kernel, relu=relu)[0]


def convolve_and_pass(
    x: Tensor, values: Tensor, bias: Tensor | None, kernel: Kernel, *, relu: bool = False
) -> tuple[Tensor, Tensor]:
    """The same, and the input for others to use: their gradients are then added without a pass of its own."""
    found: tuple[Tensor, Tensor] = _Convolve.apply(x.contiguous(), values, bias, kernel, relu)  # type: ignore[no-untyped-call]
    return found


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, plus: Tensor | None, means: Tensor, variances: Tensor,
        eps: float, last: int, relu: bool, training: bool,
    ) -> Tensor:  # fmt: skip
        out = empty(*y.shape)
        blocks, channels, plane = _planes(y)
        given = y, y if plus is None else plus, plus is not None
        if training:  # means and variances are found
            inverse, scale, shift = (torch.empty_like(means) for _ in range(3))
            run(
                plane_kernels.normalise_batch, *given, weight, bias, eps, out, means, variances, inverse, scale,
                shift, blocks, channels, plane, last, relu, streams(out),
            )  # fmt: skip
        else:
            inverse = (variances + eps).rsqrt()
            scale = weight * inverse
            shift = bias - means * scale
            run(plane_kernels.normalise, *given, scale, shift, out, blocks, channels, plane, relu, streams(out))
        ctx.save_for_backward(y, weight, means, inverse, scale, shift, out if relu and plus is not None else None)
        ctx.has_plus, ctx.last, ctx.relu, ctx.training = plus is not None, last, relu, training
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, means, inverse, scale, shift, out = ctx.saved_tensors
        slope, dy = slope.contiguous(), empty(*y.shape)
        clipped_plus = ctx.has_plus and ctx.relu
        dplus = empty(*y.shape) if clipped_plus else slope
        dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
        blocks, channels, plane = _planes(y)
        run(
            plane_kernels.normalise_backward, slope, y, y if out is None else out, clipped_plus, means, inverse,
            scale, shift, dy, dplus, dweight, dbias, blocks, channels,
            plane, ctx.last, ctx.relu, ctx.training, streams(dy),
        )  # fmt: skip
        return dy, dweight, dbias, dplus if ctx.has_plus else None, *[None] * 6


class _NormaliseAndHalve(Function):
    """Normalisation by the batch's own moments, ReLU and max pooling: nothing in between is ever written."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, means: Tensor, variances: Tensor, eps: float, last: int
    ) -> Tensor:
        blocks, channels, height, width, _ = y.shape
        out = empty(blocks, channels, height // 2, width // 2, LANES)
        inverse, scale, shift = (torch.empty_like(means) for _ in range(3))
        run(
            plane_kernels.normalise_windows, y, weight, bias, eps, out, means, variances, inverse, scale, shift,
            *out.shape[:4], last, streams(out),
        )  # fmt: skip
        ctx.save_for_backward(y, weight, means, inverse, scale, shift)
        ctx.last = last
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, *known = ctx.saved_tensors
        dy, dweight, dbias = empty(*y.shape), torch.empty_like(weight), torch.empty_like(weight)
        run(
            plane_kernels.normalise_windows_backward, slope.contiguous(), y, *known, dy, dweight, dbias,
            *slope.shape[:4], ctx.last, streams(dy),
        )  # fmt: skip
        return dy, dweight, dbias, *[None] * 4


def normalise(
    y: Tensor,
    norm: nn.Module,
    count: int,
    *,
    plus: Tensor | None = None,
    relu: bool = False,
    halves: bool = False,
) -> Tensor:
    """Batch normalisation of `count` images by a module, then plus another tensor, then clipped at zero.

    If `halves`, it is clipped without another tensor, and the largest value of each window of 2×2 is left.
    """
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    y = y.contiguous()
    if y.shape[1] != norm.num_features:
        raise ValueError(f"a normalisation of {norm.num_features} channels was given {y.shape[1]}")
    last = count - (y.shape[0] - 1) * LANES
    own = norm.training or norm.running_mean is None
    numbers = count * y.shape[2] * y.shape[3]
    if own and numbers < 2:
        raise ValueError("batch normalisation in training needs more than one value for each channel")
    means, variances = (y.new_empty(y.shape[1]) for _ in range(2)) if own else (norm.running_mean, norm.running_var)
    assert means is not None
    assert variances is not None
    ones = torch.ones_like(means) if norm.weight is None else norm.weight
    zeros = torch.zeros_like(means) if norm.bias is None else norm.bias
    other = None if plus is None else plus.contiguous()
    found: Tensor
    if halves and own and y.shape[2] % 2 == y.shape[3] % 2 == 0:
        found = _NormaliseAndHalve.apply(y, ones, zeros, means, variances, norm.eps, last)  # type: ignore[no-untyped-call]
    else:
        found = _Normalise.apply(y, ones, zeros, other, means, variances, norm.eps, last, relu, own)  # type: ignore[no-untyped-call]
        found = max_pool(found, *HALVES) if halves else found
    if norm.training and norm.running_mean is not None:
        follow(norm, means, variances, numbers)
    return found


@torch.no_grad()
def follow(norm: nn.BatchNorm1d | nn.BatchNorm2d, means: Tensor, variances: Tensor, numbers: int) -> None:
    """The running statistics, as torch's own module follows them."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    share = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        share = 1 / float(norm.num_batches_tracked) if share is None else share
    share = 0.0 if share is None else share
    norm.running_mean.mul_(1 - share).add_(means, alpha=share)
    norm.running_var.mul_(1 - share).add_(variances, alpha=share * numbers / (numbers - 1))


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Any, stride: Any, pad: Any) -> Tensor:
        size = pooled((x.shape[2], x.shape[3]), kernel, stride, pad)
        out = empty(*x.shape[:2], *size, LANES)
        ctx.numbers = (x.shape[0] * x.shape[1], *x.shape[2:4], *size, kernel, stride, pad)
        run(plane_kernels.max_pool, x, out, streams(out), *ctx.numbers)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, out = ctx.saved_tensors
        dx = empty(*x.shape)
        left_over = np.empty((threads(), LANES), np.float32)
        run(plane_kernels.max_pool_backward, x, out, slope.contiguous(), left_over, dx, streams(dx), *ctx.numbers)
        return dx, None, None, None


HALVES = (2, 2), (2, 2), (0, 0)
"""Kernel, stride and padding of windows of 2×2, side by side."""


def pooled(size: tuple[int, int], kernel: Any, stride: Any, padding: Any) -> tuple[int, int]:
    """The size of an image after pooling."""
    rows, columns = ((s + 2 * p - k) // t + 1 for s, k, t, p in zip(size, kernel, stride, padding, strict=True))
    if min(rows, columns) < 1:
        raise ValueError(f"pooling of {kernel} with padding {padding} does not fit {size[0]}×{size[1]}")
    return rows, columns


def max_pool(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """Max pooling of a blocked tensor."""
    found: Tensor = _MaxPool.apply(x.contiguous(), kernel, stride, padding)  # type: ignore[no-untyped-call]
    return found


def as_images(x: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """An operation on single channels, done by torch: the lanes are its channels, in its channels_last format."""
    blocks, channels, height, width, _ = x.shape
    out = pool(x.reshape(blocks * channels, height, width, LANES).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return out.reshape(blocks, channels, *out.shape[1:]).contiguous()


def flatten(x: Tensor) -> Tensor:
    """Channels and pixels as channels of one pixel."""
    return x.reshape(x.shape[0], -1, 1, 1, LANES)


def dropout(x: Tensor, module: nn.Module, count: int, dims: int) -> Tensor:
    """The noise of a dropout module, drawn as for ordinary tensors: the same random numbers."""
    shape = (count, *x.shape[1:4])[:dims]
    noise = module(x.new_ones(shape)) if isinstance(module, SameDropout) else dropout_of_ones(module, shape, x)
    return x * pack(noise)
