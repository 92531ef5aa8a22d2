"""Operators that exporters take apart, put together again: what remains is what a training step runs.

ONNX before opset 23 has no attention and no RMS norm, before 20 no GELU, before 17 no layer norm. Left in pieces, attention
alone would keep the score matrix of every head for the backward pass, which no training run does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from partitioner.capture.onnx.recompose.activation import fuse_gelu, fuse_silu
from partitioner.capture.onnx.recompose.attention import fuse_attention
from partitioner.capture.onnx.recompose.linear import fuse_linear
from partitioner.capture.onnx.recompose.norm import fuse_layer_norm, fuse_rms_norm


def recompose(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
    """Rewrite in place; operators left without users stay for dead code elimination.

    Args:
        constants: the tensors behind ``get_attr`` targets, real where they are known.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        for fuse in (fuse_rms_norm, fuse_layer_norm, fuse_gelu, fuse_silu, fuse_linear):
            if fuse(graph, node):
                break
        else:
            fuse_attention(graph, node, constants)
