"""How an operator is registered, and what its handler is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from onnx import AttributeProto, NodeProto
from torch import fx

from partitioner.capture.onnx.builder import Builder, Value, fake, scalar_of, shape_of
from partitioner.capture.onnx.reader import DEFAULT_DOMAINS, attribute
from partitioner.capture.onnx.tensors import stored_tensor
from partitioner.errors import CaptureError, UnsupportedError

Result = Value | Sequence[Value | None]
Handler = Callable[["Op"], Result]

_HANDLERS: dict[tuple[str, str], Handler] = {}


def onnx_op(*names: str, domain: str = "") -> Callable[[Handler], Handler]:
    """Register a handler for operators of one domain."""

    def register(function: Handler) -> Handler:
        for name in names:
            _HANDLERS[domain, name] = function
        return function

    return register


def _domain(node: NodeProto) -> str:
    return "" if node.domain in DEFAULT_DOMAINS else node.domain


def handler(node: NodeProto) -> Handler | None:
    """The handler of a node's operator, or None if there is none."""
    return _HANDLERS.get((_domain(node), node.op_type))


def known_operators() -> tuple[tuple[str, str], ...]:
    """(domain, operator) of everything that can be lowered, sorted."""
    return tuple(sorted(_HANDLERS))


@dataclass
class Op:
    """One ONNX node with its operands resolved."""

    node: NodeProto
    operands: list[Value | None]
    build: Builder
    version: int
    """Opset of the node's domain."""
    folder: Path

    @property
    def num_inputs(self) -> int:
        return len(self.operands)

    def uses_output(self, index: int) -> bool:
        return index < len(self.node.output) and bool(self.node.output[index])

    def optional(self, index: int) -> Value | None:
        return self.operands[index] if index < len(self.operands) else None

    def input(self, index: int) -> Value:
        """An operand that must be there. Raises CaptureError if it is not."""
        value = self.optional(index)
        if value is None:
            raise CaptureError(f"input {index} is missing", hint="the file is damaged; export it again")
        return value

    def constant(self, index: int, what: str) -> torch.Tensor | None:
        """An optional operand that has to be known at import.

        Raises:
            UnsupportedError: it depends on the model's inputs.
        """
        value = self.optional(index)
        if isinstance(value, fx.Node):
            raise UnsupportedError(
                f"its {what} depends on the model's inputs", hint="export the model with a fixed value there"
            )
        return value

    def ints(self, index: int, what: str) -> list[int] | None:
        """An optional constant operand as integers."""
        value = self.constant(index, what)
        return None if value is None else [int(v) for v in value.reshape(-1).tolist()]

    def number(self, index: int, what: str) -> float | int | bool | None:
        """An optional constant one-element operand."""
        value = self.constant(index, what)
        return None if value is None or value.numel() == 0 else scalar_of(value)

    def attr(self, name: str) -> AttributeProto | None:
        return attribute(self.node, name)

    def attr_int(self, name: str, default: int) -> int:
        found = self.attr(name)
        return default if found is None else int(found.i)

    def attr_float(self, name: str, default: float) -> float:
        found = self.attr(name)
        # Attributes are float32: the shortest decimal of the same float32 is what was meant.
        return default if found is None else float(scalar_of(torch.tensor(found.f, dtype=torch.float32)))

    def attr_ints(self, name: str) -> list[int] | None:
        found = self.attr(name)
        return None if found is None else [int(i) for i in found.ints]

    def attr_str(self, name: str, default: str) -> str:
        found = self.attr(name)
        return default if found is None else str(found.s.decode("utf-8", "replace"))

    def attr_tensor(self, name: str) -> torch.Tensor | None:
        found = self.attr(name)
        return None if found is None else stored_tensor(found.t, self.folder, name).load()

    def axis(self, default: int, of: Value | None = None) -> int:
        """Attribute ``axis``, counted from the front."""
        rank = len(shape_of(self.input(0) if of is None else of))
        axis = self.attr_int("axis", default)
        return axis + rank if axis < 0 else axis


def rank(value: Value) -> int:
    return fake(value).dim()
