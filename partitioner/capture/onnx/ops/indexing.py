"""Reading and writing by index: embeddings, gathers, scatters."""

from __future__ import annotations

import math

import torch
from torch import fx

from partitioner.capture.onnx.builder import Builder, Value, aten, dtype_of_value, fake, shape_of
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.errors import TableError, UnsupportedError


@onnx_op("Gather")
def gather(op: Op) -> Result:
    data, indices, axis = op.input(0), op.input(1), op.axis(0)
    result: Value
    if isinstance(indices, torch.Tensor) and indices.dim() == 0:
        result = op.build.call(aten.select.int, data, axis, int(indices))
        return result
    if (
        isinstance(data, fx.Node)
        and data.op == "get_attr"
        and rank(data) == 2
        and axis == 0
        and fake(data).is_floating_point()
    ):
        _refuse_beyond(indices, shape_of(data)[0])
        result = op.build.call(aten.embedding.default, data, indices)
        return result
    if isinstance(indices, torch.Tensor) and indices.dim() == 1 and (indices.numel() == 0 or int(indices.min()) >= 0):
        result = op.build.call(aten.index_select.default, data, axis, indices)
        return result
    result = op.build.call(aten.index.Tensor, data, [*([None] * axis), indices])
    return result


def _refuse_beyond(indices: Value, rows: int) -> None:
    if isinstance(indices, torch.Tensor) and indices.numel() and int(indices.max()) >= rows:
        longest = int(indices.max()) + 1
        raise TableError(
            f"row {longest - 1} is read from a table of {rows} rows", rows=rows, hint=f"say --seq {rows} or less"
        )


def _wrapped(build: Builder, indices: Value, size: int) -> Value:
    """ONNX counts negative indices from the end; aten.gather and scatter do not."""
    if isinstance(indices, torch.Tensor):
        return torch.where(indices < 0, indices + size, indices).to(torch.int64)
    if dtype_of_value(indices) != torch.int64:
        indices = build.cast(indices, torch.int64)
    result: Value = build.call(aten.remainder.Scalar, indices, size)
    return result


@onnx_op("GatherElements")
def gather_elements(op: Op) -> Result:
    axis = op.axis(0)
    indices = _wrapped(op.build, op.input(1), shape_of(op.input(0))[axis])
    result: Value = op.build.call(aten.gather.default, op.input(0), axis, indices)
    return result


def _coordinates(build: Builder, data: Value, indices: Value, batch_dims: int) -> list[Value]:
    """Index tensors, one for each leading dim of ``data``, that broadcast together."""
    sizes = shape_of(indices)
    coordinates: list[Value] = []
    for dim in range(batch_dims):
        shape = [1] * (len(sizes) - 1)
        shape[dim] = shape_of(data)[dim]
        coordinates.append(torch.arange(shape_of(data)[dim]).reshape(shape))
    for i in range(sizes[-1]):
        coordinates.append(build.call(aten.select.int, indices, -1, i))
    return coordinates


@onnx_op("GatherND")
def gather_nd(op: Op) -> Result:
    data, indices = op.input(0), op.input(1)
    coordinates = _coordinates(op.build, data, indices, op.attr_int("batch_dims", 0))
    result: Value = op.build.call(aten.index.Tensor, data, coordinates)
    return result


@onnx_op("ScatterND")
def scatter_nd(op: Op) -> Result:
    reduction = op.attr_str("reduction", "none")
    if reduction not in ("none", "add"):
        raise UnsupportedError(f"reduction={reduction} is not understood")
    data, updates = op.build.align((op.input(0), op.input(2)))
    coordinates = _coordinates(op.build, data, op.input(1), 0)
    result: Value = op.build.call(aten.index_put.default, data, coordinates, updates, reduction == "add")
    return result


@onnx_op("ScatterElements", "Scatter")
def scatter_elements(op: Op) -> Result:
    data, updates = op.build.align((op.input(0), op.input(2)))
    axis = op.axis(0)
    indices = _wrapped(op.build, op.input(1), shape_of(data)[axis])
    reduction = op.attr_str("reduction", "none")
    result: Value
    if reduction == "none":
        result = op.build.call(aten.scatter.src, data, axis, indices, updates)
    elif reduction == "add":
        result = op.build.call(aten.scatter_add.default, data, axis, indices, updates)
    else:
        names = {"mul": "prod", "max": "amax", "min": "amin"}
        result = op.build.call(aten.scatter_reduce.two, data, axis, indices, updates, names[reduction])
    return result


@onnx_op("Compress")
def compress(op: Op) -> Result:
    condition = op.constant(1, "condition")
    assert condition is not None
    data = op.input(0)
    if op.attr("axis") is None:
        data, axis = op.build.call(aten.reshape.default, data, [math.prod(shape_of(data))]), 0
    else:
        axis = op.axis(0)
    result: Value = op.build.call(aten.index_select.default, data, axis, torch.nonzero(condition).reshape(-1))
    return result
