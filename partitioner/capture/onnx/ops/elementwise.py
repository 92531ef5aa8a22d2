"""Arithmetic, comparisons and logic, one element at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from partitioner.capture.onnx.builder import Builder, Value, aten, dtype_of_value, fake, scalar_of, shape_of
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.capture.onnx.tensors import torch_dtype
from partitioner.errors import UnsupportedError

_UNARY: dict[str, Any] = {
    "Neg": aten.neg.default, "Abs": aten.abs.default, "Sqrt": aten.sqrt.default, "Exp": aten.exp.default,
    "Log": aten.log.default, "Reciprocal": aten.reciprocal.default, "Erf": aten.erf.default, "Sin": aten.sin.default,
    "Cos": aten.cos.default, "Tan": aten.tan.default, "Asin": aten.asin.default, "Acos": aten.acos.default,
    "Atan": aten.atan.default, "Sinh": aten.sinh.default, "Cosh": aten.cosh.default, "Asinh": aten.asinh.default,
    "Acosh": aten.acosh.default, "Atanh": aten.atanh.default, "Ceil": aten.ceil.default, "Floor": aten.floor.default,
    "Round": aten.round.default, "Sign": aten.sign.default, "Not": aten.logical_not.default,
    "BitwiseNot": aten.bitwise_not.default, "IsNaN": aten.isnan.default,
}  # fmt: skip
_TENSOR_OPS: dict[str, Any] = {
    "Add": aten.add.Tensor, "Sub": aten.sub.Tensor, "Mul": aten.mul.Tensor, "Div": aten.div.Tensor,
    "Equal": aten.eq.Tensor, "Less": aten.lt.Tensor, "Greater": aten.gt.Tensor, "LessOrEqual": aten.le.Tensor,
    "GreaterOrEqual": aten.ge.Tensor, "And": aten.logical_and.default, "Or": aten.logical_or.default,
    "Xor": aten.logical_xor.default, "BitwiseAnd": aten.bitwise_and.Tensor, "BitwiseOr": aten.bitwise_or.Tensor,
    "BitwiseXor": aten.bitwise_xor.Tensor,
}  # fmt: skip
_WITH_SCALAR: dict[str, Any] = {
    "Add": aten.add.Tensor, "Sub": aten.sub.Tensor, "Mul": aten.mul.Tensor, "Div": aten.div.Tensor,
    "Equal": aten.eq.Scalar, "Less": aten.lt.Scalar, "Greater": aten.gt.Scalar, "LessOrEqual": aten.le.Scalar,
    "GreaterOrEqual": aten.ge.Scalar,
}  # fmt: skip
_SWAPPED = {
    "Add": "Add", "Mul": "Mul", "Equal": "Equal", "Less": "Greater", "Greater": "Less",
    "LessOrEqual": "GreaterOrEqual", "GreaterOrEqual": "LessOrEqual",
}  # fmt: skip


def literal(constant: Value, other: Value) -> float | int | bool | None:
    """A one-element constant that may be written as a number beside ``other``; None if it must stay a tensor."""
    if not isinstance(constant, torch.Tensor) or constant.numel() != 1 or constant.dim() > rank(other):
        return None
    return scalar_of(constant, dtype_of_value(other))


def _unary(op: Op) -> Result:
    result: Value = op.build.call(_UNARY[op.node.op_type], op.input(0))
    return result


for _name in _UNARY:
    onnx_op(_name)(_unary)


def binary(build: Builder, name: str, left: Value, right: Value) -> Value:
    """Apply ``Add``, ``Less`` and so on; constants of one element become numbers in the code."""
    result: Value
    given = (left, right)
    left, right = build.align(given)
    if isinstance(left, fx.Node) and name in _WITH_SCALAR and (number := literal(given[1], left)) is not None:
        target = _integer_division(name, left) or _WITH_SCALAR[name]
        extra = {"rounding_mode": "trunc"} if target is aten.div.Tensor_mode else {}
        result = build.call(target, left, number, **extra)
        return result
    if isinstance(right, fx.Node) and (number := literal(given[0], right)) is not None:
        if name in _SWAPPED:
            result = build.call(_WITH_SCALAR[_SWAPPED[name]], right, number)
            return result
        if name == "Sub":
            result = build.call(aten.rsub.Scalar, right, number)
            return result
        if name == "Div" and fake(right).is_floating_point():
            inverse: Value = build.call(aten.reciprocal.default, right)
            return inverse if number == 1 else build.call(aten.mul.Tensor, inverse, number)
    if target := _integer_division(name, left):
        result = build.call(target, left, right, rounding_mode="trunc")
        return result
    result = build.call(_TENSOR_OPS[name], left, right)
    return result


def _integer_division(name: str, left: Value) -> Any:
    """ONNX divides integers towards zero."""
    return aten.div.Tensor_mode if name == "Div" and not fake(left).is_floating_point() else None


def _binary(op: Op) -> Result:
    return binary(op.build, op.node.op_type, op.input(0), op.input(1))


for _name in _TENSOR_OPS:
    onnx_op(_name)(_binary)


@onnx_op("Pow")
def power(op: Op) -> Result:
    base, exponent = op.input(0), op.input(1)
    result: Value
    if (number := literal(exponent, base)) is not None:
        if not fake(base).is_floating_point() and isinstance(number, float) and number.is_integer():
            number = int(number)
        if number == 1:
            return base
        result = op.build.call(aten.pow.Tensor_Scalar, base, number)
        return result
    if isinstance(exponent, fx.Node) and (number := literal(base, exponent)) is not None:
        result = op.build.call(aten.pow.Scalar, number, exponent)
        return result
    base, exponent = op.build.align((base, exponent))
    result = op.build.call(aten.pow.Tensor_Tensor, base, exponent)
    return result


@onnx_op("Mod")
def modulo(op: Op) -> Result:
    left, right = op.build.align((op.input(0), op.input(1)))
    number = literal(right, left)
    result: Value
    if op.attr_int("fmod", 0):
        target, operand = (
            (aten.fmod.Tensor, right)
            if number is None or isinstance(left, torch.Tensor)
            else (aten.fmod.Scalar, number)
        )
    else:
        target, operand = (
            (aten.remainder.Tensor, right)
            if number is None or isinstance(left, torch.Tensor)
            else (aten.remainder.Scalar, number)
        )
    result = op.build.call(target, left, operand)
    return result


def _extreme(build: Builder, left: Value, right: Value, *, largest: bool) -> Value:
    given = (left, right)
    left, right = build.align(given)
    for tensor, other in ((left, given[1]), (right, given[0])):
        if isinstance(tensor, fx.Node) and (number := literal(other, tensor)) is not None:
            bounded: Value = build.call(aten.clamp_min.default if largest else aten.clamp_max.default, tensor, number)
            return bounded
    result: Value = build.call(aten.maximum.default if largest else aten.minimum.default, left, right)
    return result


def _fold_left(op: Op, combine: Callable[[Value, Value], Value]) -> Value:
    return functools.reduce(combine, [op.input(i) for i in range(op.num_inputs)])


@onnx_op("Max")
def maximum(op: Op) -> Result:
    return _fold_left(op, lambda a, b: _extreme(op.build, a, b, largest=True))


@onnx_op("Min")
def minimum(op: Op) -> Result:
    return _fold_left(op, lambda a, b: _extreme(op.build, a, b, largest=False))


@onnx_op("Sum")
def total(op: Op) -> Result:
    return _fold_left(op, lambda a, b: binary(op.build, "Add", a, b))


@onnx_op("Mean")
def mean(op: Op) -> Result:
    summed = _fold_left(op, lambda a, b: binary(op.build, "Add", a, b))
    result: Value = op.build.call(aten.div.Tensor, summed, op.num_inputs)
    return result


@onnx_op("Clip")
def clip(op: Op) -> Result:
    x = op.input(0)
    if op.version < 11:
        low = op.attr_float("min", 0.0) if op.attr("min") else None
        high = op.attr_float("max", 0.0) if op.attr("max") else None
    else:
        low, high = op.number(1, "lower bound"), op.number(2, "upper bound")
    if low is None and high is None:
        return x
    result: Value = op.build.call(aten.clamp.default, x, low, high)
    return result


@onnx_op("Where")
def where(op: Op) -> Result:
    condition, given = op.input(0), (op.input(1), op.input(2))
    left, right = op.build.align(given)
    result: Value
    if isinstance(left, fx.Node) and (number := literal(given[1], left)) is not None:
        result = op.build.call(aten.where.ScalarOther, condition, left, number)
        return result
    if isinstance(right, fx.Node) and (number := literal(given[0], right)) is not None:
        result = op.build.call(aten.where.ScalarSelf, condition, number, right)
        return result
    if isinstance(condition, fx.Node) and dtype_of_value(left) == torch.float32:
        numbers = [
            scalar_of(v, op.build.compute_dtype)
            for v in (left, right)
            if isinstance(v, torch.Tensor) and literal(v, condition) is not None
        ]
        if len(numbers) == 2:
            result = op.build.call(aten.where.Scalar, condition, *numbers)
            return result
    result = op.build.call(aten.where.self, condition, left, right)
    return result


@onnx_op("IsInf")
def is_inf(op: Op) -> Result:
    x = op.input(0)
    positive, negative = op.attr_int("detect_positive", 1), op.attr_int("detect_negative", 1)
    target = (
        aten.isinf.default if positive and negative else aten.isposinf.default if positive else aten.isneginf.default
    )
    if not positive and not negative:
        return torch.zeros(shape_of(x), dtype=torch.bool)
    result: Value = op.build.call(target, x)
    return result


@onnx_op("BitShift")
def bit_shift(op: Op) -> Result:
    left = op.attr_str("direction", "LEFT") == "LEFT"
    target = aten.bitwise_left_shift.Tensor if left else aten.bitwise_right_shift.Tensor
    result: Value = op.build.call(target, op.input(0), op.input(1))
    return result


def cast_value(build: Builder, value: Value, wanted: torch.dtype) -> Value:
    """A Cast of the file, in a graph whose main floating dtype has become the compute dtype.

    A cast to the file's main dtype means "back to what the model computes in"; one from integers makes positions, which
    keep float32 until they meet activations.
    """
    held = dtype_of_value(value)
    if isinstance(value, torch.Tensor):
        return value.to(wanted)
    if wanted == build.model_dtype:
        if held == wanted:
            return value
        if held.is_floating_point or wanted != torch.float32:
            wanted = build.compute_dtype
    return build.cast(value, wanted)


@onnx_op("Cast")
def cast(op: Op) -> Result:
    return cast_value(op.build, op.input(0), torch_dtype(op.attr_int("to", 0), "its target"))


@onnx_op("CastLike")
def cast_like(op: Op) -> Result:
    return op.build.cast(op.input(0), dtype_of_value(op.input(1)))


@onnx_op("QuantizeLinear", "DynamicQuantizeLinear")
def refuse_quantization(op: Op) -> Result:
    raise UnsupportedError(
        "it rounds activations to integers, so no gradient passes", hint="export the model before quantization"
    )
