"""Decide: the usual plans, the ILP that has to beat the best of them, and the plan that is shipped with its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from partitioner.errors import PartitionerError
from partitioner.planner.baselines.wrapping import Baseline
from partitioner.planner.check import check, fits
from partitioner.planner.problem import Decisions, PlanningProblem
from partitioner.planner.regular import best_regular
from partitioner.planner.simulate import Simulation
from partitioner.planner.solve import Leanest, MipAnswer, find_leanest, solve_mip

READABLE = 0.002
"""Share of the step that a plan may lose when it treats equal blocks equally: no cost model here tells the two apart, and a
person can read it."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A baseline, simulated."""

    baseline: Baseline
    simulation: Simulation
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The shipped plan and its proof."""

    answer: str  # "mip", "regular" or a baseline's name
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
    leanest: Decisions  # the plan with the smallest peak, in the host budget
    simulation: Simulation
    lower_bound_bytes: int  # no plan peaks lower


def compare(baselines: Sequence[Baseline]) -> tuple[Compared, ...]:
    """Check and simulate every baseline."""
    rows = []
    for baseline in baselines:
        simulation = check(baseline.problem, baseline.decisions)
        rows.append(Compared(baseline=baseline, simulation=simulation, fits=fits(baseline.problem, simulation)))
    return tuple(rows)


def _fastest(rows: Sequence[Compared]) -> Compared | None:
    return min(rows, key=lambda row: row.simulation.step_ns, default=None)


def _lean_answer(problem: PlanningProblem, mip: MipAnswer, progress: Callable[[str], None]) -> MipAnswer | Leanest:
    """When the search for speed ended without a plan: the leanest plan as the answer if it fits, else as a certificate.

    Raises:
        PartitionerError: neither a plan nor a proof that there is none.
    """
    progress("nothing fits so far: looking for the leanest plan")
    lean = find_leanest(problem, progress=progress)
    if fits(problem, lean.simulation):
        bound = min(mip.lower_bound_ns, lean.simulation.step_ns)
        return replace(mip, decisions=lean.decisions, simulation=lean.simulation, stage="leanest", lower_bound_ns=bound)
    if not mip.proven_infeasible and lean.lower_bound_bytes <= problem.memory_limit_bytes:
        raise PartitionerError(
            f"no plan for {problem.memory_limit_bytes} bytes per GPU was found, nor a proof that there is none: the "
            f"smallest peak lies between {lean.lower_bound_bytes} and {lean.simulation.peak_bytes} bytes",
            hint=f"a budget of {lean.simulation.peak_bytes} bytes has a plan",
        )
    return lean


@dataclass(frozen=True, kw_only=True)
class _Shipped:
    answer: str
    problem: PlanningProblem
    decisions: Decisions
    simulation: Simulation


def _shipped(problem: PlanningProblem, mip: MipAnswer, best: Compared | None, gap: float) -> _Shipped:
    """The faster of the solver's plan and the best baseline, or a regular plan that takes the same time within READABLE.

    The regular plan must be no slower than the baseline and proven as near to the optimum as was asked for.
    """
    beat_ns = best.simulation.step_ns if best is not None else None
    if mip.decisions is not None and mip.simulation is not None:
        slowest = mip.simulation.step_ns * (1 + READABLE)
        allowed = min(slowest, max(mip.simulation.step_ns, mip.lower_bound_ns / (1 - gap)), beat_ns or slowest)
        regular = best_regular(problem, allowed_ns=allowed)
        if regular is not None:
            simulation = check(problem, regular.decisions)
            return _Shipped(answer="regular", problem=problem, decisions=regular.decisions, simulation=simulation)
        if beat_ns is None or mip.simulation.step_ns <= beat_ns:
            return _Shipped(answer="mip", problem=problem, decisions=mip.decisions, simulation=mip.simulation)
    assert best is not None
    row = best.baseline
    return _Shipped(answer=row.name, problem=row.problem, decisions=row.decisions, simulation=best.simulation)


def decide(
    problem: PlanningProblem, baselines: Sequence[Baseline], *, gap: float, progress: Callable[[str], None]
) -> Decision | NothingFits:
    """The best plan known and how good it provably is.

    The bound is the ILP's own bound over all plans of its candidates, or a better baseline's exact time: no plan of either
    kind is faster.

    Args:
        problem: tables with every candidate.
        baselines: plans to beat; they may use units that are no candidates here. With pins they are only compared.
        gap: relative gap at which the solver may stop.
        progress: told what is being done.

    Raises:
        UsageError: the pins leave no plan at all.
        PartitionerError: the solver failed, or the budget is so near the smallest peak that it is undecided.
    """
    compared = compare(baselines)
    fitting = [row for row in compared if row.fits and not problem.pins]
    best = _fastest(fitting)
    beat_ns = best.simulation.step_ns if best is not None else None
    mip = solve_mip(problem, gap=gap, beat_ns=beat_ns, progress=progress)
    if mip.decisions is None and best is None:
        lean = _lean_answer(problem, mip, progress)
        if isinstance(lean, Leanest):
            return NothingFits(
                mip=mip,
                compared=compared,
                leanest=lean.decisions,
                simulation=lean.simulation,
                lower_bound_bytes=lean.lower_bound_bytes,
            )
        mip = lean
    shipped = _shipped(problem, mip, best, gap)
    bounds = [shipped.simulation.step_ns, *(row.simulation.step_ns for row in fitting)]
    if not mip.proven_infeasible:
        bounds.append(mip.lower_bound_ns)
    bound = min(bounds)
    return Decision(
        answer=shipped.answer,
        problem=shipped.problem,
        decisions=shipped.decisions,
        simulation=shipped.simulation,
        lower_bound_ns=bound,
        gap=(shipped.simulation.step_ns - bound) / shipped.simulation.step_ns if shipped.simulation.step_ns else 0.0,
        mip=mip,
        compared=compared,
    )
