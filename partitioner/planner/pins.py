"""What the user's pins leave open, and whether any plan is left at all."""

from __future__ import annotations

from partitioner.errors import UsageError
from partitioner.planner.problem import Candidate, Mode, PlanningProblem
from partitioner.planner.tilings import cheapest_tiling


def _touches(name: str, unit: Candidate) -> bool:
    """Whether a pin's name is this unit, a module that it holds or lies in, or one of its parameters."""
    if name == unit.name or name in unit.parameters:
        return True
    return any(m == name or m.startswith(name + ".") or name.startswith(m + ".") for m in unit.modules if m)


def allowed_modes(problem: PlanningProblem, unit: Candidate) -> tuple[Mode, ...]:
    """The modes a candidate may take: all that every pin on it agrees with. Without parameters there is nothing to choose.

    Empty if its pins contradict each other (a run of blocks of which two are pinned apart, say): then the candidate
    cannot be chosen.
    """
    if not unit.gather_bytes:
        return (Mode.RESHARD,)
    pinned = {mode for name, mode in problem.pins if _touches(name, unit)}
    modes = (Mode.RESHARD, Mode.KEEP, Mode.REPLICATE) if problem.num_gpus > 1 else (Mode.RESHARD, Mode.KEEP)
    return tuple(m for m in modes if not pinned - {m})


def usable_candidates(problem: PlanningProblem) -> list[int]:
    """Candidates that may be chosen, ascending.

    Raises:
        UsageError: the pins leave no plan; the message names a contradiction.
    """
    usable = [i for i, c in enumerate(problem.candidates) if allowed_modes(problem, c)]
    barred = [c for i, c in enumerate(problem.candidates) if i not in set(usable)]
    stuck = [c for c in barred if c.pinned]
    if cheapest_tiling(problem, usable, lambda _i, _unit: 0.0) is None:
        stuck = stuck or barred
    if stuck:
        unit = stuck[0]
        pins = ", ".join(f"{name}={mode.value}" for name, mode in problem.pins if _touches(name, unit))
        raise UsageError(
            f"unit {unit.name} cannot follow its pins ({pins}): all parameters of a unit live in one way",
            hint="take one of these pins away",
        )
    return usable
