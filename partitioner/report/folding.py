"""Equal units of a repeated model as one line: ``layers.{0-31}.attention``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Row = TypeVar("Row")
_NUMBER = re.compile(r"\d+")


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
    """Names that differ in their first number only, as one; several names that differ otherwise, by the first and a count."""
    if len(names) == 1:
        return names[0]
    heads = {_NUMBER.sub("{}", name, count=1) for name in names}
    numbers = [int(found.group()) for name in names if (found := _NUMBER.search(name))]
    if len(heads) == 1 and len(numbers) == len(names):
        return heads.pop().replace("{}", "{" + ranges(numbers) + "}", 1)
    return f"{names[0]} .. {names[-1]}"


def fold(
    rows: Iterable[Row], name: Callable[[Row], str], fate: Callable[[Row], Hashable]
) -> list[tuple[str, list[Row]]]:
    """Rows of one shape of name and one fate together, in order of first appearance."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("#", name(row)), fate(row)), []).append(row)
    return [(folded_name([name(row) for row in group]), group) for group in groups.values()]
