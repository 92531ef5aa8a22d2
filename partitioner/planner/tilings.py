"""Tilings: choices of chain units that cover all windows, as shortest paths under a cost per unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from partitioner.planner.problem import Candidate, PlanningProblem

Tiling = tuple[int, ...]
Cost = Callable[[int, Candidate], float]


def cheapest_tiling(problem: PlanningProblem, usable: Iterable[int], cost: Cost) -> Tiling | None:
    """The chain candidates, in execution order, that cover all windows at the least sum of costs; the first of equals.

    Args:
        problem: the tables.
        usable: candidate indices that may be used, ascending; pinned candidates among them are ignored.
        cost: of choosing a candidate (index, candidate); any sign.

    Returns None if the usable candidates cannot cover the windows.
    """
    starting: dict[int, list[int]] = {}
    for i in usable:
        if not problem.candidates[i].pinned:
            starting.setdefault(problem.candidates[i].first, []).append(i)
    best: list[tuple[float, int | None] | None] = [(0.0, None)] + [None] * problem.num_windows
    for window in range(problem.num_windows):
        here = best[window]
        for i in starting.get(window, []) if here is not None else []:
            assert here is not None
            unit = problem.candidates[i]
            total = here[0] + cost(i, unit)
            there = best[unit.last + 1]
            if there is None or total < there[0]:
                best[unit.last + 1] = (total, i)
    chosen: list[int] = []
    end = problem.num_windows
    while end > 0:
        entry = best[end]
        if entry is None or entry[1] is None:
            return None
        chosen.append(entry[1])
        end = problem.candidates[entry[1]].first
    return tuple(reversed(chosen))


def _windows(unit: Candidate) -> int:
    return unit.last - unit.first + 1


def _distance(target_bytes: int) -> Cost:
    """How far a unit is from a size, over all its windows."""
    return lambda _, unit: _windows(unit) * abs(math.log((unit.gather_bytes + 1) / (target_bytes + 1)))


def starting_tilings(problem: PlanningProblem, usable: list[int], share: Callable[[int], float]) -> list[Tiling]:
    """Different tilings to begin a search with, most promising first.

    One for every power of two of bytes that some unit gathers: units as close to that size as the model allows. For a
    transformer these are its parts, its blocks and runs of blocks. And the one that a relaxation prefers.

    Args:
        problem: the tables.
        usable: candidate indices, ascending.
        share: how much of a candidate a relaxation chose, 0..1.
    """
    sizes: dict[int, int] = {}
    for i in usable:
        size = problem.candidates[i].gather_bytes
        bucket = size.bit_length()
        sizes[bucket] = max(sizes.get(bucket, 0), size)
    costs: list[Cost] = [_distance(target) for _, target in sorted(sizes.items(), reverse=True)]
    costs.append(lambda i, unit: -share(i) * _windows(unit))
    found: dict[Tiling, float] = {}
    for cost in costs:
        tiling = cheapest_tiling(problem, usable, cost)
        if tiling is not None and tiling not in found:
            found[tiling] = sum(share(i) * _windows(problem.candidates[i]) for i in tiling)
    return sorted(found, key=lambda tiling: -found[tiling])
