"""Reductions over dims, cumulative sums, and the choice of the largest."""

from __future__ import annotations

import torch

from partitioner.capture.onnx.builder import Value, aten, dtype_of_value, shape_of
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.errors import UnsupportedError

_AXES_INPUT_SINCE = {"ReduceSum": 13}
"""Opset from which the axes are an input; 18 for the other reductions."""


def _axes(op: Op) -> list[int] | None:
    """The dims to reduce, counted from the front; None if nothing is to be done."""
    count = rank(op.input(0))
    if op.version >= _AXES_INPUT_SINCE.get(op.node.op_type, 18):
        axes = op.ints(1, "axes")
        if not axes and op.attr_int("noop_with_empty_axes", 0):
            return None
    else:
        axes = op.attr_ints("axes")
    return sorted(a % count for a in axes) if axes else list(range(count))


@onnx_op("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceLogSumExp", "ReduceSumSquare", "ReduceLogSum")
@onnx_op("ReduceL1", "ReduceL2", "ReduceProd")
def reduce(op: Op) -> Result:
    x, keep = op.input(0), bool(op.attr_int("keepdims", 1))
    axes = _axes(op)
    if axes is None:
        return x
    kind, build = op.node.op_type, op.build
    result: Value
    if kind == "ReduceProd":
        result = x
        for axis in reversed(axes):
            result = build.call(aten.prod.dim_int, result, axis, keep, dtype=dtype_of_value(x))
        return result
    if kind in ("ReduceL1", "ReduceL2"):
        result = build.call(aten.linalg_vector_norm.default, x, 1 if kind == "ReduceL1" else 2, axes, keep)
        return result
    if kind == "ReduceSumSquare":
        x = build.call(aten.mul.Tensor, x, x)
    target = {
        "ReduceMean": aten.mean.dim,
        "ReduceMax": aten.amax.default,
        "ReduceMin": aten.amin.default,
        "ReduceLogSumExp": aten.logsumexp.default,
    }.get(kind, aten.sum.dim_IntList)
    extra = (
        {"dtype": dtype_of_value(x)}
        if target is aten.sum.dim_IntList and not dtype_of_value(x).is_floating_point
        else {}
    )
    result = build.call(target, x, axes, keep, **extra)
    return build.call(aten.log.default, result) if kind == "ReduceLogSum" else result


@onnx_op("ArgMax", "ArgMin")
def arg_extreme(op: Op) -> Result:
    if op.attr_int("select_last_index", 0):
        raise UnsupportedError("select_last_index=1 is not understood")
    target = aten.argmax.default if op.node.op_type == "ArgMax" else aten.argmin.default
    result: Value = op.build.call(target, op.input(0), op.axis(0), bool(op.attr_int("keepdims", 1)))
    return result


@onnx_op("CumSum")
def cumulative_sum(op: Op) -> Result:
    x, axis = op.input(0), op.number(1, "axis")
    assert axis is not None
    dim = int(axis) % rank(x)
    build = op.build
    reverse, exclusive = op.attr_int("reverse", 0), op.attr_int("exclusive", 0)
    if reverse:
        x = build.call(aten.flip.default, x, [dim])
    result: Value = build.call(aten.cumsum.default, x, dim, dtype=dtype_of_value(x))
    if exclusive:
        result = build.call(aten.sub.Tensor, result, x)
    return build.call(aten.flip.default, result, [dim]) if reverse else result


@onnx_op("TopK")
def top_k(op: Op) -> Result:
    count = op.attr_int("k", 0) if op.version < 10 else op.number(1, "k")
    assert count is not None
    values, indices = op.build.call(
        aten.topk.default, op.input(0), int(count), op.axis(-1),
        bool(op.attr_int("largest", 1)), bool(op.attr_int("sorted", 1)),
    )  # fmt: skip
    return values, indices


@onnx_op("NonZero")
def non_zero(op: Op) -> Result:
    value = op.constant(0, "input")
    assert value is not None
    return torch.nonzero(value, as_tuple=False).t().contiguous()


@onnx_op("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def classification_loss(op: Op) -> Result:
    """Losses of training exports: scores (N, classes, ...), labels (N, ...)."""
    if op.uses_output(1):
        raise UnsupportedError("its log_prob output is used")
    scores, labels, weight = op.input(0), op.input(1), op.optional(2)
    reduction = {"none": 0, "mean": 1, "sum": 2}[op.attr_str("reduction", "mean")]
    ignore = op.attr_int("ignore_index", -100)
    if len(shape_of(labels)) and dtype_of_value(labels) != torch.int64:
        labels = op.build.cast(labels, torch.int64)
    cross_entropy = op.node.op_type == "SoftmaxCrossEntropyLoss"
    target = aten.cross_entropy_loss.default if cross_entropy else aten.nll_loss_nd.default
    result: Value = op.build.call(target, scores, labels, weight, reduction, ignore)
    return result
