"""Matrix products. Weights keep the layout that the file stores: (in, out) for MatMul, (out, in) under ``transB``."""

from __future__ import annotations

from typing import Any

from torch import fx

from partitioner.capture.onnx.builder import Builder, Value, aten, shape_of
from partitioner.capture.onnx.ops.elementwise import binary
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.errors import UnsupportedError


@onnx_op("MatMul")
def matmul(op: Op) -> Result:
    left, right = op.build.align((op.input(0), op.input(1)))
    result: Value = op.build.call(aten.matmul.default, left, right)
    return result


def _turned(build: Builder, value: Value, flag: int) -> Value:
    result: Value = build.call(aten.t.default, value) if flag else value
    return result


@onnx_op("Gemm")
def gemm(op: Op) -> Result:
    """``alpha * A' B' + beta * C``."""
    build = op.build
    alpha, beta = op.attr_float("alpha", 1.0), op.attr_float("beta", 1.0)
    bias = op.optional(2)
    values = build.align([v for v in (op.input(0), op.input(1), bias) if v is not None])
    left, right = _turned(build, values[0], op.attr_int("transA", 0)), values[1]
    bias = values[2] if bias is not None and beta != 0 else None
    trans_b = op.attr_int("transB", 0)
    width = shape_of(right)[0 if trans_b else 1]
    result: Value
    plain = bias is None or shape_of(bias) == (width,)
    if trans_b and alpha == 1 and (bias is None or (plain and beta == 1)):
        result = build.call(aten.linear.default, left, right, *([] if bias is None else [bias]))
        return result
    right = _turned(build, right, trans_b)
    if bias is not None and isinstance(left, fx.Node) and plain:
        scaled: dict[str, Any] = {"beta": beta, "alpha": alpha} if (alpha, beta) != (1, 1) else {}
        result = build.call(aten.addmm.default, bias, left, right, **scaled)
        return result
    result = build.call(aten.mm.default, left, right)
    if alpha != 1:
        result = build.call(aten.mul.Tensor, result, alpha)
    if bias is not None:
        scaled_bias = build.call(aten.mul.Tensor, bias, beta) if beta != 1 else bias
        result = binary(build, "Add", result, scaled_bias)
    return result


@onnx_op("Einsum")
def einsum(op: Op) -> Result:
    equation = op.attr_str("equation", "").replace(" ", "")
    if not equation:
        raise UnsupportedError("it has no equation")
    values = op.build.align([op.input(i) for i in range(op.num_inputs)])
    result: Value = op.build.call(aten.einsum.default, equation, values)
    return result


@onnx_op("FusedMatMul", domain="com.microsoft")
def fused_matmul(op: Op) -> Result:
    left, right = op.build.align((op.input(0), op.input(1)))
    if op.attr_int("transBatchA", 0) or op.attr_int("transBatchB", 0):
        raise UnsupportedError("transBatchA and transBatchB are not understood")
    if op.attr_int("transA", 0):
        left = op.build.call(aten.transpose.int, left, rank(left) - 2, rank(left) - 1)
    if op.attr_int("transB", 0):
        right = op.build.call(aten.transpose.int, right, rank(right) - 2, rank(right) - 1)
    result: Value = op.build.call(aten.matmul.default, left, right)
    alpha = op.attr_float("alpha", 1.0)
    return op.build.call(aten.mul.Tensor, result, alpha) if alpha != 1 else result
