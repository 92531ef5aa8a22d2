"""How each aten operator is written in Python.

A table of the common operators; whatever it does not hold, and whatever an entry does not cover (an argument away from
its default that has no place in the spelling), is called by its exact name under ``torch.ops``, which is always right.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partitioner.emit.graph_code import (
    AND,
    ATOM,
    COMPARE,
    OR,
    PRODUCT,
    SUM,
    UNARY,
    XOR,
    Code,
    Value,
    binary,
    call,
    method,
    operand,
    ref,
    text,
)
from partitioner.emit.graph_spellings import CALLS, Spelling
from partitioner.errors import EmitError

_END = 2**63 - 1  # how a graph writes "to the end" of a slice
_IGNORED = frozenset({"layout", "pin_memory", "non_blocking", "cudnn_enable", "cudnn_enabled"})
_PER_DIM = frozenset(
    {"stride", "padding", "dilation", "kernel_size", "output_size"}
)  # lists that one int may stand for
_NAMESPACES = frozenset({"aten", "prims"})


_SIGNS = {
    "add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT), "floor_divide": ("//", PRODUCT),
    "matmul": ("@", PRODUCT), "bitwise_and": ("&", AND), "bitwise_xor": ("^", XOR), "bitwise_or": ("|", OR),
    "lt": ("<", COMPARE), "le": ("<=", COMPARE), "gt": (">", COMPARE), "ge": (">=", COMPARE), "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
}  # fmt: skip


def _call_name(node: fx.Node) -> str:
    """``linear.default`` for an operator of aten, ``""`` for anything else."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return f"{target._schema.name.removeprefix('aten::')}.{target._overloadname}"


