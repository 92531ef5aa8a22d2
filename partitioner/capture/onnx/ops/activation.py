"""Activations and softmax."""

from __future__ import annotations

import math
from typing import Any

from partitioner.capture.onnx.builder import Value, aten, shape_of
from partitioner.capture.onnx.ops.elementwise import binary
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank

_PLAIN: dict[str, Any] = {
    "Relu": aten.relu.default, "Sigmoid": aten.sigmoid.default, "Tanh": aten.tanh.default,
    "Softplus": aten.softplus.default, "HardSwish": aten.hardswish.default, "Mish": aten.mish.default,
}  # fmt: skip


def _plain(op: Op) -> Result:
    result: Value = op.build.call(_PLAIN[op.node.op_type], op.input(0))
    return result


for _name in _PLAIN:
    onnx_op(_name)(_plain)


@onnx_op("Softsign")
def softsign(op: Op) -> Result:
    x = op.input(0)
    scale = op.build.call(aten.add.Tensor, op.build.call(aten.abs.default, x), 1)
    result: Value = op.build.call(aten.div.Tensor, x, scale)
    return result


@onnx_op("LeakyRelu")
def leaky_relu(op: Op) -> Result:
    result: Value = op.build.call(aten.leaky_relu.default, op.input(0), op.attr_float("alpha", 0.01))
    return result


@onnx_op("Elu")
def elu(op: Op) -> Result:
    result: Value = op.build.call(aten.elu.default, op.input(0), op.attr_float("alpha", 1.0))
    return result


@onnx_op("Celu")
def celu(op: Op) -> Result:
    result: Value = op.build.call(aten.celu.default, op.input(0), op.attr_float("alpha", 1.0))
    return result


@onnx_op("Selu")
def selu(op: Op) -> Result:
    """Defaults of the ONNX specification, which are those of torch."""
    alpha, gamma = op.attr_float("alpha", 1.6732632), op.attr_float("gamma", 1.050701)
    result: Value = op.build.call(aten.elu.default, op.input(0), alpha, gamma)
    return result


@onnx_op("ThresholdedRelu")
def thresholded_relu(op: Op) -> Result:
    result: Value = op.build.call(aten.threshold.default, op.input(0), op.attr_float("alpha", 1.0), 0)
    return result


@onnx_op("HardSigmoid")
def hard_sigmoid(op: Op) -> Result:
    slope, offset = op.attr_float("alpha", 0.2), op.attr_float("beta", 0.5)
    x = op.build.call(aten.add.Tensor, op.build.call(aten.mul.Tensor, op.input(0), slope), offset)
    result: Value = op.build.call(aten.clamp.default, x, 0, 1)
    return result


@onnx_op("PRelu")
def prelu(op: Op) -> Result:
    """``x if x > 0 else slope * x``; the slope broadcasts, torch wants one for each channel."""
    x, slope = op.build.align((op.input(0), op.input(1)))
    result: Value
    sizes = shape_of(slope)
    channels = shape_of(x)[1] if rank(x) > 1 else 1
    if math.prod(sizes) in (1, channels) and (math.prod(sizes) == 1 or sizes == (channels, *[1] * (rank(x) - 2))):
        flat = op.build.call(aten.reshape.default, slope, [math.prod(sizes)])
        result = op.build.call(aten.prelu.default, x, flat)
        return result
    negative = op.build.call(aten.clamp_max.default, x, 0)
    positive = op.build.call(aten.relu.default, x)
    return binary(op.build, "Add", positive, binary(op.build, "Mul", slope, negative))


@onnx_op("Gelu")
@onnx_op("Gelu", domain="com.microsoft")
def gelu(op: Op) -> Result:
    result: Value = op.build.call(aten.gelu.default, op.input(0), approximate=op.attr_str("approximate", "none"))
    return result


@onnx_op("FastGelu", domain="com.microsoft")
def fast_gelu(op: Op) -> Result:
    x, bias = op.input(0), op.optional(1)
    if bias is not None:
        x = binary(op.build, "Add", x, bias)
    result: Value = op.build.call(aten.gelu.default, x, approximate="tanh")
    return result


@onnx_op("BiasGelu", domain="com.microsoft")
def bias_gelu(op: Op) -> Result:
    result: Value = op.build.call(aten.gelu.default, binary(op.build, "Add", op.input(0), op.input(1)))
    return result


@onnx_op("QuickGelu", domain="com.microsoft")
@onnx_op("Swish")
def swish(op: Op) -> Result:
    """``x * sigmoid(alpha * x)``."""
    x = op.input(0)
    alpha = op.attr_float("alpha", 1.702 if op.node.op_type == "QuickGelu" else 1.0)
    result: Value
    if alpha == 1:
        result = op.build.call(aten.silu.default, x)
        return result
    gate = op.build.call(aten.sigmoid.default, op.build.call(aten.mul.Tensor, x, alpha))
    result = op.build.call(aten.mul.Tensor, x, gate)
    return result


@onnx_op("Softmax", "LogSoftmax")
def softmax(op: Op) -> Result:
    """Before opset 13 everything from ``axis`` on is one dim."""
    x, build = op.input(0), op.build
    target = aten.log_softmax.int if op.node.op_type == "LogSoftmax" else aten.softmax.int
    axis = op.axis(-1 if op.version >= 13 else 1)
    result: Value
    if op.version >= 13 or axis == rank(x) - 1:
        result = build.call(target, x, axis)
        return result
    sizes = shape_of(x)
    flat = build.call(aten.reshape.default, x, [math.prod(sizes[:axis]), math.prod(sizes[axis:])])
    result = build.call(aten.reshape.default, build.call(target, flat, -1), list(sizes))
    return result
