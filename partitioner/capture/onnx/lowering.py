"""Walk the ONNX nodes in order and let the operator table write the graph."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from onnx import GraphProto, NodeProto, TensorProto
from torch import fx

from partitioner.capture.onnx import ops
from partitioner.capture.onnx.builder import FOLD_LIMIT, Builder, Value
from partitioner.capture.onnx.ops.quantized import PACKED
from partitioner.capture.onnx.ops.table import Op
from partitioner.capture.onnx.reader import DEFAULT_DOMAINS, Model, attribute, label, sort_nodes, subgraphs
from partitioner.capture.onnx.tensors import Stored
from partitioner.errors import CaptureError, PartitionerError, UnsupportedError

MAX_NAMED = 12


@dataclass
class Lowering:
    """The state of one walk."""

    model: Model
    parameters: set[str]
    """Names of stored tensors that are trainable."""
    build: Builder
    values: dict[str, Value | None] = field(default_factory=dict)
    parameter_nodes: dict[str, fx.Node] = field(default_factory=dict)
    """ONNX name -> its ``get_attr``; an ``Identity`` of a parameter is a parameter under another name."""
    copies: dict[str, str] = field(default_factory=dict)
    """Names that are ``Identity`` of a parameter -> that parameter's stored name."""
    nodes: list[NodeProto] = field(default_factory=list)
    """Every node lowered, bodies of taken branches included; ``Builder.position`` counts in here."""
    frozen: dict[str, str] = field(default_factory=dict)
    """Temporary attribute -> stored name, for buffers whose payload was not read."""

    def run(self) -> None:
        """Lower the whole model.

        Raises:
            UnsupportedError: operators without a handler, all of them named.
            CaptureError: an operator that its operands do not fit.
        """
        self._refuse_unknown(self.model.nodes)
        for node in self.model.nodes:
            self._lower(node)

    def _refuse_unknown(self, nodes: list[NodeProto]) -> None:
        unknown: dict[str, tuple[str, int]] = {}

        def visit(node: NodeProto, position: int) -> None:
            if node.op_type != "If" and ops.handler(node) is None:
                name = node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"
                where, count = unknown.get(name, (label(node, position), 0))
                unknown[name] = (where, count + 1)
            for body in subgraphs(node) if node.op_type == "If" else ():
                for i, inner in enumerate(body.node):
                    visit(inner, i)

        for i, node in enumerate(nodes):
            visit(node, i)
        if unknown:
            named = [f"{name} ({count}x; {where})" for name, (where, count) in list(unknown.items())[:MAX_NAMED]]
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            raise UnsupportedError(
                f"{self.model.path} uses operators that have no meaning here: {', '.join(named)}{more}",
                hint="export the model without runtime-specific fusion or quantization, in a standard opset",
            )

    def value(self, name: str) -> Value | None:
        """The value of a name; stored tensors are looked up when first read."""
        if not name:
            return None
        if name not in self.values:
            self.values[name] = self._stored(name)
        return self.values[name]

    def _stored(self, name: str) -> Value:
        stored = self.model.stored[name]
        if name in self.parameters:
            node = self.build.attribute(self.build.fake_parameter(stored.shape, stored.dtype))
            self.parameter_nodes[name] = node
            return node
        readable = stored.available() and stored.numel <= FOLD_LIMIT
        if readable and not stored.packed:
            constant = stored.load()
            self.build.note_origin(constant, name, stored=True)
            return constant
        with self.build.mode:
            shape = (stored.nbytes,) if stored.packed else stored.shape
            node = self.build.attribute(torch.empty(shape, dtype=stored.dtype))
        self.frozen[str(node.target)] = name
        if stored.packed:
            node.meta[PACKED] = (stored.shape, stored.data_type == TensorProto.INT4)
        return node

    def _lower(self, node: NodeProto) -> None:
        self.build.position = len(self.nodes)
        self.nodes.append(node)
        try:
            if node.op_type == "If" and not node.domain:
                self._branch(node)
                return
            if node.op_type == "Identity" and node.input[0] in self.parameters:
                self._copy(node.input[0], node.output[0])
                return
            operands = [self.value(name) for name in node.input]
            domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
            op = Op(node, operands, self.build, self.model.opsets.get(domain, 1), self.model.path.parent)
            handler = ops.handler(node)
            assert handler is not None
            result = handler(op)
        except PartitionerError as error:
            error.what = f"{self.model.path}: {label(node)}: {error.what}"
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError, KeyError, OverflowError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CaptureError(
                f"{self.model.path}: {label(node)} cannot be applied to its inputs: {first}",
                hint="a fixed size in the file may contradict a --dim, --batch or --seq that you gave",
            ) from error
        made = (result,) if isinstance(result, torch.Tensor | fx.Node) else tuple(result)
        for name, value in zip(node.output, made, strict=False):
            if name and value is not None:
                self.build.note_origin(value, name, stored=False)
                self.values[name] = value
        for name in node.output[len(made) :]:
            if name:
                raise UnsupportedError(f"{self.model.path}: {label(node)}: its output {name!r} has no meaning here")

    def stored_of(self, name: str) -> Stored:
        """The stored tensor behind a parameter's ONNX name."""
        return self.model.stored[self.copies.get(name, name)]

    def _copy(self, source: str, name: str) -> None:
        """Old exporters write equal weights once and name the others by Identity nodes."""
        stored = self.copies.get(source, source)
        self.parameters.add(name)
        self.copies[name] = stored
        info = self.model.stored[stored]
        node = self.build.attribute(self.build.fake_parameter(info.shape, info.dtype))
        self.parameter_nodes[name] = node
        self.values[name] = node

    def _branch(self, node: NodeProto) -> None:
        """Take the branch of an If whose condition is known by now."""
        condition = self.value(node.input[0])
        if not isinstance(condition, torch.Tensor):
            raise UnsupportedError(
                "which branch runs depends on the model's inputs",
                hint="export the model without control flow, or with the branch fixed",
            )
        name = "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"
        found = attribute(node, name)
        if found is None:
            raise CaptureError(f"it has no {name}", hint="the file is damaged; export it again")
        body: GraphProto = found.g
        known = set(self.values) | set(self.model.stored) | {o for n in self.model.nodes for o in n.output}
        for inner in sort_nodes(list(body.node), known, str(self.model.path)):
            self._lower(inner)
        for output, inner_output in zip(node.output, body.output, strict=True):
            self.values[output] = self.value(inner_output.name)
