"""The forward of one module: statements in the order of the graph, written as a person would.

A result that only the next statement reads is written inside that statement, as long as Python then still evaluates
everything in the order of the graph. All other results are variables, and a name is used again when its value is dead,
so that a forward holds no tensor longer than the graph does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from partitioner.emit.graph_code import WIDTH, Code, Ref, Value, call, ref, text
from partitioner.emit.graph_names import (
    ARITHMETIC,
    Names,
    alike,
    argument_hint,
    packet,
    result_hint,
    singular,
    variable_case,
)
from partitioner.emit.graph_ops import Speller
from partitioner.emit.graph_tree import ROOT, Frame, Tree, flags_of
from partitioner.errors import EmitError

_READABLE = 100  # columns that an expression made of several operators may take
_NESTED = 5  # operators that may be nested in one another
Flags = tuple[bool, tuple[str, Any, bool] | None]
_PLAIN: Flags = (False, None)


@dataclass(frozen=True)
class Loop:
    """Calls of numbered siblings of one class, each fed with the result of the one before."""

    frames: tuple[Frame, ...]
    carried: int  # which input of every call is the result of the one before

    @property
    def start(self) -> Value:
        return self.frames[0].inputs[self.carried]

    @property
    def result(self) -> Value:
        return self.frames[-1].outputs[0]


@dataclass(frozen=True)
class Step:
    """One statement to be: an expression with holes and what it makes (several: a tuple; None: nobody reads it)."""

    code: Code
    results: tuple[Value | None, ...]
    flags: Flags = _PLAIN
    hint: str = ""


def find_loops(tree: Tree, frame: Frame, constructors: dict[str, str]) -> list[fx.Node | Frame | Loop]:
    """The items of a frame, with calls that a ``for`` can make grouped."""
    items: list[fx.Node | Frame | Loop] = []
    run: list[Frame] = []
    carried = -1

    def close() -> None:
        nonlocal run, carried
        items.extend([Loop(tuple(run), carried)] if len(run) > 1 else run)
        run, carried = [], -1

    for item in frame.items:
        if not isinstance(item, Frame):
            close()
            items.append(item)
            continue
        position = _carries(tree, run[-1], item, constructors) if run else -1
        if position < 0 or carried not in (-1, position):
            close()
        else:
            carried = position
        run.append(item)
    close()
    return items


def _carries(tree: Tree, before: Frame, after: Frame, constructors: dict[str, str]) -> int:
    """Which input of ``after`` is the only result of its sibling ``before`` (nothing else may differ); -1 if none is."""
    family, _, number = before.scope.rpartition(".")
    family_after, _, number_after = after.scope.rpartition(".")
    if family != family_after or not (number.isdigit() and number_after.isdigit()):
        return -1
    if int(number) + 1 != int(number_after) or constructors[before.scope] != constructors[after.scope]:
        return -1
    if len(before.outputs) != 1 or len(before.inputs) != len(after.inputs):
        return -1
    result = before.outputs[0]
    if tree.uses[result][-1] > after.last or result not in after.inputs:
        return -1
    at = after.inputs.index(result)
    same = all(b == a for i, (b, a) in enumerate(zip(before.inputs, after.inputs, strict=True)) if i != at)
    return at if same else -1


@dataclass
class Body:
    """Writes one forward.

    ``path(scope, name)`` is how the module ``scope`` reaches one of its modules, parameters or buffers, and
    ``loop_over(scope, first, last)`` how it reaches numbered modules in a row.
    """

    tree: Tree
    frame: Frame
    constructors: dict[str, str]
    path: Callable[[str, str], str]
    loop_over: Callable[[str, str, str], str]
    names: Names = field(default_factory=Names)
    lines: list[str] = field(default_factory=list)
    pending: list[Step] = field(default_factory=list)
    uses: Counter[Value] = field(default_factory=Counter)
    wanted: dict[Value, str] = field(default_factory=dict)  # names that loops ask for
    open: Flags = _PLAIN
    indent: int = 8

    def write(self) -> tuple[list[str], list[str]]:
        """(arguments, statements at the indentation of a method's body)."""
        arguments = []
        for value in self.frame.inputs:
            own_name = self.frame.scope == ROOT and value.node is not None
            hint = str(value.node.target) if own_name and value.node is not None else argument_hint(value)
            arguments.append(self.names.new(value, hint))
        items = find_loops(self.tree, self.frame, self.constructors)
        steps = [i if isinstance(i, Loop) else self._step(i) for i in items]
        result = self._result()
        for step in (*steps, result):
            read = self._loop_inputs(step) if isinstance(step, Loop) else [r.value for r in step.code.refs()]
            self.uses.update(v for v in read if not self._is_attribute(v))
            if isinstance(step, Loop) and alike(step.start, step.result):
                self.wanted[step.start] = "x"
        for value in self.frame.inputs:
            if not self.uses[value]:
                self.names.release(value)
        for step in steps:
            if isinstance(step, Loop):
                self._write_loop(step)
            else:
                self._add(step)
        self._return(result)
        return arguments, self.lines

    def _is_attribute(self, value: Value) -> bool:
        return self.tree.is_local(value, self.frame.scope)

    def _step(self, item: fx.Node | Frame) -> Step:
        if isinstance(item, Frame):
            owner = self.path(self.frame.scope, item.scope)
            last = item.scope.rpartition(".")[2]
            results = tuple(v if any(u > item.last for u in self.tree.uses[v]) else None for v in item.outputs)
            code = call(owner, [ref(v) for v in item.inputs])
            return Step(code, results, hint="x" if last.isdigit() else variable_case(last))
        try:
            code = Speller(self.tree.node_values(item)).spell(item, self.tree.anchors.get(item))
        except EmitError as error:
            raise EmitError(f"module {self.frame.scope or 'root'}: {error.what}", hint=error.hint) from error
        made = self.tree.made_at.get(self.tree.position[item], [])
        elements = sorted(v.item for v in made)
        if elements == [-1] or not elements:
            return Step(code, tuple(made), flags_of(item))
        if len(elements) == 1:
            indexed = Code((*code.parts, f"[{elements[0]}]"))
            return Step(indexed, tuple(made), flags_of(item))
        results = tuple(Value(item, i) if i in elements else None for i in range(len(item.meta["val"])))
        return Step(code, results, flags_of(item))

    def _result(self) -> Step:
        outputs = [ref(v) for v in self.frame.outputs]
        if len(outputs) == 1:
            return Step(outputs[0], ())
        return Step(call("", outputs, brackets="()") if outputs else text("None"), ())

    def _known(self, value: Value) -> Code | None:
        """Attributes by their path, variables by their name, anything else stays open."""
        if self._is_attribute(value):
            return text(self.path(self.frame.scope, value.attribute))
        name = self.names.names.get(value)
        return None if name is None else text(name)

    def _add(self, step: Step) -> None:
        """Take one operator or call: hold it back if only one place reads it, else write it."""
        step = self._consume(step)
        if len(step.results) == 1 and step.results[0] is not None and self.uses[step.results[0]] == 1:
            self.pending.append(step)
            return
        self._flush(len(self.pending))
        self._write(step)

    def _consume(self, step: Step) -> Step:
        """Put held-back expressions into ``step`` where the order of evaluation allows; write those that do not fit."""
        if self.pending and self.pending[-1].flags != step.flags:
            self._flush(len(self.pending))
        holes = [r.value for r in step.code.refs()]
        held = [v for p in self.pending for v in p.results if v is not None]
        for count in range(len(held), -1, -1):
            suffix = held[len(held) - count :]
            if [h for h in holes if h in suffix] != suffix:
                continue
            inner = dict(zip(suffix, [p.code for p in self.pending[len(held) - count :]], strict=True))
            code = step.code.fill(lambda v, inner=inner: inner.get(v))  # type: ignore[misc]  # bound as a default
            whole = len(step.code.parts) == 1 and isinstance(step.code.parts[0], Ref)  # nothing but returned
            if count and not whole and not self._readable(code, step):
                continue
            del self.pending[len(held) - count :]
            if any(v in holes for v in held[: len(held) - count]):
                self._flush(len(self.pending))
            return Step(code, step.results, step.flags, step.hint)
        raise AssertionError("an empty suffix always fits")

    def _readable(self, code: Code, step: Step) -> bool:
        """Whether an expression made of several operators still fits a line, with what it is assigned to."""
        columns = self.indent + len(code.fill(lambda v: self._known(v) or text("x" * 8)).flat())
        hints = [step.hint or result_hint(v, self._called) for v in step.results if v is not None]
        return code.depth <= _NESTED and columns <= _READABLE and columns + len("".join(hints)) + 10 <= WIDTH

    def _flush(self, count: int) -> None:
        """Write the oldest ``count`` held-back expressions."""
        steps, self.pending = self.pending[:count], self.pending[count:]
        for step in steps:
            self._write(step)

    def _set_flags(self, flags: Flags, device: str) -> None:
        """Open and close ``with`` blocks."""
        if flags == self.open:
            return
        self.open, self.indent = flags, 8
        no_grad, autocast = flags
        contexts = ["torch.no_grad()"] if no_grad else []
        if autocast is not None:
            _, dtype, enabled = autocast
            how = f", dtype={dtype}" if enabled and dtype is not None else ", enabled=False"
            contexts.append(f"torch.autocast({device}{how})")
        if contexts:
            self.lines.append(f"{' ' * 8}with {', '.join(contexts)}:")
            self.indent = 12

    def _write(self, step: Step) -> None:
        """One statement."""
        holes = [r.value for r in step.code.refs() if not self._is_attribute(r.value)]
        first = next((self.names.names[v] for v in holes), None)
        region = step.flags[1]
        self._set_flags(step.flags, f"{first}.device.type" if first else f'"{region[0] if region else "cpu"}"')
        code = step.code.fill(self._known)
        dying = self._use_up(holes)
        targets = ["_" if v is None else self._name(v, step, dying) for v in step.results]
        if targets == ["_"]:
            targets = []
        before = f"{', '.join(targets)} = " if targets else ""
        if len(before) > 60:
            pad = " " * self.indent
            self.lines += [f"{pad}(", *(f"{pad}    {t}," for t in targets), f"{pad}) = {code.flat()}"]
        else:
            self.lines += code.lines(before, "", self.indent)

    def _use_up(self, holes: Sequence[Value]) -> list[Value]:
        """Count uses down; what is dead now gives its name back."""
        dying = []
        for value, count in Counter(holes).items():
            self.uses[value] -= count
            if not self.uses[value]:
                self.names.release(value)
                dying.append(value)
        return dying

    def _name(self, value: Value, step: Step, dying: list[Value]) -> str:
        """A variable for a result: asked for by a loop, taken over from a like operand that died, or after its maker."""
        if value in self.wanted:
            return self.names.new(value, self.wanted[value])
        if len(step.results) == 1:
            for old in dying:
                name = self.names.names[old]
                fits = packet(value) in ARITHMETIC or name.partition("_")[0] == "x"
                if fits and alike(old, value) and name not in self.names.holders:
                    return self.names.take(value, name)
        return self.names.new(value, step.hint or result_hint(value, self._called))

    def _called(self, node: fx.Node) -> str | None:
        """The module called here that makes a node; ``""`` if this forward itself does, None if it is made elsewhere."""
        stack = self.tree.stack_of.get(node, ())
        if self.frame not in stack:
            return None
        if stack[-1] is self.frame:
            return ""
        last = stack[stack.index(self.frame) + 1].scope.rpartition(".")[2]
        return "x" if last.isdigit() else variable_case(last)

    def _loop_inputs(self, loop: Loop) -> list[Value]:
        return [v for v in loop.frames[0].inputs if not self._is_attribute(v)]

    def _write_loop(self, loop: Loop) -> None:
        self._flush(len(self.pending))
        self._set_flags(_PLAIN, "")
        known = [self._known(v) for v in loop.frames[0].inputs]
        arguments = [k.flat() for k in known if k is not None]
        self._use_up(self._loop_inputs(loop))
        old = self.names.names.get(loop.start)
        pad = " " * self.indent
        if old is not None and old not in self.names.holders and alike(loop.start, loop.result):
            name = self.names.take(loop.result, old)
        else:
            name = self.names.new(loop.result, "x")
            self.lines.append(f"{pad}{name} = {arguments[loop.carried]}")
        arguments[loop.carried] = name
        family, first, last = loop.frames[0].scope.rpartition(".")[0], loop.frames[0].scope, loop.frames[-1].scope
        variable = self.names.free(singular(family.rpartition(".")[2]))
        self.lines.append(f"{pad}for {variable} in {self.loop_over(self.frame.scope, first, last)}:")
        inner = call(variable, [text(a) for a in arguments])
        self.lines += inner.lines(f"{name} = ", "", self.indent + 4)

    def _return(self, result: Step) -> None:
        result = self._consume(result)
        self._flush(len(self.pending))
        self._set_flags(_PLAIN, "")
        code = result.code.fill(self._known)
        if not self.frame.outputs:
            return
        items = code.parts[-1]
        if len(self.frame.outputs) > 1 and not isinstance(items, Ref | str):
            flat = ", ".join(i.flat() for i in items.items)
            if len(flat) + 15 <= _READABLE:
                self.lines.append(f"{' ' * 8}return {flat}")
                return
        self.lines += code.lines("return ", "", 8)
