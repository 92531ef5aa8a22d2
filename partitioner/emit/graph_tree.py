"""Which modules an emitted model has, which operators each forward holds, and what passes between them.

The operators of a graph carry the stack of modules that they were called in. Operators that lie next to each other and
share a module form a *frame*: one call of that module. A module can be written as a class if every one of its frames
lies inside the module that names it; otherwise it is dissolved: its operators are written out where they run, and only
a container is left under its name, so that its parameters keep theirs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from partitioner.capture.regions import AUTOCAST, NO_GRAD
from partitioner.emit.graph_code import Value
from partitioner.emit.graph_ops import makes_from_nothing
from partitioner.errors import EmitError
from partitioner.program import Program, TensorInfo, node_info

ROOT = ""
_LIFTED = re.compile(r"(?:_?lifted_tensor|_tensor_constant)_?\d+")


def inside(name: str, scope: str) -> bool:
    """Whether a dotted name lies strictly under a scope; everything but the root itself lies under the root."""
    return name.startswith(scope + ".") if scope else name != ROOT


@dataclass(eq=False)
class Frame:
    """One call of a module."""

    scope: str
    items: list[fx.Node | Frame] = field(default_factory=list)
    first: int = 0  # positions of its operators, contiguous
    last: int = -1
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()

    def frames(self) -> Iterator[Frame]:
        """Every call below it and itself, inner ones first."""
        for item in self.items:
            if isinstance(item, Frame):
                yield from item.frames()
        yield self


@dataclass(eq=False)
class Tree:
    """All that is known before anything is written."""

    program: Program
    dissolved: set[str] = field(default_factory=set)
    root: Frame = field(default_factory=lambda: Frame(ROOT))
    position: dict[fx.Node, int] = field(default_factory=dict)
    stack_of: dict[fx.Node, tuple[Frame, ...]] = field(default_factory=dict)  # open calls, root first
    values: dict[fx.Node, Value] = field(default_factory=dict)  # what an argument node stands for
    attributes: dict[tuple[fx.Node, fx.Node], Value] = field(
        default_factory=dict
    )  # (reader, get_attr) -> its name there
    anchors: dict[fx.Node, Value] = field(default_factory=dict)  # whose device an operator takes
    operands: dict[fx.Node, tuple[Value, ...]] = field(default_factory=dict)
    uses: dict[Value, list[int]] = field(default_factory=dict)  # positions of readers; past the end for the loss
    made_at: dict[int, list[Value]] = field(default_factory=dict)  # position -> values made there that somebody reads
    registered: dict[str, TensorInfo] = field(default_factory=dict)  # name -> storage, canonical names first
    loss: Value = field(default_factory=lambda: Value(None))

    @property
    def kept(self) -> dict[str, list[Frame]]:
        """Module -> its calls, in order."""
        found: dict[str, list[Frame]] = {}
        for frame in self.root.frames():
            found.setdefault(frame.scope, []).append(frame)
        return found

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Canonical names of everything that is not a parameter."""
        return frozenset(b.name for b in self.program.buffers)

    def node_values(self, reader: fx.Node) -> dict[fx.Node, Value]:
        """What each argument node of ``reader`` stands for, as ``reader`` names it."""
        return {n: self._value(n, reader) for n in reader.all_input_nodes}

    def _value(self, node: fx.Node, reader: fx.Node) -> Value:
        source = self.values[node]
        if source.node is not None and source.node.op == "get_attr":
            return self.attributes[reader, source.node]
        return source

    def is_local(self, value: Value, scope: str) -> bool:
        """Whether a module reaches a parameter or buffer by its own attributes."""
        return value.node is None and inside(value.attribute, scope)


def constant_names(program: Program) -> dict[str, str]:
    """Canonical name -> name in the emitted model, for every parameter and buffer.

    The same, except for constants that export lifted out of a forward: those are numbered over the whole model, which
    would make equal layers look different, so they are numbered in their module here.
    """
    names, taken = {}, {t.name for t in (*program.parameters, *program.buffers)}
    for info in program.parameters:
        names[info.name] = info.name
    for info in program.buffers:
        scope, _, last = info.name.rpartition(".")
        if not _LIFTED.fullmatch(last):
            names[info.name] = info.name
            continue
        number = 0
        while (name := f"{scope}.constant_{number}" if scope else f"constant_{number}") in taken:
            number += 1
        taken.add(name)
        names[info.name] = name
    return names


