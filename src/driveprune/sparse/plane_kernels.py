"""The loops over planes of blocked images, compiled by numba: normalisation, ReLU and pooling.

Every kernel takes flat arrays. Sums are added in a fixed order.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import prange

from driveprune.compiled import compiled
from driveprune.sparse.code import LANES
from driveprune.sparse.ends import MOMENT_VECTORS
from driveprune.sparse.plane import (
    clip_slope,
    deviations,
    scale,
    scale_plus,
    scale_plus_relu,
    scale_relu,
    slope_apply,
    slope_apply_input,
    slope_sums,
    slope_sums_input,
    slope_sums_output,
    sum_slope,
)
from driveprune.sparse.vector import (
    clear_vector,
    copy_vector,
    max_of_four,
    max_vector,
    route_to_four,
    route_vector,
)
from driveprune.sparse.window import scale_windows, window_slope_apply, window_slope_sums


@compiled()
def _moments(y, c, blocks, channels, plane, last):
    """Mean and variance of a channel over all images: of each plane while it is in the cache, joined to the others'.

    `last` lanes of the last block are images.
    """
    zero = np.float32(0.0)
    count, mean, squares = 0, 0.0, 0.0
    for b in range(blocks):
        base = (b * channels + c) * plane
        if b < blocks - 1 or last == LANES:
            many = plane
            near = np.float32(deviations(y, y, y, y, base, plane, zero, zero, zero, zero, zero, False)[0] / many)
            rest, own = deviations(y, y, y, y, base, plane, near, zero, zero, zero, zero, False)
        else:
            many = plane // LANES * last
            total, rest, own = 0.0, 0.0, 0.0
            for k in range(plane):
                total += y[base + k] if k % LANES < last else zero
            near = np.float32(total / many)
            for k in range(plane):
                if k % LANES < last:
                    rest += y[base + k] - near
                    own += (y[base + k] - near) * (y[base + k] - near)
        here = near + rest / many
        own -= rest * (rest / many)
        both = count + many
        squares += own + (here - mean) * (here - mean) * count * many / both
        mean += (here - mean) * many / both
        count = both
    return mean, squares / count


@compiled()
def join_moments(sums, c, blocks, channels, pixels, last):
    """Mean and variance of a channel over all images, from the sums that its layer found on the way.

    For each block and channel these are a vector K, and the sums of differences from it and of their squares.
    """
    images, each = (blocks - 1) * LANES + last, 1.0 / pixels
    mean, squares = 0.0, 0.0
    for image in range(images):
        begin = (image // LANES * channels + c) * MOMENT_VECTORS * LANES + image % LANES
        mean += sums[begin] + sums[begin + LANES] * each
    mean /= images
    for image in range(images):
        begin = (image // LANES * channels + c) * MOMENT_VECTORS * LANES + image % LANES
        rest = sums[begin + LANES] * each
        apart = sums[begin] + rest - mean
        squares += sums[begin + 2 * LANES] - sums[begin + LANES] * rest + apart * apart * pixels
    return mean, max(squares, 0.0) / (images * pixels)


@compiled()
def take_down(c, mean, variance, weight, bias, eps, means, variances, inverse, scales, shifts):
    """What a channel's moments make of its normalisation."""
    means[c], variances[c] = mean, variance
    inverse[c] = 1.0 / np.sqrt(variance + eps)
    scales[c] = weight[c] * inverse[c]
    shifts[c] = bias[c] - means[c] * scales[c]


@compiled()
def take_gradients(c, total, product, inv, count, dweight, dbias):
    """The gradients of a channel's weight and bias; what goes back through the mean and variance of its numbers."""
    dbias[c], dweight[c] = total, product * inv
    return np.float32(total / count), np.float32(product * inv * inv / count)


@compiled()
def _clear_lanes(x, base, plane, last):
    """Zeros for images that are none, in a plane of the last block."""
    for k in range(plane):
        if k % LANES >= last:
            x[base + k] = 0.0


