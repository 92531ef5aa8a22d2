"""Decide: the usual plans, the ILP started from the best of them, and the better of the two shipped with its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from partitioner.planner.baselines.wrapping import Baseline
from partitioner.planner.check import check, fits
from partitioner.planner.problem import Decisions, PlanningProblem
from partitioner.planner.simulate import Simulation
from partitioner.planner.solve import MipAnswer, solve_leanest, solve_mip

RETRIES = 4  # how often the limit is lowered when rounding in the solver let a plan run over by a few bytes


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A baseline, simulated."""

    baseline: Baseline
    simulation: Simulation
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The shipped plan and its proof."""

    answer: str  # "mip" or a baseline's name
    problem: PlanningProblem
    decisions: Decisions
    simulation: Simulation
    lower_bound_ns: int
    gap: float
    mip: MipAnswer
    compared: tuple[Compared, ...]


@dataclass(frozen=True, kw_only=True)
class NothingFits:
    """Proven: no plan over these candidates keeps the budgets."""

    mip: MipAnswer
    compared: tuple[Compared, ...]
    leanest: Decisions  # the plan with the smallest peak
    simulation: Simulation


def compare(baselines: Sequence[Baseline]) -> tuple[Compared, ...]:
    """Check and simulate every baseline."""
    rows = []
    for baseline in baselines:
        simulation = check(baseline.problem, baseline.decisions)
        rows.append(Compared(baseline=baseline, simulation=simulation, fits=fits(baseline.problem, simulation)))
    return tuple(rows)


def _solve_within(problem: PlanningProblem, gap: float) -> tuple[MipAnswer, Simulation | None]:
    """Solve; if the answer is over the limit by the solver's rounding, solve again with the limit that much lower.

    The bound is always that of the true limit.
    """
    answer = solve_mip(problem, gap=gap)
    bound = answer.lower_bound_ns
    limit = problem
    for _ in range(RETRIES):
        if answer.decisions is None:
            return answer, None
        simulation = check(problem, answer.decisions)
        if fits(problem, simulation):
            return replace(answer, lower_bound_ns=bound), simulation
        over = max(simulation.peak_bytes - problem.memory_limit_bytes, 0)
        host = max(simulation.host_bytes - problem.host_limit_bytes, 0)
        limit = replace(
            limit,
            memory_limit_bytes=limit.memory_limit_bytes - 2 * over,
            host_limit_bytes=limit.host_limit_bytes - 2 * host,
        )
        answer = solve_mip(limit, gap=gap)
    raise RuntimeError("the solver's answers stay over the memory limit")


def decide(
    problem: PlanningProblem, baselines: Sequence[Baseline], *, gap: float, progress: Callable[[str], None]
) -> Decision | NothingFits:
    """The best plan known and how good it provably is.

    The bound is the ILP's own bound over all plans of its candidates, or a better baseline's exact time: no plan of either
    kind is faster.

    Args:
        problem: tables with every candidate.
        baselines: plans to beat; they may use units that are no candidates here.
        gap: relative gap at which the solver may stop.
        progress: told what is being done.
    """
    compared = compare(baselines)
    progress("solving the ILP")
    mip, simulation = _solve_within(problem, gap)
    fitting = [row for row in compared if row.fits and not problem.pins]
    best = min(fitting, key=lambda row: row.simulation.step_ns, default=None)
    if mip.decisions is None or simulation is None:
        if best is None:
            lean, peak = leanest(problem)
            return NothingFits(mip=mip, compared=compared, leanest=lean, simulation=peak)
        bound = best.simulation.step_ns
    else:
        bound = mip.lower_bound_ns
    if simulation is None or (best is not None and best.simulation.step_ns < simulation.step_ns):
        assert best is not None
        chosen, name, tables = best.baseline.decisions, best.baseline.name, best.baseline.problem
        shipped = best.simulation
    else:
        assert mip.decisions is not None
        chosen, name, tables, shipped = mip.decisions, "mip", problem, simulation
    bound = min([bound, *(row.simulation.step_ns for row in fitting)])
    return Decision(
        answer=name,
        problem=tables,
        decisions=chosen,
        simulation=shipped,
        lower_bound_ns=bound,
        gap=(shipped.step_ns - bound) / shipped.step_ns if shipped.step_ns else 0.0,
        mip=mip,
        compared=compared,
    )


def leanest(problem: PlanningProblem) -> tuple[Decisions, Simulation]:
    """The plan with the smallest peak, for the certificate of infeasibility: the same rows, the limit as the objective."""
    decisions = solve_leanest(problem)
    return decisions, check(problem, decisions)