def _same_tensor(node: fx.Node) -> bool:
    """Another name for a tensor: an alias, or a cast to the dtype that it has already."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in (torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default):
        return True
    if node.target._schema.name != "aten::to":
        return False
    source = node.args[0]
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta["val"]
    if not isinstance(before, torch.Tensor) or any(v is True for v in (*node.args[2:], *node.kwargs.values())):
        return False
    return bool(before.dtype == after.dtype and before.stride() == after.stride())


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _unpacked(node: fx.Node) -> bool:
    """Whether a tuple is only ever taken apart, so that its elements are values of their own."""
    return _is_tuple(node) and all(u.target is operator.getitem for u in node.users)


def _resolve_values(tree: Tree) -> list[fx.Node]:
    """Give every node a value; return those that become operators of the emitted code."""
    operators: list[fx.Node] = []
    for node in tree.program.graph.graph.nodes:
        if node.op in ("call_method", "call_module"):
            raise EmitError(f"node {node.name} is a {node.op}; only operators can be written as source")
        if node.op == "call_function":
            source = node.args[0] if node.args else None
            if node.target is operator.getitem and isinstance(source, fx.Node) and _unpacked(source):
                tree.values[node] = Value(source, node.args[1])
                continue
            if isinstance(source, fx.Node) and _same_tensor(node):
                tree.values[node] = tree.values[source]
                continue
            tree.position[node] = len(operators)
            operators.append(node)
        if node.op == "get_attr" and not isinstance(node.meta.get("val"), torch.Tensor):
            raise EmitError(f"attribute {node.target} is not a tensor and cannot be written as source")
        if node.op == "output":
            tree.loss = tree.values[node.args[0]]
        tree.values[node] = Value(node)
    return operators


def fake_of(value: Value) -> Any:
    """The fake tensor (or tuple of them) behind a value that a node makes; None for a parameter or buffer."""
    if value.node is None:
        return None
    fake: Any = value.node.meta.get("val")
    return fake if value.item < 0 else fake[value.item]


def _recorded_stack(program: Program, node: fx.Node) -> list[str]:
    """Modules around an operator, outermost first, the root left out; a call number is part of the name."""
    recorded = node.meta.get("module_stack")
    if recorded is not None:
        return [f"{name}@{call}" for name, call in recorded if name]
    info = node_info(node)
    known = {m.name for m in program.modules}
    parts = info.module.split(".") if info.module else []
    prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return [f"{p}@{info.call}" for p in prefixes if p in known]


def _build_frames(tree: Tree, operators: list[fx.Node]) -> bool:
    """Group the operators into calls. False if a module had to be dissolved on the way, so that all starts anew."""
    tree.root = Frame(ROOT, last=len(operators) - 1)
    path: list[tuple[str, Frame]] = [("@0", tree.root)]
    for position, node in enumerate(operators):
        wanted = ["@0"]
        scope = ROOT
        for key in _recorded_stack(tree.program, node):
            name = key.rpartition("@")[0]
            if name in tree.dissolved:
                continue
            if not inside(name, scope):
                tree.dissolved.add(name)  # called from a module that does not contain it
                return False
            wanted.append(key)
            scope = name
        same = 0
        while same < min(len(path), len(wanted)) and path[same][0] == wanted[same]:
            same += 1
        del path[same:]
        for key in wanted[same:]:
            frame = Frame(key.rpartition("@")[0], first=position)
            path[-1][1].items.append(frame)
            path.append((key, frame))
        path[-1][1].items.append(node)
        for _, frame in path[1:]:
            frame.last = position
        tree.stack_of[node] = tuple(frame for _, frame in path)
    return True


def _name_attributes(tree: Tree, operators: list[fx.Node]) -> None:
    """Choose for every reader by which of its names it reads a parameter: the one deepest in the modules around it."""
    renamed = constant_names(tree.program)
    tensors = (*tree.program.parameters, *tree.program.buffers)
    aliases = {t.name: (renamed[t.name], *t.aliases[1:]) for t in tensors}
    tree.registered = {renamed[t.name]: t for t in tensors}
    by_name = {t.name: t for t in tensors}
    for node in operators:
        for source in dict.fromkeys(tree.values[n].node for n in node.all_input_nodes):
            if source is None or source.op != "get_attr":
                continue
            scopes = [frame.scope for frame in tree.stack_of[node]]
            names = aliases.get(str(source.target))
            if names is None:
                raise EmitError(f"{source.target} is neither a parameter nor a buffer of the program")
            name = max(names, key=lambda n: sum(inside(n, s) for s in scopes))
            tree.registered.setdefault(name, by_name[str(source.target)])
            tree.attributes[node, source] = Value(None, attribute=name)


def _find_operands(tree: Tree, operators: list[fx.Node]) -> None:
    for node in operators:
        tree.operands[node] = tuple(dict.fromkeys(tree.node_values(node).values()))
    _connect(tree, operators)
    placeholders = [n for n in tree.program.graph.graph.nodes if n.op == "placeholder" and "val" in n.meta]
    needy = [n for n in operators if makes_from_nothing(n)]
    for node in needy:
        frame = tree.stack_of[node][-1]
        passed = [v for v in frame.inputs if isinstance(fake_of(v), torch.Tensor)]
        own = [v for n in operators if frame in tree.stack_of[n] for v in tree.operands[n] if v.node is None]
        from_root = [Value(n) for n in placeholders if isinstance(n.meta["val"], torch.Tensor)]
        candidates = [*(passed if frame is not tree.root else from_root), *own, *from_root]
        if not candidates:
            raise EmitError(f"{node.name}: the model has no tensor whose device {node.target} could take")
        tree.anchors[node] = candidates[0]
        tree.operands[node] = (candidates[0],)
    if needy:
        _connect(tree, operators)


def _connect(tree: Tree, operators: list[fx.Node]) -> None:
    """Who reads what, and from that what each call takes and gives."""
    tree.uses = {}
    for position, node in enumerate(operators):
        for value in tree.operands[node]:
            tree.uses.setdefault(value, []).append(position)
    tree.uses.setdefault(tree.loss, []).append(len(operators))
    tree.made_at = {}
    for value in tree.uses:
        if _at(tree, value) >= 0:
            tree.made_at.setdefault(_at(tree, value), []).append(value)
    for frame in tree.root.frames():
        read = dict.fromkeys(v for n in operators[frame.first : frame.last + 1] for v in tree.operands[n])
        frame.inputs = tuple(v for v in read if not _made_in(tree, v, frame) and not tree.is_local(v, frame.scope))
    for frames in reversed(tree.kept.values()):  # outer modules first
        escaping = sorted({o for f in frames for o in _escaping(tree, f)})  # one signature for all calls of a module
        for frame in frames:
            frame.outputs = tuple(
                Value(operators[frame.first + offset], item)
                for offset, item in escaping
                if frame.first + offset <= frame.last
            )
            for value in frame.outputs:
                if value not in tree.uses:  # read after another call only
                    tree.uses[value] = [frame.last]
                    tree.made_at.setdefault(_at(tree, value), []).append(value)
    placeholders = [n for n in tree.program.graph.graph.nodes if n.op == "placeholder"]
    tree.root.inputs = tuple(Value(n) for n in placeholders)
    tree.root.outputs = (tree.loss,)


def _at(tree: Tree, value: Value) -> int:
    """Position of the operator that makes a value; -1 if none does."""
    return -1 if value.node is None else tree.position.get(value.node, -1)


def _made_in(tree: Tree, value: Value, frame: Frame) -> bool:
    return frame.first <= _at(tree, value) <= frame.last


def _escaping(tree: Tree, frame: Frame) -> Iterable[tuple[int, int]]:
    """(offset of the operator, element) of what is made in a call and read after it."""
    for position in range(frame.first, frame.last + 1):
        for value in tree.made_at.get(position, ()):
            if tree.uses[value][-1] > frame.last:
                yield position - frame.first, value.item


def flags_of(node: fx.Node) -> tuple[bool, tuple[str, Any, bool] | None]:
    """(without autograd, autocast region) around an operator."""
    return bool(node.meta.get(NO_GRAD)), node.meta.get(AUTOCAST)


def build_tree(program: Program, dissolved: set[str]) -> Tree:
    """Group, name and connect.

    Args:
        program: its graph holds one loss.
        dissolved: modules not to be kept as classes; those found here are added.

    Raises:
        EmitError: the graph holds something that is not an operator or a tensor.
    """
    tree = Tree(program, dissolved)
    operators = _resolve_values(tree)
    while not _build_frames(tree, operators):
        pass
    _name_attributes(tree, operators)
    _find_operands(tree, operators)
    return tree
