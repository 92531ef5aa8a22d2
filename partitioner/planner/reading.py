"""Between the variables of the ILP and the decisions that they spell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partitioner.planner.chosen import split_choices
from partitioner.planner.model import Model
from partitioner.planner.problem import Decisions, Mode, PlanningProblem, UnitChoice
from partitioner.planner.rows import Variable


def _is_one(values: Mapping[Variable, float], variable: Variable | None) -> bool:
    return variable is not None and values[variable] > 0.5


def read_decisions(model: Model, values: Mapping[Variable, float]) -> Decisions:
    """Variable values -> Decisions, units in execution order."""
    problem = model.problem
    units = []
    for i in range(len(problem.candidates)):
        for mode in Mode:
            if _is_one(values, model.mode.get((i, mode))):
                units.append(
                    UnitChoice(
                        candidate=i,
                        mode=mode,
                        prefetch_forward=1 + _is_one(values, model.forward.switch.get(i)),
                        prefetch_backward=1 + _is_one(values, model.backward.switch.get(i)),
                        offload_optimizer=_is_one(values, model.offload.get(i)),
                    )
                )
    units.sort(key=lambda c: (problem.candidates[c.candidate].first, not problem.candidates[c.candidate].pinned))
    recompute = tuple(s for s in sorted(model.recompute) if _is_one(values, model.recompute[s]))
    return tidy(problem, Decisions(units=tuple(units), recompute=recompute))


def fixing(model: Model, decisions: Decisions) -> dict[Variable, float]:
    """Values of the binaries that spell a plan: a warm start, or (in tests) a fixed plan."""
    values = dict.fromkeys(model.binaries(), 0.0)
    for choice in decisions.units:
        i = choice.candidate
        values[model.mode[i, choice.mode]] = 1.0
        for switch, distance in (
            (model.forward.switch, choice.prefetch_forward),
            (model.backward.switch, choice.prefetch_backward),
        ):
            if i in switch:
                values[switch[i]] = float(distance == 2)
        if choice.offload_optimizer:
            values[model.offload[i]] = 1.0
    for s in decisions.recompute:
        values[model.recompute[s]] = 1.0
    return values


def tidy(problem: PlanningProblem, decisions: Decisions) -> Decisions:
    """Prefetch distances that mean nothing (nothing is gathered) back to 1."""
    entries, _ = split_choices(problem, decisions)
    by_candidate = {e.choice.candidate: e for e in entries}
    units = []
    for choice in decisions.units:
        entry = by_candidate.get(choice.candidate)
        forward = choice.prefetch_forward if entry is not None and entry.gathers else 1
        backward = choice.prefetch_backward if entry is not None and entry.gathers_in_backward else 1
        units.append(replace(choice, prefetch_forward=forward, prefetch_backward=backward))
    return replace(decisions, units=tuple(units))
