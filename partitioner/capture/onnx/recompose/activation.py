"""GELU and SiLU."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from partitioner.capture.onnx.builder import aten
from partitioner.capture.onnx.recompose.match import calls, close, is_call, is_number, replace, scaled


def _factors(node: fx.Node) -> tuple[float, list[Any]]:
    """A tree of products as one number and its tensors; products that others read too count as tensors."""
    number, tensors = 1.0, []
    stack: list[Any] = list(reversed(node.args))
    while stack:
        value = stack.pop()
        if is_number(value):
            number *= value
        elif is_call(value, aten.mul.Tensor) and len(value.users) == 1:
            stack.extend(reversed(value.args))
        elif is_call(value, aten.div.Tensor) and len(value.users) == 1 and is_number(value.args[1]):
            number /= value.args[1]
            stack.append(value.args[0])
        else:
            tensors.append(value)
    return number, tensors


def _plus_one(value: Any, *inner: object) -> fx.Node | None:
    """``inner(...) + 1``: the inner call."""
    added = calls(value, aten.add.Tensor)
    return calls(added.args[0], *inner) if added is not None and added.args[1] == 1 else None


def _is_tanh_argument(value: Any, x: fx.Node) -> bool:
    """``sqrt(2 / pi) * (x + 0.044715 * x**3)``."""
    inner, factor = scaled(value)
    added = calls(inner, aten.add.Tensor)
    if added is None or not close(factor, math.sqrt(2 / math.pi)):
        return False
    for linear, cubic in (added.args[:2], added.args[1::-1]):
        body, weight = scaled(cubic)
        cube = calls(body, aten.pow.Tensor_Scalar)
        if linear is x and cube is not None and cube.args[0] is x and cube.args[1] == 3 and close(weight, 0.044715):
            return True
    return False


def fuse_gelu(graph: fx.Graph, root: fx.Node) -> bool:
    """``x * 0.5 * (1 + erf(x / sqrt 2))`` and its tanh approximation, multiplied in any order."""
    if not is_call(root, aten.mul.Tensor):
        return False
    number, tensors = _factors(root)
    if len(tensors) != 2 or not close(number, 0.5):
        return False
    for x, gate in (tensors, tensors[::-1]):
        erf, tanh = _plus_one(gate, aten.erf.default), _plus_one(gate, aten.tanh.default)
        if erf is not None:
            inner, factor = scaled(erf.args[0])
            if inner is x and close(factor, math.sqrt(0.5)):
                replace(graph, root, aten.gelu.default, x)
                return True
        if tanh is not None and _is_tanh_argument(tanh.args[0], x):
            replace(graph, root, aten.gelu.default, x, approximate="tanh")
            return True
    return False


def fuse_silu(graph: fx.Graph, root: fx.Node) -> bool:
    """``x * sigmoid(x)``."""
    if not is_call(root, aten.mul.Tensor):
        return False
    for x, gate in (root.args[:2], root.args[1::-1]):
        sigmoid = calls(gate, aten.sigmoid.default)
        if sigmoid is not None and sigmoid.args[0] is x and len(sigmoid.users) == 1:
            replace(graph, root, aten.silu.default, x)
            return True
    return False
