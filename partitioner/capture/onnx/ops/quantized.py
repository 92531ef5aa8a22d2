"""Weights stored in few bits: frozen buffers that are widened where they are read."""

from __future__ import annotations

import torch
from torch import fx

from partitioner.capture.onnx.builder import Value, aten, dtype_of_value, shape_of
from partitioner.capture.onnx.ops.elementwise import binary
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.errors import UnsupportedError

PACKED = "packed"
"""``meta`` key of a buffer of four-bit values, two a byte: (shape, whether signed)."""


def _unpacked(op: Op, node: fx.Node) -> Value:
    """(ceil(n / 2),) bytes, the first value in the low bits -> the values themselves, int8."""
    build = op.build
    shape, signed = node.meta[PACKED]
    low = build.call(aten.bitwise_and.Scalar, node, 15)
    high = build.call(aten.bitwise_right_shift.Tensor_Scalar, node, 4)
    both = build.call(aten.reshape.default, build.call(aten.stack.default, [low, high], 1), [-1])
    count = torch.Size(shape).numel()
    cut = build.call(aten.slice.Tensor, both, 0, 0, count)
    values = build.call(aten.reshape.default, build.cast(cut, torch.int8), list(shape))
    if not signed:
        return values  # type: ignore[no-any-return]  # one tensor
    raised = build.call(aten.bitwise_xor.Scalar, values, 8)  # two's complement of four bits: flip the sign bit, ...
    result: Value = build.call(aten.sub.Tensor, raised, 8)  # ... then shift down
    return result


def _spread(op: Op, table: Value, like: Value, axis: int, block: int) -> Value:
    """A scale or zero point for every element: one for all, one for each slice of ``axis``, or one for each block."""
    if rank(table) == 0 or shape_of(table) == (1,):
        return table
    result: Value
    if block:
        result = op.build.call(aten.repeat_interleave.self_int, table, block, axis)
        result = op.build.call(aten.slice.Tensor, result, axis, 0, shape_of(like)[axis])
        return result
    sizes = [1] * rank(like)
    sizes[axis] = shape_of(table)[0]
    result = op.build.call(aten.reshape.default, table, sizes)
    return result


@onnx_op("DequantizeLinear")
def dequantize(op: Op) -> Result:
    """``(x - zero_point) * scale``."""
    build, x, scale = op.build, op.input(0), op.input(1)
    if isinstance(x, fx.Node) and x.op != "get_attr":
        raise UnsupportedError(
            "it widens an activation that was rounded to integers, so no gradient passes",
            hint="export the model before quantization",
        )
    if isinstance(x, fx.Node) and PACKED in x.meta:
        x = _unpacked(op, x)
    axis, block = op.attr_int("axis", 1) % max(rank(x), 1), op.attr_int("block_size", 0)
    wide = build.cast(build.lift(x), dtype_of_value(scale))
    zero = op.optional(2)
    if zero is not None:
        if isinstance(zero, fx.Node) and PACKED in zero.meta:
            zero = _unpacked(op, zero)
        wide = binary(build, "Sub", wide, build.cast(_spread(op, zero, wide, axis, block), dtype_of_value(scale)))
    return build.cast(binary(build, "Mul", wide, _spread(op, scale, wide, axis, block)), build.compute_dtype)
