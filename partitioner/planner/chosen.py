"""A unit choice with its candidate, and the derived facts that time and memory both need."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.planner.problem import Candidate, Decisions, Mode, PlanningProblem, UnitChoice


@dataclass(frozen=True)
class Chosen:
    """One unit of a plan."""

    choice: UnitChoice
    unit: Candidate

    @property
    def gathers(self) -> bool:
        return self.choice.mode is not Mode.REPLICATE and self.unit.gather_bytes > 0

    @property
    def gathers_in_backward(self) -> bool:
        return self.gathers and self.choice.mode is Mode.RESHARD and self.unit.backward_gather

    @property
    def kept(self) -> bool:
        return self.choice.mode is Mode.KEEP

    @property
    def reduce_ns(self) -> int:
        if not self.unit.trainable:
            return 0
        return self.unit.all_reduce_ns if self.choice.mode is Mode.REPLICATE else self.unit.reduce_scatter_ns


def split_choices(problem: PlanningProblem, decisions: Decisions) -> tuple[list[Chosen], list[Chosen]]:
    """(chain entries in execution order, pinned units)."""
    chosen = [Chosen(choice, problem.candidates[choice.candidate]) for choice in decisions.units]
    entries = sorted((c for c in chosen if not c.unit.pinned), key=lambda c: c.unit.first)
    return entries, [c for c in chosen if c.unit.pinned]


def recompute_at(problem: PlanningProblem, decisions: Decisions) -> list[int]:
    """Extra compute at the start of each backward window, in ns."""
    extra = [0] * problem.num_windows
    for index in decisions.recompute:
        segment = problem.segments[index]
        extra[segment.last] += segment.recompute_ns
    return extra
