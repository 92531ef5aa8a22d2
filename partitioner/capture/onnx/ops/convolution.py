"""Convolutions and pooling over one, two or three spatial dims."""

from __future__ import annotations

import math

import torch

from partitioner.capture.onnx.builder import Value, aten, fake, shape_of
from partitioner.capture.onnx.ops.elementwise import binary
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.errors import UnsupportedError

_CONV = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
_CONV_TRANSPOSE = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}
_MAX_POOL = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}
_AVG_POOL = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}


def _spatial(op: Op) -> int:
    count = rank(op.input(0)) - 2
    if count not in (1, 2, 3):
        raise UnsupportedError(f"it has {count} spatial dims; 1, 2 and 3 are understood")
    return count


def _padding(op: Op, kernel: list[int], stride: list[int], dilation: list[int]) -> tuple[list[int], list[int]]:
    """(before, after) of each spatial dim; ``auto_pad`` resolved on the actual sizes."""
    count, mode = len(kernel), op.attr_str("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        pads = op.attr_ints("pads") or [0] * 2 * count
        return pads[:count], pads[count:]
    if mode == "VALID":
        return [0] * count, [0] * count
    before, after = [], []
    for size, k, s, d in zip(shape_of(op.input(0))[2:], kernel, stride, dilation, strict=True):
        missing = max((math.ceil(size / s) - 1) * s + d * (k - 1) + 1 - size, 0)
        small, large = missing // 2, missing - missing // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before, after


def _padded(op: Op, x: Value, before: list[int], after: list[int], fill: float) -> Value:
    flat = [amount for pair in reversed(list(zip(before, after, strict=True))) for amount in pair]
    result: Value = op.build.call(aten.constant_pad_nd.default, x, flat, fill)
    return result


@onnx_op("Conv")
def conv(op: Op) -> Result:
    count = _spatial(op)
    bias = op.optional(2)
    x, weight, *rest = op.build.align([v for v in (op.input(0), op.input(1), bias) if v is not None])
    stride = op.attr_ints("strides") or [1] * count
    dilation = op.attr_ints("dilations") or [1] * count
    before, after = _padding(op, list(shape_of(weight)[2:]), stride, dilation)
    if before != after:
        x, before = _padded(op, x, before, after, 0.0), [0] * count
    result: Value = op.build.call(
        _CONV[count], x, weight, rest[0] if rest else None, stride, before, dilation, op.attr_int("group", 1)
    )
    return result


@onnx_op("ConvTranspose")
def conv_transpose(op: Op) -> Result:
    count = _spatial(op)
    bias = op.optional(2)
    x, weight, *rest = op.build.align([v for v in (op.input(0), op.input(1), bias) if v is not None])
    stride = op.attr_ints("strides") or [1] * count
    dilation = op.attr_ints("dilations") or [1] * count
    extra = op.attr_ints("output_padding") or [0] * count
    pads = op.attr_ints("pads") or [0] * 2 * count
    if op.attr_str("auto_pad", "NOTSET") not in ("NOTSET", "VALID", "") or op.attr("output_shape"):
        raise UnsupportedError("auto_pad and output_shape are not understood", hint="export with explicit pads")
    if pads[:count] != pads[count:]:
        raise UnsupportedError(f"pads {pads} differ at the two ends of a dim")
    result: Value = op.build.call(
        _CONV_TRANSPOSE[count], x, weight, rest[0] if rest else None,
        stride, pads[:count], extra, op.attr_int("group", 1), dilation,
    )  # fmt: skip
    return result


@onnx_op("MaxPool")
def max_pool(op: Op) -> Result:
    count, x = _spatial(op), op.input(0)
    if op.uses_output(1):
        raise UnsupportedError("its indices are used")
    kernel = op.attr_ints("kernel_shape") or []
    stride = op.attr_ints("strides") or [1] * count
    dilation = op.attr_ints("dilations") or [1] * count
    before, after = _padding(op, kernel, stride, dilation)
    if before != after or any(2 * b > k for b, k in zip(before, kernel, strict=True)):
        x, before = _padded(op, x, before, after, float("-inf")), [0] * count
    result: Value = op.build.call(
        _MAX_POOL[count], x, kernel, stride, before, dilation, bool(op.attr_int("ceil_mode", 0))
    )
    return result


@onnx_op("AveragePool")
def average_pool(op: Op) -> Result:
    count, x = _spatial(op), op.input(0)
    kernel = op.attr_ints("kernel_shape") or []
    stride = op.attr_ints("strides") or [1] * count
    dilation = op.attr_ints("dilations") or [1] * count
    include = bool(op.attr_int("count_include_pad", 0))
    if any(d != 1 for d in dilation):
        raise UnsupportedError("dilated average pooling is not understood")
    before, after = _padding(op, kernel, stride, dilation)
    ceil = bool(op.attr_int("ceil_mode", 0))
    result: Value
    if before == after:
        result = op.build.call(_AVG_POOL[count], x, kernel, stride, before, ceil, include)
        return result
    padded = _padded(op, x, before, after, 0.0)
    result = op.build.call(_AVG_POOL[count], padded, kernel, stride, [0] * count, ceil, True)
    if include:
        return result
    inside = _padded(op, torch.ones(1, 1, *shape_of(x)[2:]), before, after, 0.0)
    share = op.build.call(_AVG_POOL[count], inside, kernel, stride, [0] * count, ceil, True)
    return binary(op.build, "Div", result, share)  # the mean over what is not padding


@onnx_op("GlobalAveragePool")
def global_average_pool(op: Op) -> Result:
    x = op.input(0)
    result: Value = op.build.call(aten.mean.dim, x, list(range(2, rank(x))), True)
    return result


@onnx_op("GlobalMaxPool")
def global_max_pool(op: Op) -> Result:
    x = op.input(0)
    result: Value = op.build.call(aten.amax.default, x, list(range(2, rank(x))), True)
    return result


@onnx_op("LRN")
def local_response_norm(op: Op) -> Result:
    """``x / (bias + alpha / size * sum of squares over size channels) ** beta``."""
    x, build, size = op.input(0), op.build, op.attr_int("size", 1)
    if not fake(x).is_floating_point() or rank(x) != 4:
        raise UnsupportedError("only (batch, channels, height, width) is understood")
    squares = build.call(aten.unsqueeze.default, build.call(aten.mul.Tensor, x, x), 1)
    before = (size - 1) // 2
    padded = build.call(aten.constant_pad_nd.default, squares, [0, 0, 0, 0, before, size - 1 - before], 0.0)
    means = build.call(aten.avg_pool3d.default, padded, [size, 1, 1], [1, 1, 1])
    scaled = build.call(aten.mul.Tensor, build.call(aten.squeeze.dims, means, [1]), op.attr_float("alpha", 1e-4))
    base = build.call(aten.add.Tensor, scaled, op.attr_float("bias", 1.0))
    result: Value = build.call(
        aten.div.Tensor, x, build.call(aten.pow.Tensor_Scalar, base, op.attr_float("beta", 0.75))
    )
    return result
