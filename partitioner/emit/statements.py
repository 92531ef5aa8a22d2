"""Lines of emitted Python that name modules, and the loops that many like lines fold into.

A statement is a small expression tree. Statements that differ only in one number of the module names ("layers.0",
"layers.1", ...) become one ``for`` loop over exactly those numbers; everything else is printed as it is.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

WIDTH = 120
STEP = "    "


@dataclass(frozen=True)
class Module:
    """A module by its name, cut at the first number: ``layers.`` 3 ``.attn``. In a loop the number is an offset."""

    head: str
    number: int | None = None
    tail: str = ""


@dataclass(frozen=True)
class Group:
    """A bracket with parts: a call's arguments or a list."""

    opening: str
    parts: tuple[Expr, ...]
    closing: str


Expr = str | Module | Group | tuple["Expr", ...]
"""Text as it is, a module, a bracket, or several of these one after the other."""


def module(name: str) -> Module:
    """``"layers.3.attn"`` -> its head, number and tail; the empty name is the root."""
    parts = name.split(".")
    for k, part in enumerate(parts):
        if part.isdecimal() and part.isascii() and str(int(part)) == part:
            head = "".join(p + "." for p in parts[:k])
            return Module(head, int(part), "".join("." + p for p in parts[k + 1 :]))
    return Module(name)


def call(function: str, *parts: Expr) -> Expr:
    return Group(f"{function}(", parts, ")")


def listed(names: Iterable[str]) -> Group:
    return Group("[", tuple(module(name) for name in names), "]")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _module_text(item: Module, looped: bool) -> str:
    if item == Module(""):
        return "model"
    if item.number is None:
        return f"at({_quoted(item.head)})"
    if not looped:
        return f"at({_quoted(f'{item.head}{item.number}{item.tail}')})"
    sign = "-" if item.number < 0 else "+"
    variable = f"{{i {sign} {abs(item.number)}}}" if item.number else "{i}"
    head, tail = (part.replace("{", "{{").replace("}", "}}") for part in (item.head, item.tail))
    return f"at(f{_quoted(head + variable + tail)})"


def _flat(expr: Expr, looped: bool) -> str:
    if isinstance(expr, str):
        return expr
    if isinstance(expr, Module):
        return _module_text(expr, looped)
    if isinstance(expr, Group):
        return expr.opening + ", ".join(_flat(part, looped) for part in expr.parts) + expr.closing
    return "".join(_flat(part, looped) for part in expr)


def lines_of(expr: Expr, indent: str, *, looped: bool = False, end: str = "") -> list[str]:
    """One line if it fits, else its last bracket opened with one part a line."""
    text = indent + _flat(expr, looped) + end
    if len(text) <= WIDTH:
        return [text]
    before: Expr = ""
    if isinstance(expr, tuple):
        before, expr = expr[:-1], expr[-1]
    if not isinstance(expr, Group):
        return [text]
    inner = [line for part in expr.parts for line in lines_of(part, indent + STEP, looped=looped, end=",")]
    return [indent + _flat(before, looped) + expr.opening, *inner, indent + expr.closing + end]


def _base(expr: Expr) -> int | None:
    """The number in the first module that has one."""
    if isinstance(expr, Module):
        return expr.number
    parts = expr.parts if isinstance(expr, Group) else expr if isinstance(expr, tuple) else ()
    return next((base for part in parts if (base := _base(part)) is not None), None)


def _relative(expr: Expr, base: int) -> Expr:
    if isinstance(expr, Module):
        return expr if expr.number is None else replace(expr, number=expr.number - base)
    if isinstance(expr, Group):
        return replace(expr, parts=tuple(_relative(part, base) for part in expr.parts))
    if isinstance(expr, tuple):
        return tuple(_relative(part, base) for part in expr)
    return expr


def _numbers(values: Sequence[int]) -> Expr:
    """Ascending numbers as ``range(...)``, or as a tuple of numbers and ranges."""
    steps = {b - a for a, b in itertools.pairwise(values)}
    if len(steps) == 1:
        step = steps.pop()
        stop = values[-1] + 1
        if step > 1:
            return f"range({values[0]}, {stop}, {step})"
        return f"range({values[0]}, {stop})" if values[0] else f"range({stop})"
    parts: list[Expr] = []
    k = 0
    while k < len(values):
        end = k + 1
        while end < len(values) and values[end] == values[k] + end - k:
            end += 1
        if end - k > 2:
            parts.append(f"*range({values[k]}, {values[end - 1] + 1})")
        else:
            parts += [str(value) for value in values[k:end]]
        k = end
    return Group("(", tuple(parts), ")")


def _loop(values: Sequence[int], body: Sequence[Expr], indent: str) -> list[str]:
    header = lines_of(("for i in ", _numbers(values)), indent, end=":")
    return header + [line for expr in body for line in lines_of(expr, indent + STEP, looped=True)]


def fold(statements: Iterable[Expr], indent: str) -> list[str]:
    """Print statements whose order does not matter, three or more like ones as a loop.

    They come in the order in which each kind first appears; neighbouring loops over the same numbers become one.
    """
    kinds: dict[Expr, list[int]] = {}
    for expr in statements:
        base = _base(expr)
        kinds.setdefault(expr if base is None else _relative(expr, base), []).append(-1 if base is None else base)
    lines: list[str] = []
    pending: tuple[list[int], list[Expr]] = ([], [])

    def finish() -> None:
        if pending[1]:
            lines.extend(_loop(pending[0], pending[1], indent))
        pending[0].clear()
        pending[1].clear()

    for kind, bases in kinds.items():
        values = sorted(bases)
        if len(values) < 3:
            finish()
            for value in values:
                lines.extend(lines_of(_relative(kind, -value) if value >= 0 else kind, indent))
            continue
        if values != pending[0]:
            finish()
            pending[0].extend(values)
        pending[1].append(kind)
    finish()
    return lines
