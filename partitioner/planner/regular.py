"""Regular plans: the same decision for every block, and the best of them.

People can read a plan that treats equal blocks equally. Many plans of one model take the same time, so a regular one among
them is worth finding. No claim of optimality is made here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from partitioner.planner.check import fits, violations
from partitioner.planner.problem import Candidate, Decisions, Mode, PlanningProblem, UnitChoice
from partitioner.planner.simulate import Simulation, simulate, step_ns

_NUMBER = re.compile(r"\d+")
FASTEST = 6  # plans of one tiling, fastest with nothing recomputed, that are tried against the memory limit
KEPT = (
    0.0,
    0.25,
    0.5,
    1.0,
)  # shares of the entries that stay gathered, the last ones first: they are needed first again


@dataclass(frozen=True, kw_only=True)
class Regular:
    """One regular plan that fits, simulated."""

    decisions: Decisions
    simulation: Simulation


def _kind(candidate: Candidate) -> tuple[str, int]:
    """Equal for the same unit of equal blocks: the name without its numbers, and how many windows it covers."""
    return _NUMBER.sub("#", candidate.name), candidate.last - candidate.first


def _tile(problem: PlanningProblem, wanted: tuple[str, int] | None) -> tuple[int, ...]:
    """Chain candidates that cover all windows: those of one kind wherever they are, the shortest elsewhere."""
    starting: dict[int, list[int]] = {}
    for i, c in enumerate(problem.candidates):
        if not c.pinned:
            starting.setdefault(c.first, []).append(i)
    chosen: list[int] = []
    at = 0
    while at < problem.num_windows:
        here = starting.get(at, [])
        best = next((i for i in here if _kind(problem.candidates[i]) == wanted), None)
        if best is None:
            best = min(here, key=lambda i: problem.candidates[i].last)
        chosen.append(best)
        at = problem.candidates[best].last + 1
    return tuple(chosen)


def regular_tilings(problem: PlanningProblem) -> list[tuple[int, ...]]:
    """The finest tiling, and one for every kind of larger candidate that occurs at least twice."""
    counts: dict[tuple[str, int], int] = {}
    for c in problem.candidates:
        if not c.pinned:
            counts[_kind(c)] = counts.get(_kind(c), 0) + 1
    kinds = [kind for kind, count in counts.items() if count > 1 or kind[1] == problem.num_windows - 1]
    return list(dict.fromkeys([_tile(problem, None), *(_tile(problem, kind) for kind in kinds)]))


def _modes(problem: PlanningProblem, tiling: tuple[int, ...], small_bytes: int, kept: float) -> list[Mode]:
    """Small units replicated, the last share of the others kept."""
    modes = []
    first_kept = len(tiling) - round(kept * len(tiling))
    for k, i in enumerate(tiling):
        candidate = problem.candidates[i]
        if not candidate.gather_bytes:
            modes.append(Mode.RESHARD)
        elif candidate.gather_bytes <= small_bytes and problem.num_gpus > 1:
            modes.append(Mode.REPLICATE)
        else:
            modes.append(Mode.KEEP if k >= first_kept else Mode.RESHARD)
    return modes


def _prefetch(modes: list[Mode], k: int, forward: int, backward: int) -> tuple[int, int]:
    """Distances where they mean something: another unit that far away, and a gather to issue."""
    gathers = modes[k] is not Mode.REPLICATE
    ahead = forward if gathers and k >= forward else 1
    behind = backward if modes[k] is Mode.RESHARD and k + backward < len(modes) else 1
    return ahead, behind


def _free(problem: PlanningProblem, decisions: Decisions) -> tuple[int, ...]:
    """The segments that may be recomputed under the units of a plan."""
    modules = {m for c in decisions.units for m in problem.candidates[c.candidate].modules}
    return tuple(s for s, segment in enumerate(problem.segments) if segment.module in modules)


def _sizes(problem: PlanningProblem) -> list[int]:
    """Thresholds below which a unit is small: none, and each gap of four or more between sizes that occur."""
    sizes = sorted({c.gather_bytes for c in problem.candidates if c.gather_bytes})
    return [0, *(a for a, b in itertools.pairwise(sizes) if b >= 4 * a), sizes[-1] if sizes else 0]


def regular_plans(problem: PlanningProblem, tiling: tuple[int, ...], *, offload: bool) -> Iterator[Decisions]:
    """Regular plans over one tiling with nothing recomputed, the simplest first."""
    pinned = [i for i, c in enumerate(problem.candidates) if c.pinned]
    for small, kept in itertools.product(dict.fromkeys(_sizes(problem)), KEPT):
        modes = _modes(problem, tiling, small, kept)
        for forward, backward in ((1, 1), (1, 2), (2, 2)):
            units = []
            for k, i in enumerate(tiling):
                ahead, behind = _prefetch(modes, k, forward, backward)
                units.append(_choice(problem, i, modes[k], ahead, behind, offload))
            held = Mode.KEEP if kept else Mode.RESHARD
            units += [_choice(problem, i, held, 1, 1, offload) for i in pinned]
            yield Decisions(units=tuple(units))


def _choice(problem: PlanningProblem, i: int, mode: Mode, ahead: int, behind: int, offload: bool) -> UnitChoice:
    moves = offload and mode is not Mode.REPLICATE and problem.candidates[i].offload_ns > 0
    gathers = problem.candidates[i].gather_bytes > 0 and mode is not Mode.REPLICATE
    again = gathers and mode is Mode.RESHARD and problem.candidates[i].backward_gather
    return UnitChoice(
        candidate=i,
        mode=mode,
        prefetch_forward=ahead if gathers else 1,
        prefetch_backward=behind if again else 1,
        offload_optimizer=moves,
    )


def _fitting(problem: PlanningProblem, decisions: Decisions) -> Regular | None:
    """The plan with as few of its first segments recomputed as make it fit, by bisection; None if all are not enough."""
    free = _free(problem, decisions)
    low, high, found = 0, len(free), None
    while low <= high:
        middle = 0 if low == 0 and found is None and high == len(free) else (low + high) // 2
        plan = replace(decisions, recompute=free[:middle])
        simulation = simulate(problem, plan)
        if fits(problem, simulation):
            found, high = Regular(decisions=plan, simulation=simulation), middle - 1
        else:
            low = middle + 1
    return found


def best_regular(problem: PlanningProblem, *, allowed_ns: float) -> Regular | None:
    """The fastest regular plan that fits; of equals the simplest; None if none fits, all take longer or the pins forbid all.

    Args:
        problem: the tables.
        allowed_ns: the longest step that is still of use.
    """
    offloads = (False, True) if problem.host_limit_bytes else (False,)
    best: Regular | None = None
    for offload, tiling in itertools.product(offloads, regular_tilings(problem)):
        plans = [d for d in regular_plans(problem, tiling, offload=offload) if not violations(problem, d)]
        timed = sorted((step_ns(problem, d), n) for n, d in enumerate(plans))
        leanest = [row for row in timed[FASTEST:] if row[1] == 0]  # nothing kept, replicated or prefetched far ahead
        for time_ns, n in timed[:FASTEST] + leanest:
            if time_ns > allowed_ns or (best is not None and time_ns >= best.simulation.step_ns):
                continue
            found = _fitting(problem, plans[n])
            if found is None or found.simulation.step_ns > allowed_ns:
                continue
            if best is None or found.simulation.step_ns < best.simulation.step_ns:
                best = found
    return best
