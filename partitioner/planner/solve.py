"""Run OR-Tools on the ILP and read the plan back.

Limits are deterministic (gap and nodes, never the clock), one seed, so that equal problems give equal plans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ortools.math_opt.python import mathopt

from partitioner.planner.chosen import split_choices
from partitioner.planner.model import MS, Model, build
from partitioner.planner.problem import Decisions, Mode, PlanningProblem, UnitChoice
from partitioner.planner.rows import Expr, Variable

SOLVER = mathopt.SolverType.HIGHS
SOLVER_NAME = "HiGHS (OR-Tools MathOpt)"
NODE_LIMIT = 2_000
SEED = 7


@dataclass(frozen=True, kw_only=True)
class MipAnswer:
    """What the solver said. Times of day are for people only; nothing is decided by them."""

    decisions: Decisions | None  # None: infeasible
    lower_bound_ns: int  # proven for every plan of the problem; 0 if infeasible
    proven_infeasible: bool
    variables: int
    constraints: int
    build_s: float
    solve_s: float


def _is_one(values: dict[Variable, float], variable: Variable | None) -> bool:
    return variable is not None and values[variable] > 0.5


def read_decisions(model: Model, values: dict[Variable, float]) -> Decisions:
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
    return Decisions(units=tuple(units), recompute=recompute)


def fixing(model: Model, decisions: Decisions) -> dict[Variable, float]:
    """Values of the binaries that spell a plan: a warm start, or (in tests) a fixed plan."""
    binaries = [
        *model.mode.values(), *model.forward.switch.values(), *model.backward.switch.values(),
        *model.offload.values(), *model.recompute.values(),
    ]  # fmt: skip
    values = dict.fromkeys(binaries, 0.0)
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


def solve_mip(problem: PlanningProblem, *, gap: float, hint: Decisions | None = None) -> MipAnswer:
    """Solve to a relative gap.

    Args:
        problem: the tables.
        gap: stop when the incumbent is proven within this share of the optimum.
        hint: a legal plan to start from.

    Raises:
        RuntimeError: the solver ended in a state that is neither an answer nor a proof of infeasibility.
    """
    began = time.perf_counter()
    model = build(problem)
    built = time.perf_counter()
    parameters = mathopt.SolveParameters(relative_gap_tolerance=gap, node_limit=NODE_LIMIT, random_seed=SEED)
    hints = [mathopt.SolutionHint(variable_values=fixing(model, hint))] if hint is not None else []
    result = mathopt.solve(
        model.rows.model, SOLVER, params=parameters, model_params=mathopt.ModelSolveParameters(solution_hints=hints)
    )
    solved = time.perf_counter()
    reason = result.termination.reason
    infeasible = reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED)
    if not infeasible and not result.has_primal_feasible_solution():
        raise RuntimeError(f"solver stopped without an answer: {result.termination}")
    decisions = None if infeasible else tidy(problem, read_decisions(model, result.variable_values()))
    bound = 0.0 if infeasible else result.termination.objective_bounds.dual_bound
    return MipAnswer(
        decisions=decisions,
        lower_bound_ns=max(0, int(bound / MS * (1 - 1e-9))),
        proven_infeasible=infeasible,
        variables=model.rows.num_variables,
        constraints=model.rows.num_constraints,
        build_s=built - began,
        solve_s=solved - built,
    )


def solve_leanest(problem: PlanningProblem) -> Decisions:
    """The plan with the smallest peak, whatever it takes: the limit becomes a variable and the objective.

    Raises:
        RuntimeError: the solver found no plan at all, which pins alone can cause.
    """
    model = build(problem)
    excess = model.rows.continuous("excess")
    for row in model.rows.model.linear_constraints():
        if row.name.startswith("memory["):
            row.set_coefficient(excess, -1.0)
    model.rows.minimize(Expr().add(excess))
    parameters = mathopt.SolveParameters(relative_gap_tolerance=1e-6, node_limit=NODE_LIMIT, random_seed=SEED)
    result = mathopt.solve(model.rows.model, SOLVER, params=parameters)
    if not result.has_primal_feasible_solution():
        raise RuntimeError(f"no plan at all: {result.termination}")
    return tidy(problem, read_decisions(model, result.variable_values()))