@compiled()
def scale_plane(y, plus, out, base, plane, a, b, has_plus, relu, stream):
    """One plane of `normalise`."""
    zero = np.float32(0.0)
    if has_plus:
        if relu:
            scale_plus_relu(y, plus, y, out, base, plane, a, b, zero, zero, zero, stream)
        else:
            scale_plus(y, plus, y, out, base, plane, a, b, zero, zero, zero, stream)
    elif relu:
        scale_relu(y, y, y, out, base, plane, a, b, zero, zero, zero, stream)
    else:
        scale(y, y, y, out, base, plane, a, b, zero, zero, zero, stream)


@compiled()
def scale_channel(c, y, plus, has_plus, scales, shifts, out, blocks, channels, plane, relu, stream):
    """One channel of `normalise`."""
    for b in range(blocks):
        scale_plane(y, plus, out, (b * channels + c) * plane, plane, scales[c], shifts[c], has_plus, relu, stream)


@compiled()
def normalise_channel(
    c, y, plus, has_plus, weight, bias, eps, out, means, variances, inverse, scales, shifts, blocks, channels, plane,
    last, relu, stream,
):  # fmt: skip
    """One channel of `normalise_batch`."""
    mean, variance = _moments(y, c, blocks, channels, plane, last)
    take_down(c, mean, variance, weight, bias, eps, means, variances, inverse, scales, shifts)
    scale_channel(c, y, plus, has_plus, scales, shifts, out, blocks, channels, plane, relu, stream)


@compiled(parallel=True)
def normalise_batch(
    y, plus, has_plus, weight, bias, eps, out, means, variances, inverse, scales, shifts, blocks, channels, plane,
    last, relu, stream,
):  # fmt: skip
    """`normalise` by the batch's own moments, which are found on the way."""
    for c in prange(channels):
        normalise_channel(
            c, y, plus, has_plus, weight, bias, eps, out, means, variances, inverse, scales, shifts, blocks, channels,
            plane, last, relu, stream,
        )  # fmt: skip


@compiled(parallel=True)
def normalise(y, plus, has_plus, scales, shifts, out, blocks, channels, plane, relu, stream):
    """Out = y · scale + shift (+ plus), clipped at zero if `relu`."""
    for c in prange(channels):
        scale_channel(c, y, plus, has_plus, scales, shifts, out, blocks, channels, plane, relu, stream)


