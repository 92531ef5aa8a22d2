"""Which stored tensors are trainable parameters; an ONNX file does not say.

A floating tensor is a parameter unless it is a scalar without a module's name, or is only ever combined with positions
(values made of shapes, ranges and integer inputs), as the frequencies of rotary embeddings are, or stands where an
operator takes statistics, scales or bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from onnx import AttributeProto, NodeProto

from partitioner.capture.onnx.reader import Model, attribute, subgraphs
from partitioner.capture.onnx.tensors import Stored, stored_tensor

Kind = Literal["learned", "position", "const", "pending"]

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")

_WEIGHT_SLOTS: dict[str, frozenset[int]] = {
    "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}),
    "Gemm": frozenset({0, 1, 2}),
    "BatchNormalization": frozenset({1, 2}),
    "InstanceNormalization": frozenset({1, 2}),
    "LayerNormalization": frozenset({1, 2}),
    "GroupNormalization": frozenset({1, 2}),
    "RMSNormalization": frozenset({1}),
    "SimplifiedLayerNormalization": frozenset({1}),
    "SkipLayerNormalization": frozenset({2, 3, 4}),
    "SkipSimplifiedLayerNormalization": frozenset({2, 3}),
    "PRelu": frozenset({1}),
}
_CONSTANT_SLOTS: dict[str, frozenset[int]] = {
    "BatchNormalization": frozenset({3, 4}),
    "DequantizeLinear": frozenset({0, 1, 2}),
    "Resize": frozenset({1, 2, 3}),
    "Upsample": frozenset({1}),
    "Clip": frozenset({1, 2}),
    "Pad": frozenset({1, 2, 3}),
    "Dropout": frozenset({1, 2}),
    "OneHot": frozenset({1, 2}),
    "Range": frozenset({0, 1, 2}),
}
_SHAPE_SLOTS: dict[str, frozenset[int]] = {
    "Reshape": frozenset({1}),
    "Expand": frozenset({1}),
    "Tile": frozenset({1}),
    "Slice": frozenset({1, 2, 3, 4}),
    "Squeeze": frozenset({1}),
    "Unsqueeze": frozenset({1}),
    "Split": frozenset({1}),
    "Trilu": frozenset({1}),
    "CumSum": frozenset({1}),
    "TopK": frozenset({1}),
    "ReduceSum": frozenset({1}),
    "ReduceMean": frozenset({1}),
    "ReduceMax": frozenset({1}),
    "ReduceMin": frozenset({1}),
    "ReduceProd": frozenset({1}),
    "ReduceL1": frozenset({1}),
    "ReduceL2": frozenset({1}),
    "ReduceLogSumExp": frozenset({1}),
    "ReduceSumSquare": frozenset({1}),
    "ReduceLogSum": frozenset({1}),
}
_POSITION_SOURCES = frozenset({"Shape", "Size", "Range", "NonZero", "ArgMax", "ArgMin"})
_NONE: frozenset[int] = frozenset()


@dataclass
class _Taint:
    """What is known of each value: where it comes from, and the undecided tensors it was made of."""

    stored: dict[str, Stored]
    kinds: dict[str, Kind]
    pending: dict[str, frozenset[str]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)

    def learn(self, name: str) -> None:
        self.parameters.update(self.pending.get(name, frozenset()))

    def set_all(self, node: NodeProto, kind: Kind, pending: frozenset[str] = frozenset()) -> None:
        for output in node.output:
            self.kinds[output] = kind
            self.pending[output] = pending


def _candidate(stored: Stored) -> bool:
    if not stored.dtype.is_floating_point or stored.packed:
        return False
    return stored.numel > 1 or _DOTTED.fullmatch(stored.name) is not None


def _contracts_positions(node: NodeProto, slot: int, taint: _Taint) -> bool:
    """Whether a MatMul multiplies frequencies by positions, rather than a weight by one-hot rows."""
    other = node.input[1 - slot]
    if taint.kinds.get(other) != "position":
        return False
    stored = taint.stored.get(node.input[slot])
    return slot == 0 or stored is None or len(stored.shape) != 2


def _gather(node: NodeProto, taint: _Taint) -> bool:
    """An embedding: a table of rows. Returns whether the node was one."""
    table = node.input[0]
    if taint.kinds[table] != "pending":
        return False
    stored = taint.stored.get(table)
    if stored is not None and len(stored.shape) < 2:
        taint.set_all(node, "position")
    else:
        taint.learn(table)
        taint.set_all(node, "learned")
    return True


def _visit(node: NodeProto, taint: _Taint) -> None:
    weights = _WEIGHT_SLOTS.get(node.op_type, _NONE)
    ignored = _SHAPE_SLOTS.get(node.op_type, _NONE) | _CONSTANT_SLOTS.get(node.op_type, _NONE)
    if bodies := subgraphs(node):
        inner = [n for body in bodies for n in body.node]
        for name in (n for node_ in inner for n in node_.input):
            taint.learn(name)
        return taint.set_all(node, "learned")
    if node.op_type in _POSITION_SOURCES:
        return taint.set_all(node, "position")
    if node.op_type in ("Gather", "GatherElements", "GatherND") and _gather(node, taint):
        return None
    operands = [(i, name) for i, name in enumerate(node.input) if name and i not in ignored]
    kinds = {taint.kinds[name] for _, name in operands}
    undecided = [(i, name) for i, name in operands if taint.kinds[name] == "pending"]
    if node.op_type == "MatMul" and undecided:
        learned = [name for i, name in undecided if not _contracts_positions(node, i, taint)]
    else:
        learned = [name for i, name in undecided if i in weights or "learned" in kinds]
    for name in learned:
        taint.learn(name)
    if learned or "learned" in kinds:
        return taint.set_all(node, "learned")
    if undecided and "position" not in kinds:
        union = frozenset[str]().union(*(taint.pending[name] for _, name in undecided))
        return taint.set_all(node, "pending", union)
    return taint.set_all(node, "position" if "position" in kinds else "const")


def _constant(node: NodeProto, folder: Path) -> Stored | None:
    """The tensor of a Constant node that carries one."""
    value = attribute(node, "value")
    if node.op_type != "Constant" or value is None or value.type != AttributeProto.TENSOR:
        return None
    return stored_tensor(value.t, folder, node.output[0])


def _filled(node: NodeProto, stored: dict[str, Stored]) -> Stored | None:
    """ConstantOfShape of a shape in the file: how some tools write weights that they leave out."""
    shape = stored.get(node.input[0]) if node.op_type == "ConstantOfShape" and node.input else None
    if shape is None or len(shape.shape) != 1 or not 0 < shape.numel <= 16 or not shape.available():
        return None
    value = attribute(node, "value")
    fill, dtype = 0.0, torch.float32
    if value is not None:
        one = stored_tensor(value.t, shape.folder).load().reshape(-1)[:1]
        fill, dtype = one.item() if one.numel() else 0.0, one.dtype
    sizes = tuple(int(d) for d in shape.load().tolist())
    if not dtype.is_floating_point or any(d < 0 for d in sizes):
        return None
    return Stored(name=node.output[0], shape=sizes, dtype=dtype, fill=fill)


def absorb_constants(model: Model) -> None:
    """Turn nodes that only hold a tensor into stored tensors."""
    kept = []
    for node in model.nodes:
        found = _constant(node, model.path.parent) or _filled(node, model.stored)
        if found is None:
            kept.append(node)
        else:
            model.stored[found.name] = found
    model.nodes = kept


def find_parameters(model: Model) -> set[str]:
    """Names of the stored tensors that are trainable. Call ``absorb_constants`` before."""
    taint = _Taint(model.stored, {})
    for value in model.inputs:
        elem = value.type.tensor_type.elem_type
        taint.kinds[value.name] = "learned" if elem in (1, 10, 11, 16) else "position"
    for name, stored in model.stored.items():
        candidate = _candidate(stored)
        taint.kinds[name] = "pending" if candidate else "const"
        if candidate:
            taint.pending[name] = frozenset({name})
    for node in model.nodes:
        _visit(node, taint)
    for name in model.outputs:
        taint.learn(name)
    return taint.parameters
