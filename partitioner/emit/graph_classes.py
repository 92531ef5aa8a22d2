"""The classes of an emitted model: one for every structure, whatever the number of modules that have it.

Classes are written from the innermost modules outwards. Two modules share a class if everything that would be written
for them is the same text: parameters with their shapes, submodules, and statements. A module that is nothing but one of
torch's own layers, or a row of modules, is not a class but that layer, or ``nn.Sequential``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from partitioner.emit.graph_body import Body
from partitioner.emit.graph_code import Code, Value, call, text
from partitioner.emit.graph_layers import own_layer
from partitioner.emit.graph_names import class_case, identifier, is_plain
from partitioner.emit.graph_tree import ROOT, Frame, Tree, fake_of, inside
from partitioner.errors import EmitError
from partitioner.program import TensorInfo

MODEL = "Model"
"""Class of the root."""
_RESERVED = frozenset({MODEL, "Tensor", "Path", "Iterator", "F"})


@dataclass
class Layout:
    """Every module name that the emitted model has, and what stands under it."""

    tree: Tree
    children: dict[str, list[str]] = field(default_factory=dict)  # module -> names of modules directly under it
    tensors: dict[str, list[str]] = field(default_factory=dict)  # module -> parameters and buffers directly under it
    rows: dict[str, int] = field(default_factory=dict)  # modules that are written as a list -> its length

    def path(self, scope: str, name: str, base: str = "self") -> str:
        """How code in ``scope`` reaches a module, parameter or buffer under it."""
        made, at = base, scope
        rest = name[len(scope) + 1 :] if scope else name
        for part in rest.split("."):
            if at in self.rows and part.isdigit():
                made += f"[{part}]"
            elif is_plain(part):
                made += f".{part}"
            else:
                made = f'getattr({made}, "{part}")'
            at = f"{at}.{part}" if at else part
        return made

    def loop_over(self, scope: str, first: str, last: str) -> str:
        """What a ``for`` over modules ``first`` to ``last`` runs over."""
        family, _, start = first.rpartition(".")
        stop = int(last.rpartition(".")[2]) + 1
        count = self.rows.get(family)
        if count is None:
            names = [f"{family}.{i}" if family else str(i) for i in range(int(start), stop)]
            return "(" + ", ".join(self.path(scope, name) for name in names) + ")"
        owner = self.path(scope, family) if family != scope else "self"
        if int(start) == 0 and stop == count:
            return owner
        return f"{owner}[{start if int(start) else ''}:{stop if stop != count else ''}]"


def lay_out(tree: Tree) -> Layout:
    """Every kept module and every holder of a parameter, in the order of the parameter table."""
    layout = Layout(tree)
    kept = tree.kept
    seen: dict[str, None] = {ROOT: None}

    def add(module: str) -> None:
        if module in seen:
            return
        parent = module.rpartition(".")[0]
        add(parent)
        seen[module] = None
        layout.children.setdefault(parent, []).append(module)

    for name in tree.registered:
        holder = name.rpartition(".")[0]
        add(holder)
        layout.tensors.setdefault(holder, []).append(name)
    for module in sorted((m for m in kept if m), key=lambda m: kept[m][0].first):
        add(module)
    for module, children in layout.children.items():
        numbers = sorted(int(c.rpartition(".")[2]) for c in children if c.rpartition(".")[2].isdigit())
        if module in layout.tensors or len(numbers) != len(children):
            continue
        if module not in kept and numbers == list(range(len(numbers))):
            layout.rows[module] = len(numbers)
            children.sort(key=lambda c: int(c.rpartition(".")[2]))
        elif _is_row(module, kept) and all(c in kept for c in children):
            layout.rows[module] = numbers[-1] + 1
    return layout


def _is_row(module: str, kept: dict[str, list[Frame]]) -> bool:
    """Whether a module is what ``nn.Sequential`` is."""
    return module != ROOT and module in kept and all(_runs_in_row(frame) for frame in kept[module])


def _runs_in_row(frame: Frame) -> bool:
    """Whether a call runs its numbered children one after another, each on the result of the one before."""
    before: Frame | None = None
    for item in frame.items:
        if not isinstance(item, Frame) or len(item.inputs) != 1 or len(item.outputs) != 1:
            return False
        if item.scope.rpartition(".")[0] != frame.scope or not item.scope.rpartition(".")[2].isdigit():
            return False
        if before is not None:
            ascending = int(item.scope.rpartition(".")[2]) > int(before.scope.rpartition(".")[2])
            if not ascending or item.inputs != before.outputs:
                return False
        before = item
    return before is not None and frame.outputs == before.outputs


@dataclass
class Classes:
    """What was written so far."""

    tree: Tree
    layout: Layout
    constructors: dict[str, Code] = field(default_factory=dict)  # module -> how it is made
    texts: dict[str, str] = field(default_factory=dict)  # class -> everything below its first line
    members: dict[str, list[str]] = field(default_factory=dict)  # class -> modules of that class

    def write(self) -> set[str]:
        """Write every class, inner modules first. Returns modules whose calls differ, which cannot be classes."""
        different = set()
        done: dict[str, tuple[Code, str]] = {}
        for frame in self.tree.root.frames():
            code, written = self._module(frame)
            if frame.scope in done:
                if done[frame.scope][1] != written:
                    different.add(frame.scope)
                continue
            done[frame.scope] = (code, written)
            self.constructors[frame.scope] = code if code.parts else self._share(frame.scope, written)
        return different

    def _module(self, frame: Frame) -> tuple[Code, str]:
        """(constructor, something that tells calls apart) of what needs no class, else (nothing, text of the class)."""
        scope = frame.scope
        if scope in self.layout.rows:
            called = " ".join(i.scope for i in frame.items if isinstance(i, Frame))
            return self._row(scope, "nn.Sequential"), called
        made = {n.rpartition(".")[2]: self.tree.registered[n] for n in self.layout.tensors.get(scope, [])}
        if scope != ROOT and scope not in self.layout.children:
            layer = own_layer(self.tree, frame, made)
            if layer is not None:
                return layer, layer.flat()
        keys = {m: c.flat() for m, c in self.constructors.items()}
        body = Body(self.tree, frame, keys, self.layout.path, self.layout.loop_over)
        arguments, statements = body.write()
        lines = [*self._constructor(scope), *_signature(frame, arguments), *statements]
        return Code(()), "\n".join(lines) + "\n"

    def _share(self, scope: str, written: str) -> Code:
        """The class with this text, made if there is none."""
        base = MODEL if scope == ROOT else self._class_name(scope)
        number = 1
        while True:
            name = base if number == 1 else f"{base}{number}"
            if self.texts.setdefault(name, written) == written and (scope == ROOT or name not in _RESERVED):
                break
            number += 1
        self.members.setdefault(name, []).append(scope)
        return call(name, [])

    def _class_name(self, scope: str) -> str:
        """The class that the module had; where a file format has none, its own name."""
        known = next((m.class_name for m in self.tree.program.modules if m.name == scope), "")
        parts = scope.split(".")
        named = next((p for p in reversed(parts) if not p.isdigit()), "module")
        if parts[-1].isdigit() and named.endswith("s"):
            named = named[:-1]
        name = known if known.isidentifier() and known.isascii() else class_case(named)
        return f"{name}Module" if name in _RESERVED or identifier(name) != name else name

    def _row(self, module: str, kind: str) -> Code:
        """``nn.Sequential`` or ``nn.ModuleList`` of the numbered children; a number that nothing runs is an identity."""
        children = {int(c.rpartition(".")[2]): c for c in self.layout.children[module]}
        numbers = range(self.layout.rows[module])
        parts = [self._made(children[i]) if i in children else text("nn.Identity()") for i in numbers]
        if len(parts) > 2 and len({p.flat() for p in parts}) == 1:
            every = f"{parts[0].flat()} for _ in range({len(parts)})"
            return call(kind, [text(f"*({every})" if kind == "nn.Sequential" else every)])
        return call(kind, parts if kind == "nn.Sequential" else [call("", parts, brackets="[]")])

    def _made(self, module: str) -> Code:
        if module in self.constructors:
            return self.constructors[module]
        return self._row(module, "nn.ModuleList") if module in self.layout.rows else text("nn.Module()")

    def _constructor(self, scope: str) -> list[str]:
        """``__init__``, if there is anything to make: parameters and buffers first, then modules, as torch lists them."""
        lines: list[str] = []
        self._fill(scope, "self", scope, lines)
        if scope == ROOT and _tied(self.tree):
            lines += [f"{' ' * 8}self.tie_weights()", "", *self._tie_weights()]
        if not lines:
            return []
        return [f"{' ' * 4}def __init__(self) -> None:", f"{' ' * 8}super().__init__()", *lines, ""]

    def _fill(self, scope: str, base: str, module: str, lines: list[str]) -> None:
        """Statements that put everything under ``module``, which ``base`` reaches, in its place."""
        tied = _tied(self.tree)
        for name in self.layout.tensors.get(module, []):
            if name not in tied:
                info = self.tree.registered[name]
                lines += _registration(base, name.rpartition(".")[2], info, buffer=info.name in self.tree.buffers)
        for child in self.layout.children.get(module, []):
            last = child.rpartition(".")[2]
            if module not in self.layout.rows:
                made = self._made(child)
                if is_plain(last):
                    lines += made.lines(f"{base}.{last} = ", "", 8)
                else:
                    lines += call(f"{base}.add_module", [text(f'"{last}"'), made]).lines("", "", 8)
            if child not in self.constructors:
                self._fill(scope, self.layout.path(scope, child), child, lines)

    def _tie_weights(self) -> list[str]:
        lines = [f"{' ' * 4}def tie_weights(self) -> None:", f'{" " * 8}"""One parameter under all of its names."""']
        for name, canonical in _tied(self.tree).items():
            holder, _, last = name.rpartition(".")
            owner = self.layout.path(ROOT, holder) if holder else "self"
            source = self.layout.path(ROOT, canonical)
            if is_plain(last):
                lines.append(f"{' ' * 8}{owner}.{last} = {source}")
            else:
                lines.append(f'{" " * 8}{owner}.register_parameter("{last}", {source})')
        return lines


def _tied(tree: Tree) -> dict[str, str]:
    """Name -> canonical name, of names under which a parameter is registered once more."""
    first: dict[str, str] = {}
    return {n: first[t.name] for n, t in tree.registered.items() if first.setdefault(t.name, n) != n}


def _registration(base: str, name: str, info: TensorInfo, *, buffer: bool) -> list[str]:
    sizes = ", ".join(map(str, info.shape)) if info.shape else "()"
    dtype = "" if info.dtype == "float32" else f", dtype=torch.{info.dtype}"
    empty = f"torch.empty({sizes}{dtype})"
    if buffer:
        return [f'{" " * 8}{base}.register_buffer("{name}", {empty})']
    made = f"nn.Parameter({empty}{'' if info.trainable else ', requires_grad=False'})"
    if is_plain(name):
        return [f"{' ' * 8}{base}.{name} = {made}"]
    return [f'{" " * 8}{base}.register_parameter("{name}", {made})']


def _kind(value: Value) -> str:
    if value.node is None or isinstance(fake_of(value), torch.Tensor):
        return "Tensor"
    return "tuple[Tensor, ...]"


def _signature(frame: Frame, arguments: list[str]) -> list[str]:
    typed = [text("self")]
    typed += [text(f"{a}: {_kind(v)}") for a, v in zip(arguments, frame.inputs, strict=True)]
    kinds = [_kind(v) for v in frame.outputs]
    result = kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]" if kinds else "None"
    return call("forward", typed).lines("def ", f" -> {result}:", 4)


def check_units(tree: Tree, units: list[tuple[str, ...]]) -> None:
    """Every unit must be a module whose forward holds all operators that read what it owns.

    Raises:
        EmitError: names the unit, the parameter, and the operator that stands outside.
    """
    kept = tree.kept
    group_of = {module: group for group in units for module in group}
    for module in group_of:
        if module not in kept:
            raise EmitError(
                f"{module} cannot be a module of its own: its operators are called from a module that does not contain "
                "it, are mixed with others, or differ from call to call",
                hint="choose a module around it",
            )

    def owner(name: str) -> str:
        around = [m for m in group_of if inside(name, m)]
        return max(around, key=lambda m: m.count(".") + bool(m), default=ROOT)

    for (reader, _), value in tree.attributes.items():
        unit = owner(value.attribute)
        if unit not in [frame.scope for frame in tree.stack_of[reader]]:
            raise EmitError(_outside(unit, value.attribute, reader, tree), hint="choose a module around both")
    names: dict[str, list[str]] = {}
    for name, info in tree.registered.items():
        names.setdefault(info.name, []).append(name)
    for group in names.values():
        homes = {group_of.get(owner(n), (ROOT,)) for n in group}
        if len(homes) > 1:
            raise EmitError(
                f"{' and '.join(group)} are one parameter, but lie in different units",
                hint="put their modules into one unit",
            )


def _outside(unit: str, name: str, reader: fx.Node, tree: Tree) -> str:
    where = tree.stack_of[reader][-1].scope or "the root"
    return f"unit {unit}: its parameter {name} is read by {reader.name} in {where}, outside the forward of {unit}"
