"""Small helpers for reading patterns off a graph and for writing the operator that replaces one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partitioner.capture.onnx.builder import aten


def is_call(value: object, *targets: object) -> bool:
    """Whether a value is a call of one of these operators."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in targets


def calls(value: object, *targets: object) -> fx.Node | None:
    """The node, if it is a call of one of these operators."""
    return value if isinstance(value, fx.Node) and is_call(value, *targets) else None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def close(value: object, wanted: float) -> bool:
    """Whether a value is this number, to the precision of half-precision literals."""
    return isinstance(value, int | float) and abs(value - wanted) <= 1e-3 * abs(wanted)


def uncast(value: Any) -> Any:
    """What lies under casts from one floating dtype to another."""
    while (cast := calls(value, aten.to.dtype)) and isinstance(cast.args[0], fx.Node):
        source = cast.args[0]
        if not source.meta["val"].is_floating_point():
            break
        value = source
    return value


def scaled(value: Any) -> tuple[Any, float]:
    """Strip multiplications by numbers: ``(tensor, factor)``."""
    factor = 1.0
    while isinstance(value, fx.Node):
        if is_call(value, aten.mul.Tensor) and is_number(value.args[1]):
            factor *= float(value.args[1])  # type: ignore[arg-type]  # a number
        elif is_call(value, aten.div.Tensor) and is_number(value.args[1]):
            factor /= float(value.args[1])  # type: ignore[arg-type]  # a number
        else:
            break
        value = value.args[0]
    return value, factor


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def dtype(node: fx.Node) -> torch.dtype:
    found = node.meta["val"].dtype
    assert isinstance(found, torch.dtype)
    return found


def write(graph: fx.Graph, at: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add an operator before ``at``, as coming from the same ONNX node."""
    with graph.inserting_before(at):
        node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with at.meta["val"].fake_mode, torch.no_grad():
        node.meta["val"] = target(*values[0], **values[1])
    node.meta.update({k: v for k, v in at.meta.items() if k != "val"})
    return node


def replace(graph: fx.Graph, root: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Put an operator in the place of ``root``; the result keeps the dtype."""
    wanted = dtype(root)
    node = write(graph, root, target, *args, **kwargs)
    if dtype(node) != wanted:
        node = write(graph, root, aten.to.dtype, node, wanted)
    root.replace_all_uses_with(node)
    return node
