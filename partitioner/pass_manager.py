"""Passes and the runner that holds them to their word."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from partitioner.errors import PassError
from partitioner.printer import print_program, target_name
from partitioner.program import Program
from partitioner.verify import verify


@dataclass(frozen=True, kw_only=True)
class Pass(ABC):
    """A rewrite of a Program. Fields are its options; it is deterministic, idempotent, keeps no state and never prints."""

    name: ClassVar[str]

    def requires(self, program: Program) -> None:  # noqa: B027  # nothing is required unless a pass says so
        """Raise PassError if the program is not what the pass needs."""

    @abstractmethod
    def run(self, program: Program) -> bool:
        """Rewrite in place; return whether anything changed."""


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """What one pass did."""

    name: str
    changed: bool
    seconds: float
    op_changes: tuple[tuple[str, int], ...]
    """(operator, difference in count), sorted, differences only."""


Observer = Callable[[str, Program], None]
"""Called after each pass with its name."""


def _op_counts(program: Program) -> Counter[str]:
    return Counter(target_name(n) for n in program.graph.graph.nodes if n.op == "call_function")


def run_passes(
    program: Program,
    passes: Sequence[Pass],
    *,
    observer: Observer | None = None,
    check_flags: bool = False,
) -> list[PassRecord]:
    """Run passes in order; verify the program after each.

    Args:
        observer: called after each pass, for ``--print-ir-after``.
        check_flags: compare the text before and after with what the pass says it changed.

    Raises:
        PassError: naming the pass, the passes done before it, and what broke.
    """
    records: list[PassRecord] = []
    for item in passes:
        done = ", ".join(r.name for r in records) or "none"
        before = print_program(program, with_costs=True) if check_flags else ""
        counts, began = _op_counts(program), time.perf_counter()
        try:
            item.requires(program)
            changed = item.run(program)
            program.graph.recompile()
            verify(program)
        except PassError as error:
            raise PassError(f"pass {item.name}: {error.what} (passes done: {done})", hint=error.hint) from error
        seconds = time.perf_counter() - began
        if check_flags and (before != print_program(program, with_costs=True)) != changed:
            raise PassError(
                f"pass {item.name} says changed={changed}, but the program says otherwise (passes done: {done})"
            )
        after = _op_counts(program)
        changes = {op: after[op] - counts[op] for op in {*after, *counts} if after[op] != counts[op]}
        records.append(
            PassRecord(name=item.name, changed=changed, seconds=seconds, op_changes=tuple(sorted(changes.items())))
        )
        if observer is not None:
            observer(item.name, program)
    return records
