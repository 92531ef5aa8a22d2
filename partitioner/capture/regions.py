"""Flatten what torch.export wraps in submodules: ``no_grad`` and ``autocast`` regions become flags on their operators."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from partitioner.errors import UnsupportedError

NO_GRAD = "no_grad"
"""``node.meta`` key: True where the operator runs without autograd."""
AUTOCAST = "autocast"
"""``node.meta`` key: (device type, dtype, enabled) of the autocast region around the operator."""

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_CHECKS = frozenset({torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_async.msg})


def _region(node: fx.Node) -> tuple[fx.Node, tuple[Any, ...], dict[str, Any]] | None:
    """(node of the body, operands, flags for the body's operators) of a region."""
    if node.target is _SET_GRAD:
        enabled, body, *operands = node.args
        flags: dict[str, Any] = {NO_GRAD: not enabled}
    elif node.target is _AUTOCAST:
        device, dtype, enabled, _, body, *operands = node.args
        flags = {AUTOCAST: (device, dtype, bool(enabled))}
    else:
        return None
    assert isinstance(body, fx.Node)
    return body, tuple(operands), flags


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    region = _region(node)
    assert region is not None
    body_node, operands, flags = region
    body = getattr(module, str(body_node.target))
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(placeholders, operands, strict=True))
    with module.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copied = module.graph.node_copy(inner, lambda n: mapping[n])
            copied.meta = {**flags, **{k: v for k, v in inner.meta.items() if k not in flags}}
            if inner.op == "get_attr":  # a region inside this one
                name = f"{body_node.target}_{inner.target}"
                setattr(module, name, getattr(body, str(inner.target)))
                copied.target = name
            for key in flags:
                if key in inner.meta:
                    copied.meta[key] = inner.meta[key]  # the innermost region wins
            mapping[inner] = copied
    result = next(n for n in body.graph.nodes if n.op == "output").args[0]
    outputs = fx.node.map_arg(result, lambda n: mapping[n])
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(outputs[user.args[1]])
            module.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(outputs)
    module.graph.erase_node(node)
    if not body_node.users:
        module.graph.erase_node(body_node)


def flatten_regions(module: fx.GraphModule) -> None:
    """Inline every region and drop the run-time checks that export adds.

    Raises:
        UnsupportedError: another higher-order operator (cond, scan, flex attention, ...) is left.
    """
    while regions := [n for n in module.graph.nodes if n.op == "call_function" and _region(n) is not None]:
        for node in regions:
            _inline(module, node)
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _CHECKS:
            module.graph.erase_node(node)
        elif isinstance(node.target, HigherOrderOperator):
            raise UnsupportedError(
                f"{node.target} is not understood: its body is a graph of its own",
                hint="write that part of the model with plain operators",
            )
