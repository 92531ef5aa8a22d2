"""An independent reading of the rules: is this a plan of this problem, and does it keep its budgets?

Written against ``problem.py`` alone, without OR-Tools and without the formulation, so that a mistake in either shows.
"""

from __future__ import annotations

from collections.abc import Iterator

from partitioner.planner.problem import Candidate, Decisions, Mode, PlanningProblem
from partitioner.planner.simulate import Simulation, simulate


def _structure(problem: PlanningProblem, decisions: Decisions) -> Iterator[str]:
    known = range(len(problem.candidates))
    indices = [choice.candidate for choice in decisions.units]
    if any(i not in known for i in indices):
        yield "a unit is not a candidate of this problem"
        return
    if len(set(indices)) != len(indices):
        yield "a candidate is chosen twice"
    for i, unit in enumerate(problem.candidates):
        if unit.pinned and i not in indices:
            yield f"pinned unit {unit.name} is not chosen"
    at = 0
    for unit in sorted(
        (problem.candidates[i] for i in indices if not problem.candidates[i].pinned), key=lambda c: c.first
    ):
        if unit.first != at:
            yield f"unit {unit.name} starts at window {unit.first}, but the units before it end at {at}"
        at = unit.last + 1
    if at != problem.num_windows:
        yield f"the units end at window {at} of {problem.num_windows}"
    parameters = [p for i in indices for p in problem.candidates[i].parameters]
    if len(set(parameters)) != len(parameters):
        yield "a parameter is in two units"


def _pin_holds(name: str, mode: Mode, unit: Candidate, chosen: Mode) -> bool:
    if not unit.gather_bytes or chosen is mode:
        return True
    inside = any(m == name or m.startswith(f"{name}.") or name.startswith(f"{m}.") for m in unit.modules if m)
    return not (inside or name == unit.name or name in unit.parameters)


def _choices(problem: PlanningProblem, decisions: Decisions) -> Iterator[str]:
    chain = sorted(
        (c for c in decisions.units if not problem.candidates[c.candidate].pinned),
        key=lambda c: problem.candidates[c.candidate].first,
    )
    position = {c.candidate: k for k, c in enumerate(chain)}
    for choice in decisions.units:
        unit = problem.candidates[choice.candidate]
        for name, mode in problem.pins:
            if not _pin_holds(name, mode, unit, choice.mode):
                yield f"unit {unit.name} is {choice.mode.value}, but the user pinned {name} to {mode.value}"
        if choice.mode is Mode.REPLICATE and problem.num_gpus == 1:
            yield f"unit {unit.name} is replicated over one GPU"
        if choice.offload_optimizer and (choice.mode is Mode.REPLICATE or not unit.offload_ns):
            yield f"unit {unit.name} has no sharded optimizer state to offload"
        for distance in (choice.prefetch_forward, choice.prefetch_backward):
            if not 1 <= distance <= problem.max_prefetch:
                yield f"unit {unit.name} prefetches {distance} units ahead"
        k = position.get(choice.candidate)
        if choice.prefetch_forward > 1 and (k is None or k < 2):
            yield f"unit {unit.name} has no unit {choice.prefetch_forward} places before it"
        if choice.prefetch_backward > 1 and (k is None or k > len(chain) - 3):
            yield f"unit {unit.name} has no unit {choice.prefetch_backward} places after it"


def _segments(problem: PlanningProblem, decisions: Decisions) -> Iterator[str]:
    if list(decisions.recompute) != sorted(set(decisions.recompute)):
        yield "recomputed segments are not in ascending order"
    modules = {m for c in decisions.units for m in problem.candidates[c.candidate].modules}
    busy: set[int] = set()
    for s in decisions.recompute:
        segment = problem.segments[s]
        if segment.module not in modules:
            yield f"segment {segment.module} is not a module of a chosen unit"
        span = set(range(segment.first, segment.last + 1))
        if span & busy:
            yield f"segment {segment.module} overlaps another recomputed segment"
        busy |= span


def violations(problem: PlanningProblem, decisions: Decisions) -> list[str]:
    """Every rule that the plan breaks, in words; empty for a legal plan. Budgets are not looked at."""
    found = list(_structure(problem, decisions))
    if not found:
        found += [*_choices(problem, decisions), *_segments(problem, decisions)]
    return found


def fits(problem: PlanningProblem, simulation: Simulation) -> bool:
    """Whether the budgets hold at every point of the step."""
    return simulation.peak_bytes <= problem.memory_limit_bytes and simulation.host_bytes <= problem.host_limit_bytes


def check(problem: PlanningProblem, decisions: Decisions) -> Simulation:
    """Simulate a legal plan. Raises ValueError naming every broken rule."""
    found = violations(problem, decisions)
    if found:
        raise ValueError("not a plan of this problem: " + "; ".join(found))
    return simulate(problem, decisions)
