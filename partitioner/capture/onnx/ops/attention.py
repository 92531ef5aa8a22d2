"""Attention and rotary embeddings as single operators (opset 23 and later, and ONNX Runtime's)."""

from __future__ import annotations

import math

import torch

from partitioner.capture.onnx.builder import Value, aten, dtype_of_value, shape_of
from partitioner.capture.onnx.ops.elementwise import binary
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.errors import UnsupportedError


def _heads(op: Op, x: Value, heads: int) -> Value:
    """(batch, seq, heads * size) -> (batch, heads, seq, size)."""
    batch, seq, width = shape_of(x)
    if not heads or width % heads:
        raise UnsupportedError(f"a width of {width} cannot be split into {heads} heads")
    split = op.build.call(aten.reshape.default, x, [batch, seq, heads, width // heads])
    result: Value = op.build.call(aten.transpose.int, split, 1, 2)
    return result


def _merged(op: Op, x: Value) -> Value:
    batch, heads, seq, size = shape_of(x)
    turned = op.build.call(aten.transpose.int, x, 1, 2)
    result: Value = op.build.call(aten.reshape.default, turned, [batch, seq, heads * size])
    return result


def _attend(
    op: Op, query: Value, key: Value, value: Value, mask: Value | None, causal: bool, scale: float | None
) -> Value:
    build = op.build
    query, key, value = build.align((query, key, value))
    grouped = shape_of(query)[1] != shape_of(key)[1]
    if mask is not None and causal:
        seen = torch.ones(shape_of(query)[2], shape_of(key)[2], dtype=torch.bool).tril()
        if dtype_of_value(mask) == torch.bool:
            mask = build.call(aten.logical_and.default, mask, seen)
        else:
            mask = build.call(aten.where.ScalarOther, seen, mask, float("-inf"))
        causal = False
    if mask is not None and dtype_of_value(mask) != torch.bool:
        mask = build.cast(mask, dtype_of_value(query))
    result: Value = build.call(
        aten.scaled_dot_product_attention.default, query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    return result


@onnx_op("Attention")
def attention(op: Op) -> Result:
    """(batch, heads, seq, size), or (batch, seq, heads * size) with the head counts as attributes."""
    if any(op.optional(i) is not None for i in (4, 5, 6)) or any(op.uses_output(i) for i in (1, 2, 3)):
        raise UnsupportedError("it keeps keys and values of earlier steps", hint="export the model without a cache")
    if op.attr_float("softcap", 0.0):
        raise UnsupportedError("softcap is not understood")
    query, key, value = op.input(0), op.input(1), op.input(2)
    flat = rank(query) == 3
    if flat:
        heads, kv_heads = op.attr_int("q_num_heads", 0), op.attr_int("kv_num_heads", 0)
        query, key, value = _heads(op, query, heads), _heads(op, key, kv_heads), _heads(op, value, kv_heads)
    scale = op.attr_float("scale", 0.0) or None
    out = _attend(op, query, key, value, op.optional(3), bool(op.attr_int("is_causal", 0)), scale)
    return _merged(op, out) if flat else out


@onnx_op("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(op: Op) -> Result:
    """Query, key and value of (batch, seq, width); the bias is that of all three in a row."""
    if any(op.optional(i) is not None for i in (6, 7)) or any(op.uses_output(i) for i in (1, 2)):
        raise UnsupportedError("it keeps keys and values of earlier steps", hint="export the model without a cache")
    if op.optional(4) is not None:
        raise UnsupportedError("key_padding_mask is not understood")
    if op.optional(1) is None or op.optional(2) is None:
        raise UnsupportedError("packed query, key and value are not understood")
    heads, bias = op.attr_int("num_heads", 0), op.optional(3)
    parts, start = [], 0
    for i in range(3):
        part = op.input(i)
        width = shape_of(part)[-1]
        if bias is not None:
            piece = op.build.call(aten.slice.Tensor, bias, 0, start, start + width)
            part = binary(op.build, "Add", part, piece)
        start += width
        parts.append(_heads(op, part, heads))
    scale = op.attr_float("scale", 0.0) or None
    causal = bool(op.attr_int("unidirectional", 0))
    return _merged(op, _attend(op, parts[0], parts[1], parts[2], op.optional(5), causal, scale))


@onnx_op("RotaryEmbedding")
def rotary_embedding(op: Op) -> Result:
    """Rotate pairs of channels: ``(a cos - b sin, b cos + a sin)``; pairs are halves, or neighbours if interleaved."""
    build, x = op.build, op.input(0)
    flat = rank(x) == 3
    if flat:
        x = _heads(op, x, op.attr_int("num_heads", 0))
    width = op.attr_int("rotary_embedding_dim", 0) or shape_of(x)[-1]
    tables = [op.input(1), op.input(2)]
    positions = op.optional(3)
    if positions is not None:
        tables = [build.call(aten.embedding.default, build.lift(t), positions) for t in tables]
    cos, sin = (build.call(aten.unsqueeze.default, t, 1) for t in tables)
    turned = build.call(aten.slice.Tensor, x, -1, 0, width)
    if op.attr_int("interleaved", 0):
        first = build.call(aten.slice.Tensor, turned, -1, 0, width, 2)
        second = build.call(aten.slice.Tensor, turned, -1, 1, width, 2)
    else:
        first = build.call(aten.slice.Tensor, turned, -1, 0, width // 2)
        second = build.call(aten.slice.Tensor, turned, -1, width // 2, width)
    real = binary(build, "Sub", binary(build, "Mul", first, cos), binary(build, "Mul", second, sin))
    imaginary = binary(build, "Add", binary(build, "Mul", first, sin), binary(build, "Mul", second, cos))
    result: Value
    if op.attr_int("interleaved", 0):
        stacked = build.call(aten.stack.default, [real, imaginary], -1)
        result = build.call(aten.reshape.default, stacked, [*shape_of(x)[:-1], width])
    else:
        result = build.call(aten.cat.default, [real, imaginary], -1)
    if width < math.prod(shape_of(x)[-1:]):
        rest = build.call(aten.slice.Tensor, x, -1, width, shape_of(x)[-1])
        result = build.call(aten.cat.default, [result, rest], -1)
    return _merged(op, result) if flat else result
