"""Writes aten nodes; what depends on no input is computed at once instead.

A value during the import is a ``torch.Tensor`` (a constant, computed for real) or an ``fx.Node``. An operator on
constants alone is folded, so all arithmetic on shapes, ranges and masks disappears, by the same code that lowers it.

Dtypes: the file's main floating dtype becomes the recipe's compute dtype in parameters, floating inputs and everything
computed from them, as FSDP2's mixed precision does. What is computed from constants and integers alone (rotary tables,
masks) keeps the file's dtype until it meets such a value, and is then cast to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from partitioner.errors import UnsupportedError

aten = torch.ops.aten

Value = torch.Tensor | fx.Node

FOLD_LIMIT = 2**26
"""Elements of the largest constant that is computed at import (a mask of 8192 by 8192); larger ones become operators."""
_SMALL = 64
_ONNX = "onnx"
"""``node.meta`` key: position of the ONNX node that an operator came from."""


def is_node(value: object) -> bool:
    return isinstance(value, fx.Node)


def fake(value: Value) -> torch.Tensor:
    """The tensor itself, or the fake one of a node."""
    if isinstance(value, fx.Node):
        found = value.meta["val"]
        assert isinstance(found, torch.Tensor)
        return found
    return value


def shape_of(value: Value) -> tuple[int, ...]:
    return tuple(int(d) for d in fake(value).shape)


def dtype_of_value(value: Value) -> torch.dtype:
    return fake(value).dtype


def short_float(value: float, dtype: torch.dtype) -> float:
    """The shortest decimal that is the same number in ``dtype``: 0.1 rather than 0.10000000149011612."""
    short = value if dtype == torch.float64 else float(str(np.float32(value)))
    return short if abs(short) <= torch.finfo(torch.float32).max else value


def scalar_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> float | int | bool:
    """A one-element constant as a Python number, held to the finite range of the dtype it will be used in."""
    value: float | int | bool = tensor.reshape(-1)[0].item()
    if not isinstance(value, float):
        return value
    value = short_float(value, tensor.dtype)
    if dtype is not None and dtype.is_floating_point and abs(value) != float("inf"):
        limit = float(torch.finfo(dtype).max)
        value = min(max(value, -limit), limit)
    return value


def cast_constant(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To another floating dtype; finite values stay finite (a mask's lowest float32 is beyond bfloat16)."""
    if tensor.dtype == dtype:
        return tensor
    if dtype.is_floating_point and tensor.is_floating_point():
        limit = torch.finfo(dtype).max
        infinite = tensor.isinf()
        held = tensor.clamp(-limit, limit)
        return torch.where(infinite, tensor, held).to(dtype)
    return tensor.to(dtype)


@dataclass
class Lifted:
    """A constant that operators read as a buffer."""

    value: torch.Tensor
    origin: str
    """ONNX name of the value it is, for its own name."""
    stored: bool
    """Whether ``origin`` is a tensor of the file rather than a computed one."""


