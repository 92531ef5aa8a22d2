"""The stable text form of a Program: one line an operator. What tests compare and ``--print-ir-after`` shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partitioner.program import Program, dtype_name, node_info

_SHORT = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "bool": "i1",
}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        name = dtype_name(value.dtype)
        return f"{_SHORT.get(name, name)}[{','.join(str(int(d)) for d in value.shape)}]"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_type(v) for v in value) + ")"
    return type(value).__name__


def target_name(node: fx.Node) -> str:
    """``aten.linear.default`` -> ``aten.linear``; attribute and function targets by their plain name."""
    if isinstance(node.target, str):
        return node.target
    name = str(node.target) if "." in str(node.target) and "<" not in str(node.target) else node.target.__name__
    return name.removesuffix(".default").removesuffix(".Tensor")


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_argument(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_argument(v)}" for k, v in value.items()) + "}"
    return repr(value) if isinstance(value, str) else str(value)


def print_node(node: fx.Node, *, with_costs: bool = False) -> str:
    """One line: name, type, operator, arguments, and in braces what the planner knows."""
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    typed = f"%{node.name} : {_type(node.meta['val'])}" if "val" in node.meta else f"%{node.name}"
    if node.op == "placeholder":
        return f"{typed} = input"
    if node.op == "get_attr":
        text = f"{typed} = parameter {node.target}"
    else:
        parts = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
        text = f"{typed} = {target_name(node)}({', '.join(parts)})"
    info = node_info(node)
    notes = [info.module] if info.module else []
    if info.call:
        notes.append(f"call {info.call}")
    if info.atom >= 0:
        notes.append(f"window {info.atom}")
    if with_costs and info.forward_s:
        notes.append(f"forward {info.forward_s * 1e6:.1f} us, backward {info.backward_s * 1e6:.1f} us")
    if with_costs and info.saves:
        notes.append("saves " + " ".join(info.saves))
    notes += [f"{key} {node.meta[key]}" for key in ("unit", "recompute") if node.meta.get(key)]
    return f"{text}  {{{'; '.join(notes)}}}" if notes else text


def print_program(program: Program, *, with_costs: bool = False) -> str:
    """The whole forward graph as text; equal programs give equal text."""
    lines = [print_node(n, with_costs=with_costs) for n in program.graph.graph.nodes]
    return "\n".join(lines) + "\n"


def neighbourhood(node: fx.Node, *, around: int = 3) -> str:
    """The lines next to a node, the node itself marked; for messages."""
    before: list[fx.Node] = []
    after: list[fx.Node] = []
    at = node.prev
    while len(before) < around and at.op != "root":
        before.append(at)
        at = at.prev
    at = node.next
    while len(after) < around and at.op != "root":
        after.append(at)
        at = at.next
    lines = [f"    {print_node(n)}" for n in reversed(before)]
    lines.append(f"--> {print_node(node)}")
    lines += [f"    {print_node(n)}" for n in after]
    return "\n".join(lines)
