"""RMS norm and layer norm over the last dim."""

from __future__ import annotations

from typing import Any

from torch import fx

from partitioner.capture.onnx.builder import aten
from partitioner.capture.onnx.recompose.match import calls, is_call, is_number, replace, shape, uncast


def _mean_last(value: Any) -> fx.Node | None:
    """``mean(inner, -1, keepdim=True)``: the inner node."""
    mean = calls(uncast(value), aten.mean.dim)
    if mean is None or len(mean.args) < 3 or not mean.args[2]:
        return None
    source, dims = mean.args[0], mean.args[1]
    assert isinstance(source, fx.Node)
    assert isinstance(dims, list | tuple)
    rank = len(shape(source))
    return source if len(dims) == 1 and dims[0] in (-1, rank - 1) else None


def _square_of(value: Any) -> Any:
    """What ``pow(x, 2)`` or ``x * x`` is the square of."""
    node = uncast(value)
    if is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]
    if is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]:
        return node.args[0]
    return None


def _variance(value: Any) -> tuple[Any, float] | None:
    """``mean(x ** 2) + epsilon``: x and epsilon."""
    added = calls(uncast(value), aten.add.Tensor)
    if added is None or not is_number(added.args[1]):
        return None
    inner = _mean_last(added.args[0])
    squared = None if inner is None else _square_of(inner)
    return None if squared is None else (squared, float(added.args[1]))  # type: ignore[arg-type]  # a number


def _normalized(value: Any) -> tuple[Any, float] | None:
    """``x / sqrt(mean(x ** 2) + epsilon)`` in any spelling: x and epsilon."""
    node = uncast(value)
    if is_call(node, aten.div.Tensor):
        root = calls(uncast(node.args[1]), aten.sqrt.default)
        found = None if root is None else _variance(root.args[0])
        return found if found and uncast(found[0]) is uncast(node.args[0]) else None
    if not is_call(node, aten.mul.Tensor):
        return None
    for x, inverse in (node.args[:2], node.args[1::-1]):
        reciprocal = calls(uncast(inverse), aten.reciprocal.default, aten.rsqrt.default)
        if reciprocal is None:
            continue
        inner = reciprocal.args[0]
        if reciprocal.target is aten.reciprocal.default:
            root = calls(uncast(inner), aten.sqrt.default)
            inner = None if root is None else root.args[0]
        found = None if inner is None else _variance(inner)
        if found and uncast(found[0]) is uncast(x):
            return found
    return None


def _weight(value: Any, width: int) -> fx.Node | None:
    """A stored vector of this width, perhaps cast."""
    return value if isinstance(value, fx.Node) and value.op == "get_attr" and shape(value) == (width,) else None


def fuse_rms_norm(graph: fx.Graph, root: fx.Node) -> bool:
    """``weight * x / sqrt(mean(x ** 2) + epsilon)``."""
    if not is_call(root, aten.mul.Tensor):
        return False
    for scale, value in (root.args[:2], root.args[1::-1]):
        weight = _weight(scale, shape(root)[-1])
        found = _normalized(value) if weight is not None else None
        if weight is None or found is None or _centred(found[0]) is not None:
            continue
        x = uncast(found[0])
        replace(graph, root, aten.rms_norm.default, x, [shape(root)[-1]], weight, found[1])
        return True
    return False


def _centred(value: Any) -> Any:
    """What ``x - mean(x)`` centres."""
    node = calls(uncast(value), aten.sub.Tensor)
    if node is None:
        return None
    return node.args[0] if uncast(_mean_last(node.args[1])) is uncast(node.args[0]) else None


def fuse_layer_norm(graph: fx.Graph, root: fx.Node) -> bool:
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias``, as exporters wrote it before opset 17."""
    if not is_call(root, aten.add.Tensor):
        return False
    width = shape(root)[-1] if shape(root) else 0
    for product, shift in (root.args[:2], root.args[1::-1]):
        bias, scaled_by = _weight(shift, width), calls(product, aten.mul.Tensor)
        if bias is None or scaled_by is None:
            continue
        for scale, value in (scaled_by.args[:2], scaled_by.args[1::-1]):
            weight = _weight(scale, width)
            found = _normalized(value) if weight is not None else None
            x = None if found is None else _centred(found[0])
            if found is not None and x is not None:
                replace(graph, root, aten.layer_norm.default, uncast(x), [width], weight, bias, found[1])
                return True
    return False
