"""Small pieces of Python text with holes: what operators are spelled with before variables have names.

A ``Code`` is a sequence of strings, bracketed item lists and references to values. It knows how strongly it binds, so
that one can be put into another with parentheses only where Python needs them, and it lays itself out as ``ruff format``
would: on one line, or one item a line with a trailing comma.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

WIDTH = 120
ATOM, UNARY, PRODUCT, SUM, AND, XOR, OR, COMPARE = 100, 70, 60, 50, 40, 35, 30, 20
"""How strongly an expression binds; Python's own order."""


@dataclass(frozen=True)
class Value:
    """A tensor (or a tuple of them) that statements pass on.

    Either what a node makes (``item`` >= 0: that element of its tuple) or, with ``node`` None, the parameter or buffer
    registered as ``attribute``.
    """

    node: fx.Node | None
    item: int = -1
    attribute: str = ""


@dataclass(frozen=True)
class Ref:
    """A hole for a value; ``binds`` is how strongly whatever fills it must bind."""

    value: Value
    binds: int = 0


@dataclass(frozen=True)
class Items:
    """A bracketed, comma-separated list."""

    opening: str
    items: tuple[Code, ...]
    closing: str


@dataclass(frozen=True)
class Code:
    """An expression."""

    parts: tuple[str | Items | Ref, ...]
    binds: int = ATOM
    depth: int = 1
    """How many operators are nested in it."""

    def refs(self) -> Iterator[Ref]:
        """Its holes, in the order in which Python evaluates them."""
        for part in self.parts:
            if isinstance(part, Ref):
                yield part
            elif isinstance(part, Items):
                for item in part.items:
                    yield from item.refs()

    def fill(self, fillers: Callable[[Value], Code | None]) -> Code:
        """The expression with holes filled; those for which ``fillers`` gives None stay open."""
        depth = self.depth
        parts: list[str | Items | Ref] = []
        for part in self.parts:
            if isinstance(part, Items):
                inner = tuple(item.fill(fillers) for item in part.items)
                depth = max([depth, *(item.depth + 1 for item in inner if item.depth)])
                parts.append(replace(part, items=inner))
                continue
            filler = fillers(part.value) if isinstance(part, Ref) else None
            if filler is None or not isinstance(part, Ref):
                parts.append(part)
                continue
            depth = max(depth, filler.depth + self.depth)
            parts += ["(", *filler.parts, ")"] if filler.binds < part.binds else filler.parts
        return Code(tuple(parts), self.binds, depth)

    def flat(self) -> str:
        """On one line. Every hole must be filled."""
        text = ""
        for part in self.parts:
            assert not isinstance(part, Ref)
            if isinstance(part, Items):
                text += part.opening + ", ".join(item.flat() for item in part.items) + part.closing
            else:
                text += part
        return text

    def lines(self, before: str, after: str, indent: int) -> list[str]:
        """``before + expression + after`` at an indentation, one item of its outer lists a line if it is too long."""
        room = WIDTH - indent
        line = before + self.flat() + after
        if len(line) <= room or not any(isinstance(p, Items) and p.items for p in self.parts):
            return [" " * indent + line]
        split = max(i for i, p in enumerate(self.parts) if isinstance(p, Items) and p.items)
        bracket = self.parts[split]
        assert isinstance(bracket, Items)
        head = before + Code(self.parts[:split]).flat() + bracket.opening
        tail = bracket.closing + Code(self.parts[split + 1 :]).flat() + after
        out = [" " * indent + head]
        for item in bracket.items:
            out += item.lines("", ",", indent + 4)
        return [*out, " " * indent + tail]


def text(code: str, binds: int = ATOM) -> Code:
    """A constant piece of text."""
    return Code((code,), binds, depth=0)


def ref(value: Value) -> Code:
    """Nothing but a hole."""
    return Code((Ref(value),), depth=0)


def call(head: str | Code, items: list[Code], *, brackets: str = "()") -> Code:
    """``head(item, item)``; the head may be a method of a hole."""
    parts = (head,) if isinstance(head, str) else head.parts
    depth = max([0, *(item.depth for item in items)]) + 1
    return Code((*parts, Items(brackets[0], tuple(items), brackets[1])), ATOM, depth)


def operand(code: Code, binds: int) -> tuple[str | Items | Ref, ...]:
    """The parts of an operand, bracketed if it binds less strongly than its place needs; its own holes inherit the need."""
    if len(code.parts) == 1 and isinstance(code.parts[0], Ref):
        return (Ref(code.parts[0].value, binds),)
    return ("(", *code.parts, ")") if code.binds < binds else code.parts


def binary(left: Code, sign: str, right: Code, binds: int) -> Code:
    """``left sign right``, grouping to the left (comparisons do not chain)."""
    outer = binds + 1 if binds == COMPARE else binds
    return Code((*operand(left, outer), f" {sign} ", *operand(right, binds + 1)), binds)


def method(owner: Code, name: str) -> Code:
    """``owner.name``, to be called."""
    return Code((*operand(owner, ATOM), f".{name}"), ATOM)