@dataclass(frozen=True)
class Speller:
    """Spells nodes; ``values`` says which value each node argument is."""

    values: dict[fx.Node, Value]

    def literal(self, argument: Any, device: Code | None = None) -> Code:
        """Any argument of an operator as Python text."""
        if isinstance(argument, fx.Node):
            return ref(self.values[argument])
        if isinstance(argument, list | tuple):
            return call("", [self.literal(a, device) for a in argument], brackets="[]")
        if isinstance(argument, torch.device):
            return device if device is not None else text(f'"{argument.type}"')
        if isinstance(argument, float) and not math.isfinite(argument):
            return text(f'float("{argument}")')
        if isinstance(argument, bool | type(None) | torch.dtype | torch.layout | torch.memory_format):
            return text(str(argument))
        if isinstance(argument, int | float):
            return text(repr(argument).replace("e+", "e"), UNARY if argument < 0 else ATOM)
        if isinstance(argument, str):
            return text('"' + argument.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"')
        raise EmitError(f"an argument of type {type(argument).__name__} ({argument}) cannot be written as Python")

    def spell(self, node: fx.Node, device: Value | None) -> Code:
        """The expression of one node, with holes for its operands.

        Args:
            node: an operator of torch, or ``operator.getitem``.
            device: the value on whose device an operator without tensor operands makes its result.

        Raises:
            EmitError: the operator is not torch's own, or an argument has no literal.
        """
        if node.target is operator.getitem:
            owner, index = node.args
            return Code((*operand(self.literal(owner), ATOM), f"[{index}]"))
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in _NAMESPACES:
            raise EmitError(
                f"operator {node.target} ({node.name}) is not part of torch, and emitted code depends on torch alone",
                hint="write it with torch's own operators",
            )
        given = _given(node)
        where = None if device is None else Code((*ref(device).parts, ".device"), depth=0)
        if where is not None:
            _place(node, given)
        elif "device" in given:
            given["device"] = None  # the device of the tensor operand
        name = _call_name(node)
        code = self._special(name, given)
        if code is None:
            code = self._operator_sign(name, given)
        if code is None and name in CALLS:
            code = self._call(node, CALLS[name], given, where)
        return code if code is not None else self._exact(node, given, where)

    def _special(self, name: str, given: dict[str, Any]) -> Code | None:
        """Indexing, which Python writes with brackets."""
        if name in ("slice.Tensor", "select.int"):
            dim = given.get("dim", 0)
            if dim < 0:
                dim += given["self"].meta["val"].dim()
            index = str(given["index"]) if name == "select.int" else _slice(given)
            return Code((*operand(self.literal(given["self"]), ATOM), f"[{':, ' * dim}{index}]"))
        if name == "_to_copy.default" and given.get("dtype") in (None, given["self"].meta["val"].dtype):
            return call(method(self.literal(given["self"]), "clone"), [])  # ``to`` would not copy
        if name == "index.Tensor":
            items = [text(":") if i is None else self.literal(i) for i in given["indices"]]
            return call(Code(operand(self.literal(given["self"]), ATOM)), items, brackets="[]")
        return None

    def _operator_sign(self, name: str, given: dict[str, Any]) -> Code | None:
        packet, _, overload = name.partition(".")
        if packet in ("neg", "bitwise_not") and overload == "default":
            sign = "-" if packet == "neg" else "~"
            return Code((sign, *operand(self.literal(given["self"]), UNARY)), UNARY)
        if packet == "rsub" and set(given) == {"self", "other"}:
            return binary(self.literal(given["other"]), "-", self.literal(given["self"]), SUM)
        if packet in _SIGNS and set(given) == {"self", "other"}:
            sign, binds = _SIGNS[packet]
            return binary(self.literal(given["self"]), sign, self.literal(given["other"]), binds)
        return None

    def _call(self, node: fx.Node, spelling: Spelling, given: dict[str, Any], device: Code | None) -> Code | None:
        """The call that the table has; None if it has no place for one of the arguments."""
        schema = {a.name: a for a in node.target._schema.arguments}  # type: ignore[union-attr]  # an OpOverload
        order, keywords = spelling.order.split(), [k.partition("=") for k in spelling.keywords.split()]
        owner = spelling.head.startswith(".")
        first = next(iter(schema))
        covered = (
            {o.removeprefix("*") for o in order} | {s or p for p, _, s in keywords} | ({first} if owner else set())
        )
        left = {n for n in given if n not in covered and n not in _IGNORED and given[n] is not None}
        if left or (owner and not isinstance(given[first], fx.Node)):
            return None
        while order and order[-1].removeprefix("*") not in given:
            order.pop()
        items = []
        for place in order:
            name = place.removeprefix("*")
            value = _plain(name, given.get(name, schema[name].default_value))
            spread = place.startswith("*") and isinstance(value, list | tuple) and value
            items += [self.literal(v) for v in value] if spread else [self.literal(value)]
        for python, _, name in keywords:
            if given.get(name or python) is not None:
                value = self.literal(given[name or python], device)
                items.append(Code((f"{python}=", *value.parts), depth=value.depth))
        head = method(self.literal(given[first]), spelling.head[1:]) if owner else spelling.head
        return call(head, items)

    def _exact(self, node: fx.Node, given: dict[str, Any], device: Code | None) -> Code:
        """The operator by its full name, arguments as the schema takes them."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        items, skipped = [], False
        for argument in target._schema.arguments:
            if argument.name not in given or (argument.name == "device" and given["device"] is None):
                skipped = True
                continue
            value = self.literal(given[argument.name], device)
            named = skipped or argument.kwarg_only
            items.append(Code((f"{argument.name}=", *value.parts), depth=value.depth) if named else value)
        packet = target._schema.name.partition("::")[2]
        return call(f"torch.ops.{target.namespace}.{packet}.{target._overloadname}", items)


def _same(given: Any, default: Any) -> bool:
    if isinstance(given, list | tuple) and isinstance(default, int) and not isinstance(default, bool):
        return all(g == default for g in given)
    if isinstance(given, list | tuple) and isinstance(default, list | tuple):
        return list(given) == list(default)
    return type(given) is type(default) and bool(given == default)


def _given(node: fx.Node) -> dict[str, Any]:
    """Arguments by schema name, defaults left out, in schema order."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]  # the caller checked that it is an OpOverload
    named = {a.name: v for a, v in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    return {
        a.name: named[a.name]
        for a in schema
        if a.name in named and not (a.has_default_value() and _same(named[a.name], a.default_value))
    }


def makes_from_nothing(node: fx.Node) -> bool:
    """Whether the operator has a device of its own to be told: it takes one and has no tensor operand to follow."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes:
        return False
    return any(a.name == "device" for a in node.target._schema.arguments)


def _place(node: fx.Node, given: dict[str, Any]) -> None:
    """Name device and dtype of what is made from nothing, so that no global default decides them."""
    given["device"] = torch.device("cpu")  # written as the device of a tensor at hand
    value = node.meta["val"]
    takes = any(a.name == "dtype" for a in node.target._schema.arguments)  # type: ignore[union-attr]  # an OpOverload
    if takes and value.dtype not in (torch.float32, torch.int64, torch.bool):
        given["dtype"] = value.dtype


def _plain(name: str, value: Any) -> Any:
    """One int for a list that repeats it, where Python takes that for the same."""
    if isinstance(value, list | tuple) and value:
        if name == "dim" and len(value) == 1:
            return value[0]
        if name in _PER_DIM and all(v == value[0] for v in value):
            return value[0]
    return value


def _slice(given: dict[str, Any]) -> str:
    start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
    first = str(start) if start else ""
    last = str(end) if end is not None and end < _END else ""
    return f"{first}:{last}" + (f":{step}" if step != 1 else "")
