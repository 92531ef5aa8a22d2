"""Remove what costs nothing and means nothing, so that later passes see one spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from partitioner.pass_manager import Pass
from partitioner.program import Program

aten = torch.ops.aten

_CHECKS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten._assert_async.msg,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)
_ALIASES = frozenset({aten.alias.default, aten.lift_fresh.default})
_CASTS = frozenset({aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.contiguous.default})
_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten.expand.default})


def _same(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes have the same type, shape and strides."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return (x.dtype, x.shape, x.stride(), x.device) == (y.dtype, y.shape, y.stride(), y.device)


def _is_identity(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target in _ALIASES:
        return True
    if node.target in _CASTS and node.target is not aten._to_copy.default:
        return _same(node, source)
    return node.target in _RESHAPES and _same(node, source)


def _hoist_attributes(graph: fx.Graph) -> bool:
    """Rule 4; the order among attributes stays."""
    first = next((n for n in graph.nodes if n.op == "call_function"), None)
    late, passed = [], False
    for node in graph.nodes:
        passed = passed or node is first
        if passed and node.op == "get_attr":
            late.append(node)
    for node in late:
        assert first is not None
        first.prepend(node)
    return bool(late)


@dataclass(frozen=True, kw_only=True)
class Canonicalize(Pass):
    """Bring a captured graph to one spelling.

    1. Run-time checks (``_assert_tensor_metadata`` and its like) go.
    2. Identities go: aliases, casts to the dtype a tensor has, reshapes to the shape it has.
    3. Operators that nothing reads go; model inputs stay.
    4. Parameters and buffers are named before the first operator, so that a gather may be moved anywhere.
    """

    name: ClassVar[str] = "canonicalize"

    def run(self, program: Program) -> bool:
        graph = program.graph.graph
        changed = False
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _CHECKS and not node.users:
                graph.erase_node(node)
                changed = True
            elif _is_identity(node):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                changed = True
        changed = graph.eliminate_dead_code() or changed
        return _hoist_attributes(graph) or changed
