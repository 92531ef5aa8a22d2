"""Linear layers whose weight is stored as (out, in)."""

from __future__ import annotations

from typing import Any

from torch import fx

from partitioner.capture.onnx.builder import aten
from partitioner.capture.onnx.recompose.match import calls, is_call, replace, shape


def _turned_weight(value: Any) -> fx.Node | None:
    """The stored matrix under a transpose."""
    if not is_call(value, aten.transpose.int, aten.t.default, aten.permute.default):
        return None
    source = value.args[0]
    return source if isinstance(source, fx.Node) and source.op == "get_attr" and len(shape(source)) == 2 else None


def fuse_linear(graph: fx.Graph, root: fx.Node) -> bool:
    """``x @ weight.T`` and, one operator later, its bias."""
    if is_call(root, aten.matmul.default, aten.mm.default):
        x, turned = root.args[:2]
        weight = _turned_weight(turned)
        if weight is None or not isinstance(x, fx.Node) or len(shape(x)) < 2:
            return False
        replace(graph, root, aten.linear.default, x, weight)
        return True
    if not is_call(root, aten.add.Tensor):
        return False
    for product, bias in (root.args[:2], root.args[1::-1]):
        linear = calls(product, aten.linear.default)
        stored = isinstance(bias, fx.Node) and bias.op == "get_attr" and shape(bias) == shape(root)[-1:]
        if linear is not None and len(linear.args) == 2 and len(linear.users) == 1 and stored:
            replace(graph, root, aten.linear.default, *linear.args, bias)
            return True
    return False