@dataclass
class Builder:
    """The graph being written."""

    compute_dtype: torch.dtype
    model_dtype: torch.dtype
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    attributes: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every ``get_attr`` target under its temporary name: fake parameters, and fake or real buffers."""
    lifted: dict[str, Lifted] = field(default_factory=dict)
    origins: dict[int, tuple[torch.Tensor, str, bool]] = field(default_factory=dict)
    position: int = 0
    """Of the ONNX node being lowered."""
    _casts: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _lifted_ids: dict[tuple[int, torch.dtype], fx.Node] = field(default_factory=dict)
    _folded: dict[object, tuple[Any, Any]] = field(default_factory=dict)
    _last_attribute: fx.Node | None = None

    def placeholder(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype)
        self._last_attribute = node
        return node

    def attribute(self, value: torch.Tensor) -> fx.Node:
        """A new ``get_attr`` node; all of them stand before the operators."""
        name = f"attribute_{len(self.attributes)}"
        self.attributes[name] = value
        if self._last_attribute is None:
            first = next(iter(self.graph.nodes), None)
            scope = self.graph.inserting_before(first) if first is not None else self.graph.inserting_before()
        else:
            scope = self.graph.inserting_after(self._last_attribute)
        with scope:
            node = self.graph.create_node("get_attr", name)
        node.meta["val"] = value if not self._is_real(value) else self.mode.from_tensor(value, static_shapes=True)
        self._last_attribute = node
        return node

    @staticmethod
    def _is_real(value: torch.Tensor) -> bool:
        return type(value) is torch.Tensor

    def fake_parameter(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor, floating ones of the file's dtype in the compute dtype."""
        with self.mode:
            return torch.empty(shape, dtype=self.compute_dtype if dtype.is_floating_point else dtype)

    def note_origin(self, value: Value, name: str, *, stored: bool) -> None:
        """Remember what a constant is called, in case it becomes a buffer."""
        if isinstance(value, torch.Tensor) and id(value) not in self.origins:
            self.origins[id(value)] = (value, name, stored)

    def lift(self, value: Value, dtype: torch.dtype | None = None) -> fx.Node:
        """A constant as a buffer of the graph; nodes pass."""
        if isinstance(value, fx.Node):
            return value
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        key = (id(value), wanted)
        if key not in self._lifted_ids:
            _, origin, stored = self.origins.get(id(value), (value, "", False))
            self.origins.setdefault(
                id(value), (value, origin, stored)
            )  # keeps the tensor, so that its id stays its own
            node = self.attribute(cast_constant(value, wanted).contiguous().clone())
            self.lifted[str(node.target)] = Lifted(self.attributes[str(node.target)], origin, stored)
            self._lifted_ids[key] = node
        return self._lifted_ids[key]

    def call(self, target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Apply an aten operator: fold it if no argument is a node, else add it to the graph.

        Raises:
            UnsupportedError: the size of its result depends on values.
            RuntimeError, TypeError, ValueError, IndexError: the operator refuses its arguments.
        """
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_node)
        if not any(is_node(leaf) for leaf in leaves):
            folded = self._fold(target, args, kwargs, leaves)
            if folded is not None:
                return folded
        return self._add(target, args, kwargs)

    def _fold(
        self, target: torch._ops.OpOverload, args: Any, kwargs: Any, leaves: list[Any]
    ) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def mark(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return repr(leaf)
            small = leaf.numel() <= _SMALL
            return (leaf.dtype, tuple(leaf.shape), leaf.tolist()) if small else id(leaf)

        key = (target, repr(pytree.tree_map(mark, (args, kwargs))))
        if key not in self._folded:
            with torch.no_grad():
                meta = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
                on_meta = {**meta[1], "device": "meta"} if "device" in _arguments(target) else meta[1]
                made = pytree.tree_leaves(target(*meta[0], **on_meta))
                if sum(t.numel() for t in made if isinstance(t, torch.Tensor)) > FOLD_LIMIT:
                    return None
                result = target(*args, **kwargs)
            self._folded[key] = (result, tensors)  # the arguments too, so that their ids stay their own
        found: torch.Tensor | tuple[torch.Tensor, ...] = self._folded[key][0]
        return found

    def _add(self, target: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        lift: Callable[[Any], Any] = lambda leaf: self.lift(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        args, kwargs = pytree.tree_map(lift, (args, kwargs), is_leaf=is_node)
        node = self.graph.call_function(target, args, kwargs)
        given = pytree.tree_map(
            lambda leaf: leaf.meta["val"] if is_node(leaf) else leaf, (args, kwargs), is_leaf=is_node
        )
        try:
            with self.mode, torch.no_grad():
                value = target(*given[0], **given[1])
        except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
            self.graph.erase_node(node)
            raise UnsupportedError(
                "the size of its result depends on values", hint="use a formulation with fixed sizes, such as a mask"
            ) from error
        except Exception:
            self.graph.erase_node(node)
            raise
        node.meta["val"] = value
        node.meta[_ONNX] = self.position
        if isinstance(value, torch.Tensor):
            return node
        return tuple(self._item(node, i, part) for i, part in enumerate(value))

    def _item(self, node: fx.Node, index: int, value: torch.Tensor) -> fx.Node:
        import operator

        item = self.graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = value
        item.meta[_ONNX] = self.position
        return item

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """To a dtype; nothing if it has it."""
        if dtype_of_value(value) == dtype:
            return value
        if isinstance(value, torch.Tensor):
            return self._cast_constant(value, dtype)
        result: Value = self.call(aten.to.dtype, value, dtype)
        return result

    def _cast_constant(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same tensor each time, so that a table read by every layer becomes one buffer."""
        key = (id(value), dtype)
        if key not in self._casts:
            made = cast_constant(value, dtype)
            _, name, stored = self.origins.setdefault(id(value), (value, "", False))
            self.origins[id(made)] = (made, name, stored)
            self._casts[key] = made
        return self._casts[key]

    def align(self, values: Sequence[Value]) -> list[Value]:
        """Give floating operands one dtype: the compute dtype if a node has it, else the widest that a node has."""
        floating = [dtype_of_value(v) for v in values if isinstance(v, fx.Node) and fake(v).is_floating_point()]
        if not floating:
            return list(values)
        if self.compute_dtype in floating:
            common = self.compute_dtype
        else:
            common = max(dict.fromkeys(floating), key=lambda d: d.itemsize)
        return [self.cast(v, common) if fake(v).is_floating_point() else v for v in values]


def _arguments(target: torch._ops.OpOverload) -> frozenset[str]:
    return frozenset(a.name for a in target._schema.arguments)
