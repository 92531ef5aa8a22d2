"""The operator table: each module lowers one family of ONNX operators to aten."""

from partitioner.capture.onnx.ops import (
    activation,
    attention,
    constant,
    convolution,
    elementwise,
    indexing,
    linear,
    normalization,
    quantized,
    reduction,
    shape,
)
from partitioner.capture.onnx.ops.table import Op, handler, known_operators

__all__ = [
    "Op",
    "activation",
    "attention",
    "constant",
    "convolution",
    "elementwise",
    "handler",
    "indexing",
    "known_operators",
    "linear",
    "normalization",
    "quantized",
    "reduction",
    "shape",
]
