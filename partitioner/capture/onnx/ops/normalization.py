"""Normalizations."""

from __future__ import annotations

import torch

from partitioner.capture.onnx.builder import Value, aten, dtype_of_value, shape_of
from partitioner.capture.onnx.ops.elementwise import binary
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.errors import UnsupportedError

EVAL_BATCH_NORM = "batch normalization keeps the file's statistics fixed (as buffers); its scale and shift are trained"


def _no_statistics(op: Op) -> None:
    if any(op.uses_output(i) for i in range(1, 3)):
        raise UnsupportedError("its mean or deviation output is used")


@onnx_op("BatchNormalization")
def batch_normalization(op: Op) -> Result:
    """Statistics of the file in the inference form; statistics of the batch where ``training_mode`` says so."""
    x, scale, shift, mean, variance = op.build.align([op.input(i) for i in range(5)])
    training = bool(op.attr_int("training_mode", 0))
    if any(op.uses_output(i) for i in range(1, 5)):
        raise UnsupportedError(
            "its updated statistics are used", hint="export without the running statistics as outputs"
        )
    lifted = [None, None] if training else [mean, variance]
    result: Value = op.build.call(
        aten.batch_norm.default, x, scale, shift, *lifted, training,
        1 - op.attr_float("momentum", 0.9), op.attr_float("epsilon", 1e-5), False,
    )  # fmt: skip
    return result


@onnx_op("InstanceNormalization")
def instance_normalization(op: Op) -> Result:
    x, scale, shift = op.build.align([op.input(i) for i in range(3)])
    result: Value = op.build.call(
        aten.instance_norm.default, x, scale, shift, None, None, True, 0.0, op.attr_float("epsilon", 1e-5), False
    )
    return result


def _layer_norm(op: Op, x: Value, scale: Value, shift: Value | None, axis: int, epsilon: float) -> Value:
    dims = list(shape_of(x)[axis:])
    values = op.build.align([v for v in (x, scale, shift) if v is not None])
    result: Value
    if shape_of(scale) == tuple(dims) and (shift is None or shape_of(shift) == tuple(dims)):
        result = op.build.call(
            aten.layer_norm.default, values[0], dims, *values[1:], *([None] if shift is None else []), epsilon
        )
        return result
    result = op.build.call(aten.layer_norm.default, values[0], dims, None, None, epsilon)
    result = binary(op.build, "Mul", result, values[1])
    return result if shift is None else binary(op.build, "Add", result, values[2])


@onnx_op("LayerNormalization")
def layer_normalization(op: Op) -> Result:
    _no_statistics(op)
    return _layer_norm(op, op.input(0), op.input(1), op.optional(2), op.axis(-1), op.attr_float("epsilon", 1e-5))


def _rms_norm(op: Op, x: Value, scale: Value, axis: int, epsilon: float) -> Value:
    x, scale = op.build.align((x, scale))
    dims = list(shape_of(x)[axis:])
    result: Value
    if shape_of(scale) == tuple(dims):
        result = op.build.call(aten.rms_norm.default, x, dims, scale, epsilon)
        return result
    result = op.build.call(aten.rms_norm.default, x, dims, None, epsilon)
    return binary(op.build, "Mul", result, scale)


@onnx_op("RMSNormalization", "SimplifiedLayerNormalization")
def rms_normalization(op: Op) -> Result:
    """``SimplifiedLayerNormalization`` is what ONNX Runtime called it before ONNX had it."""
    _no_statistics(op)
    return _rms_norm(op, op.input(0), op.input(1), op.axis(-1), op.attr_float("epsilon", 1e-5))


def _skip(op: Op, bias: Value | None) -> Value:
    total = binary(op.build, "Add", op.input(0), op.input(1))
    return total if bias is None else binary(op.build, "Add", total, bias)


def _skip_results(op: Op, result: Value, total: Value) -> Result:
    _no_statistics(op)
    return result, None, None, total


@onnx_op("SkipLayerNormalization", domain="com.microsoft")
def skip_layer_normalization(op: Op) -> Result:
    total = _skip(op, op.optional(4))
    normal = _layer_norm(op, total, op.input(2), op.optional(3), rank(total) - 1, op.attr_float("epsilon", 1e-12))
    return _skip_results(op, normal, total)


@onnx_op("SkipSimplifiedLayerNormalization", domain="com.microsoft")
def skip_rms_normalization(op: Op) -> Result:
    total = _skip(op, op.optional(3))
    normal = _rms_norm(op, total, op.input(2), rank(total) - 1, op.attr_float("epsilon", 1e-12))
    return _skip_results(op, normal, total)


@onnx_op("GroupNormalization")
def group_normalization(op: Op) -> Result:
    """Opset 18 has one scale for each group, opset 21 one for each channel."""
    x, scale, shift = op.build.align([op.input(i) for i in range(3)])
    groups, epsilon, channels = op.attr_int("num_groups", 1), op.attr_float("epsilon", 1e-5), shape_of(x)[1]
    result: Value
    if shape_of(scale) == (channels,):
        result = op.build.call(aten.group_norm.default, x, groups, scale, shift, epsilon)
        return result
    scale, shift = (op.build.call(aten.repeat_interleave.self_int, v, channels // groups) for v in (scale, shift))
    result = op.build.call(aten.group_norm.default, x, groups, scale, shift, epsilon)
    return result


@onnx_op("LpNormalization")
def lp_normalization(op: Op) -> Result:
    x, axis = op.input(0), op.axis(-1)
    length = op.build.call(aten.linalg_vector_norm.default, x, op.attr_int("p", 2), [axis], True)
    result: Value = op.build.call(aten.div.Tensor, x, length)
    return result


@onnx_op("MeanVarianceNormalization")
def mean_variance_normalization(op: Op) -> Result:
    """``(x - mean) / (sqrt(variance) + 1e-9)``, the constant of the ONNX specification."""
    x, build = op.input(0), op.build
    axes = op.attr_ints("axes") or [0, 2, 3]
    centred = build.call(aten.sub.Tensor, x, build.call(aten.mean.dim, x, axes, True))
    squares = build.call(aten.mul.Tensor, centred, centred)
    deviation = build.call(aten.sqrt.default, build.call(aten.mean.dim, squares, axes, True))
    floor = 1e-9 if dtype_of_value(x) in (torch.float32, torch.float64) else 1e-6  # 1e-9 vanishes in half precision
    result: Value = build.call(aten.div.Tensor, centred, build.call(aten.add.Tensor, deviation, floor))
    return result
