"""Equal units of a repeated model as one line: ``layers.{0-31}.attention``, ``layers.{0..3, 8..11}``."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Row = TypeVar("Row")
_NUMBER = re.compile(r"\d+")
LISTED = 4
"""How many different parts of names are spelled out."""


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2,5"``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def folded_name(names: list[str]) -> str:
    """Names that differ in their first number only by its ranges; others by the parts that differ, or the ends of a long list."""
    if len(names) == 1:
        return names[0]
    heads = {_NUMBER.sub("{}", name, count=1) for name in names}
    numbers = [int(found.group()) for name in names if (found := _NUMBER.search(name))]
    if len(heads) == 1 and len(numbers) == len(names):
        return heads.pop().replace("{}", "{" + ranges(numbers) + "}", 1)
    head = _common(names)
    tail = _common([name[len(head) :][::-1] for name in names])[::-1]
    parts = [name[len(head) : len(name) - len(tail)] for name in names]
    shown = parts if len(parts) <= LISTED else [parts[0], "...", parts[-1]]
    return f"{head}{{{', '.join(shown)}}}{tail}"


def _common(names: list[str]) -> str:
    """The longest common start that does not end inside a number."""
    start = os.path.commonprefix(names)  # noqa: RUF071  # character by character is meant
    return start.rstrip("0123456789") if any(name[len(start) :][:1].isdigit() for name in names) else start


def fold(
    rows: Iterable[Row], name: Callable[[Row], str], fate: Callable[[Row], Hashable]
) -> list[tuple[str, list[Row]]]:
    """Rows of one shape of name and one fate together, in order of first appearance."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("#", name(row)), fate(row)), []).append(row)
    return [(folded_name([name(row) for row in group]), group) for group in groups.values()]
