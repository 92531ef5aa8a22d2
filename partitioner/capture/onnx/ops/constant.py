"""Operators that make values out of nothing or out of sizes, and those that pass values on."""

from __future__ import annotations

import torch
from onnx import AttributeProto

from partitioner.capture.onnx.builder import Value, aten, fake, scalar_of, shape_of
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op
from partitioner.capture.onnx.tensors import stored_tensor, torch_dtype
from partitioner.errors import UnsupportedError


@onnx_op("Constant")
def constant(op: Op) -> Result:
    for attribute in op.node.attribute:
        if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
            return stored_tensor(attribute.t, op.folder, op.node.output[0]).load()
        if attribute.name == "value_float":
            return torch.tensor(attribute.f, dtype=torch.float32)
        if attribute.name == "value_floats":
            return torch.tensor(list(attribute.floats), dtype=torch.float32)
        if attribute.name == "value_int":
            return torch.tensor(attribute.i, dtype=torch.int64)
        if attribute.name == "value_ints":
            return torch.tensor(list(attribute.ints), dtype=torch.int64)
    kinds = ", ".join(a.name for a in op.node.attribute) or "nothing"
    raise UnsupportedError(f"it holds {kinds}, which is not a dense tensor")


@onnx_op("ConstantOfShape")
def constant_of_shape(op: Op) -> Result:
    sizes = op.ints(0, "shape") or []
    value = op.attr_tensor("value")
    fill = torch.zeros(1) if value is None else value
    result: Value = op.build.call(aten.full.default, sizes, fill.reshape(-1)[0].item(), dtype=fill.dtype)
    return result


@onnx_op("Range")
def arange(op: Op) -> Result:
    start, limit, step = op.number(0, "start"), op.number(1, "limit"), op.number(2, "step")
    assert start is not None
    assert limit is not None
    assert step is not None
    result: Value = op.build.call(aten.arange.start_step, start, limit, step, dtype=fake(op.input(0)).dtype)
    return result


@onnx_op("EyeLike")
def eye_like(op: Op) -> Result:
    rows, columns = shape_of(op.input(0))
    code = op.attr_int("dtype", 0)
    dtype = torch_dtype(code, "its dtype") if code else fake(op.input(0)).dtype
    eye = op.build.call(aten.eye.m, rows, columns, dtype=dtype)
    offset = op.attr_int("k", 0)
    if not offset:
        return eye  # type: ignore[no-any-return]  # one tensor
    ones = torch.ones(rows, columns, dtype=dtype)
    return torch.tril(torch.triu(ones, offset), offset)


@onnx_op("Shape")
def shape(op: Op) -> Result:
    sizes = shape_of(op.input(0))
    start, end = op.attr_int("start", 0), op.attr_int("end", len(sizes))
    return torch.tensor(sizes[slice(start, end)], dtype=torch.int64)


@onnx_op("Size")
def size(op: Op) -> Result:
    return torch.tensor(fake(op.input(0)).numel(), dtype=torch.int64)


@onnx_op("Identity", "StopGradient")
def identity(op: Op) -> Result:
    return op.input(0)


@onnx_op("OneHot")
def one_hot(op: Op) -> Result:
    depth = op.number(1, "depth")
    values = op.constant(2, "values")
    assert depth is not None
    assert values is not None
    off, on = (scalar_of(v) for v in values.reshape(-1))
    indices = op.input(0)
    axis = op.attr_int("axis", -1)
    steps = torch.arange(int(depth))
    wrapped = op.build.call(aten.remainder.Scalar, indices, int(depth))
    hot = op.build.call(aten.eq.Tensor, op.build.call(aten.unsqueeze.default, wrapped, -1), steps)
    scaled = op.build.cast(hot, values.dtype)
    if (off, on) != (0, 1):
        scaled = op.build.call(aten.add.Tensor, op.build.call(aten.mul.Tensor, scaled, on - off), off)
    last = len(shape_of(scaled)) - 1
    if axis in (-1, last):
        return scaled
    result: Value = op.build.call(aten.movedim.int, scaled, last, axis)
    return result


@onnx_op("Dropout")
def dropout(op: Op) -> Result:
    """Real dropout only where the file says that it trains; the inference form passes values on."""
    x = op.input(0)
    training = bool(op.number(2, "training_mode")) if op.version >= 12 and op.num_inputs > 2 else False
    if op.uses_output(1):
        mask = torch.ones((), dtype=torch.bool).expand(shape_of(x))
        if training:
            raise UnsupportedError("its mask is used", hint="export without the mask output")
        return x, mask
    if not training:
        return x
    ratio = op.number(1, "ratio")
    result: Value = op.build.call(aten.dropout.default, x, 0.5 if ratio is None else float(ratio), True)
    return result
