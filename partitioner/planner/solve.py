"""Solve a planning problem: the fastest plan in the budgets with its proven bound, or the plan of the smallest peak."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from partitioner.errors import PartitionerError
from partitioner.planner.build import build
from partitioner.planner.model import MS, Model
from partitioner.planner.model_memory import LIMIT
from partitioner.planner.problem import Decisions, PlanningProblem
from partitioner.planner.rows import Expr
from partitioner.planner.search import Goal, Search
from partitioner.planner.simulate import Simulation

SOLVER_NAME = "GLOP and HiGHS (OR-Tools MathOpt)"
LEAN_GAP = 1e-4
ROUNDING = 1e-9  # share of a bound given away for the solver's rounding


def _quiet(_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class MipAnswer:
    """What the solver said. Times of day are for people only; nothing is decided by them."""

    decisions: Decisions | None  # None: none found; see proven_infeasible
    simulation: Simulation | None  # of the decisions
    lower_bound_ns: int  # proven for every plan of the problem; 0 if infeasible
    proven_infeasible: bool
    stage: str  # of the search in which the plan was found
    variables: int
    constraints: int
    build_s: float
    solve_s: float


@dataclass(frozen=True, kw_only=True)
class Leanest:
    """The plan of the smallest peak that was found, and what no plan can go below."""

    decisions: Decisions
    simulation: Simulation
    lower_bound_bytes: int


def _over_memory(problem: PlanningProblem) -> Callable[[Simulation], int]:
    return lambda simulation: max(simulation.peak_bytes - problem.memory_limit_bytes, 0)


def _over_host(problem: PlanningProblem) -> Callable[[Simulation], int]:
    return lambda simulation: max(simulation.host_bytes - problem.host_limit_bytes, 0)


def solve_mip(
    problem: PlanningProblem, *, gap: float, beat_ns: int | None = None, progress: Callable[[str], None] = _quiet
) -> MipAnswer:
    """The fastest plan in the budgets, to a relative gap.

    The gap is aimed at: on large models the search ends before it is reached if every stage is done. The bound says how
    far it got.

    Args:
        problem: the tables.
        gap: stop when the plan is proven within this share of the optimum,
        beat_ns: and not slower than this (the step of a plan that is known already).
        progress: told what is being done.

    Raises:
        UsageError: the pins leave no plan at all.
        PartitionerError: the linear solver failed.
    """
    began = time.perf_counter()
    model = build(problem)
    built = time.perf_counter()
    goal = Goal(
        value=lambda simulation: simulation.step_ns * MS,
        memory_over_bytes=_over_memory(problem),
        host_over_bytes=_over_host(problem),
        beat=math.inf if beat_ns is None else beat_ns * MS,
    )
    search = Search(model, goal, gap=gap, progress=progress)
    search.run()
    bound = 0.0 if search.infeasible else search.lower / MS * (1 - ROUNDING)
    if search.simulation is not None:
        bound = min(bound, search.simulation.step_ns)
    return MipAnswer(
        decisions=search.best,
        simulation=search.simulation,
        lower_bound_ns=max(0, int(bound)),
        proven_infeasible=search.infeasible,
        stage=search.stage,
        variables=model.rows.num_variables,
        constraints=model.rows.num_constraints,
        build_s=built - began,
        solve_s=time.perf_counter() - built,
    )


def _minimize_peak(model: Model) -> None:
    """Make the memory limit a variable, and that variable the objective (in shares ``1 / LIMIT`` of the old limit)."""
    excess = model.rows.continuous("excess", lower=-LIMIT)
    for row in model.memory_budget:
        row.set_coefficient(excess, -1.0)
    model.rows.minimize(Expr(LIMIT).add(excess))


def find_leanest(problem: PlanningProblem, *, progress: Callable[[str], None] = _quiet) -> Leanest:
    """The plan with the smallest peak in the host budget, whatever it takes.

    Raises:
        UsageError: the pins leave no plan at all.
        PartitionerError: the solver failed.
    """
    model = build(problem)
    _minimize_peak(model)
    share = LIMIT / problem.memory_limit_bytes
    goal = Goal(
        value=lambda simulation: simulation.peak_bytes * share,
        memory_over_bytes=lambda _: 0,
        host_over_bytes=_over_host(problem),
    )
    search = Search(model, goal, gap=LEAN_GAP, progress=progress)
    search.run()
    if search.best is None or search.simulation is None:
        raise PartitionerError(
            "the solver found no plan at all, however much memory it takes",
            hint="this should not happen; keep the model and the flags for a report",
        )
    bound = search.lower / share * (1 - ROUNDING)
    return Leanest(
        decisions=search.best,
        simulation=search.simulation,
        lower_bound_bytes=max(0, min(int(bound), search.simulation.peak_bytes)),
    )