@compiled()
def normalise_channel_backward(
    c, slope, y, out, has_plus, means, inverse, scales, shifts, dy, dplus, dweight, dbias, blocks, channels, plane,
    last, relu, training, stream,
):  # fmt: skip
    """One channel of `normalise_backward`."""
    count = ((blocks - 1) * LANES + last) * (plane // LANES)
    zero = np.float32(0.0)
    a, b, mean, inv = scales[c], shifts[c], means[c], inverse[c]
    total, product = 0.0, 0.0
    for block in range(blocks):
        base = (block * channels + c) * plane
        if relu and has_plus:
            found = slope_sums_output(slope, y, out, dplus, base, plane, a, b, mean, zero, zero, False)
        elif relu:
            found = slope_sums_input(slope, y, y, dy, base, plane, a, b, mean, zero, zero, False)
        else:
            found = slope_sums(slope, y, y, dy, base, plane, a, b, mean, zero, zero, False)
        total += found[0]
        product += found[1]
    first, second = take_gradients(c, total, product, inv, count, dweight, dbias)
    if not training:
        first, second = zero, zero
    for block in range(blocks - 1, -1, -1):  # what was read last is still in the cache
        base = (block * channels + c) * plane
        if relu and not has_plus:
            slope_apply_input(slope, y, y, dy, base, plane, a, b, mean, first, second, stream)
        else:
            slope_apply(dplus, y, y, dy, base, plane, a, b, mean, first, second, stream)
    if last < LANES:
        _clear_lanes(dy, ((blocks - 1) * channels + c) * plane, plane, last)


@compiled(parallel=True)
def normalise_backward(
    slope, y, out, has_plus, means, inverse, scales, shifts, dy, dplus, dweight, dbias, blocks, channels, plane, last,
    relu, training, stream,
):  # fmt: skip
    """Gradients of `normalise`, through the batch's own mean and variance if `training`."""
    for c in prange(channels):
        normalise_channel_backward(
            c, slope, y, out, has_plus, means, inverse, scales, shifts, dy, dplus, dweight, dbias, blocks, channels,
            plane, last, relu, training, stream,
        )  # fmt: skip


@compiled()
def normalise_channel_windows(
    c, y, weight, bias, eps, out, means, variances, inverse, scales, shifts, blocks, channels, rows, columns, last,
    stream,
):  # fmt: skip
    """One channel of `normalise_windows`."""
    zero, small = np.float32(0.0), rows * columns * LANES
    mean, variance = _moments(y, c, blocks, channels, 4 * small, last)
    take_down(c, mean, variance, weight, bias, eps, means, variances, inverse, scales, shifts)
    for b in range(blocks):
        base = (b * channels + c) * small
        form, a, shift = (rows, columns), scales[c], shifts[c]
        scale_windows(y, y, out, 4 * base, base, form, a, shift, zero, zero, zero, stream)


@compiled(parallel=True)
def normalise_windows(
    y, weight, bias, eps, out, means, variances, inverse, scales, shifts, blocks, channels, rows, columns, last,
    stream,
):  # fmt: skip
    """`normalise_batch` with ReLU, and the largest of each window of 2×2; `out` has so many rows and columns."""
    for c in prange(channels):
        normalise_channel_windows(
            c, y, weight, bias, eps, out, means, variances, inverse, scales, shifts, blocks, channels, rows, columns,
            last, stream,
        )  # fmt: skip


@compiled()
def normalise_channel_windows_backward(
    c, slope, y, means, inverse, scales, shifts, dy, dweight, dbias, blocks, channels, rows, columns, last, stream,
):  # fmt: skip
    """One channel of `normalise_windows_backward`."""
    zero, small, form = np.float32(0.0), rows * columns * LANES, (rows, columns)
    count = ((blocks - 1) * LANES + last) * 4 * rows * columns
    a, b, mean, inv = scales[c], shifts[c], means[c], inverse[c]
    total, product = 0.0, 0.0
    for block in range(blocks):
        base = (block * channels + c) * small
        found = window_slope_sums(y, slope, dy, 4 * base, base, form, a, b, mean, zero, zero, False)
        total += found[0]
        product += found[1]
    first, second = take_gradients(c, total, product, inv, count, dweight, dbias)
    for block in range(blocks - 1, -1, -1):  # what was read last is still in the cache
        base = (block * channels + c) * small
        window_slope_apply(y, slope, dy, 4 * base, base, form, a, b, mean, first, second, stream)
    if last < LANES:
        _clear_lanes(dy, ((blocks - 1) * channels + c) * 4 * small, 4 * small, last)


@compiled(parallel=True)
def normalise_windows_backward(
    slope, y, means, inverse, scales, shifts, dy, dweight, dbias, blocks, channels, rows, columns, last, stream,
):  # fmt: skip
    """Gradients of `normalise_windows`."""
    for c in prange(channels):
        normalise_channel_windows_backward(
            c, slope, y, means, inverse, scales, shifts, dy, dweight, dbias, blocks, channels, rows, columns, last,
            stream,
        )  # fmt: skip


@compiled()
def clip_channel_backward(
    c, slope, out, dy, dbias, blocks, channels, plane, relu, stream,
):  # fmt: skip
    """One channel of `clip_backward`."""
    zero = np.float32(0.0)
    total = 0.0
    for block in range(blocks):
        base = (block * channels + c) * plane
        if relu:
            total += clip_slope(slope, slope, out, dy, base, plane, zero, zero, zero, zero, zero, stream)[0]
        else:
            total += sum_slope(slope, slope, slope, dy, base, plane, zero, zero, zero, zero, zero, stream)[0]
    dbias[c] = total


@compiled(parallel=True)
def clip_backward(
    slope, out, dy, dbias, blocks, channels, plane, relu, stream,
):  # fmt: skip
    """The gradient before a bias and, if `relu`, a clip at zero; and that of the bias."""
    for c in prange(channels):
        clip_channel_backward(
            c, slope, out, dy, dbias, blocks, channels, plane, relu, stream,
        )  # fmt: skip


@numba.njit(inline="always")
def _are_halves(kernel, stride, pad):
    """Whether windows are of 2×2, side by side."""
    return kernel[0] == kernel[1] == stride[0] == stride[1] == 2 and pad[0] == 0 and pad[1] == 0


@compiled()
def max_pool_plane(x, x_base, out, out_base, height, width, rows, columns, kernel, stride, pad, stream):
    """The largest value of each window of one channel of one block."""
    if _are_halves(kernel, stride, pad):
        for y in range(rows):
            above = x_base + 2 * y * width * LANES
            for z in range(columns):
                place = above + 2 * z * LANES
                max_of_four(out, out_base + (y * columns + z) * LANES, x, place, place + width * LANES, stream)
        return
    for y in range(rows):
        top, bottom = max(0, y * stride[0] - pad[0]), min(height, y * stride[0] - pad[0] + kernel[0])
        for z in range(columns):
            left, right = max(0, z * stride[1] - pad[1]), min(width, z * stride[1] - pad[1] + kernel[1])
            to = out_base + (y * columns + z) * LANES
            copy_vector(out, to, x, x_base + (top * width + left) * LANES)
            for i in range(top, bottom):
                for j in range(left, right):
                    max_vector(out, to, x, x_base + (i * width + j) * LANES)


@compiled(parallel=True)
def max_pool(x, out, stream, planes, height, width, rows, columns, kernel, stride, pad):
    """The largest value of each window of blocked images."""
    for p in prange(planes):
        max_pool_plane(
            x, p * height * width * LANES, out, p * rows * columns * LANES, height, width, rows, columns, kernel,
            stride, pad, stream,
        )  # fmt: skip


@compiled()
def max_pool_plane_backward(
    x, x_base, out, out_base, slope, left_over, dx, stream, height, width, rows, columns, kernel, stride, pad
):
    """Each window's gradient goes to the first of its largest values, in one channel of one block."""
    halves = _are_halves(kernel, stride, pad)
    if not halves or height % 2 or width % 2:
        for k in range(height * width):
            clear_vector(dx, x_base + k * LANES)
    if halves:
        for y in range(rows):
            for z in range(columns):
                place, here = x_base + 2 * (y * width + z) * LANES, out_base + (y * columns + z) * LANES
                route_to_four(slope, out, here, x, place, place + width * LANES, dx, stream)
        return
    for y in range(rows):
        top, bottom = max(0, y * stride[0] - pad[0]), min(height, y * stride[0] - pad[0] + kernel[0])
        for z in range(columns):
            left, right = max(0, z * stride[1] - pad[1]), min(width, z * stride[1] - pad[1] + kernel[1])
            here = out_base + (y * columns + z) * LANES
            copy_vector(left_over, 0, slope, here)
            for i in range(top, bottom):
                for j in range(left, right):
                    route_vector(left_over, 0, out, here, x, x_base + (i * width + j) * LANES, dx)


@compiled(parallel=True)
def max_pool_backward(
    x, out, slope, left_over, dx, stream, planes, height, width, rows, columns, kernel, stride, pad
):
    """Each window's gradient goes to the first of its largest values."""
    for p in prange(planes):
        max_pool_plane_backward(
            x, p * height * width * LANES, out, p * rows * columns * LANES, slope, left_over[numba.get_thread_id()],
            dx, stream, height, width, rows, columns, kernel, stride, pad,
        )  # fmt: skip
