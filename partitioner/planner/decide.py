"""Decide: the usual plans, the ILP started from the best of them, and the better of the two shipped with its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from partitioner.errors import PartitionerError
from partitioner.planner.baselines.wrapping import Baseline
from partitioner.planner.check import check, fits
from partitioner.planner.problem import Decisions, PlanningProblem
from partitioner.planner.simulate import Simulation
from partitioner.planner.solve import Leanest, MipAnswer, find_leanest, solve_mip


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
    if best is not None and (mip.simulation is None or best.simulation.step_ns < mip.simulation.step_ns):
        chosen, name, tables, shipped = (
            best.baseline.decisions,
            best.baseline.name,
            best.baseline.problem,
            best.simulation,
        )
    else:
        assert mip.decisions is not None
        assert mip.simulation is not None
        chosen, name, tables, shipped = mip.decisions, "mip", problem, mip.simulation
    bounds = [row.simulation.step_ns for row in fitting]
    if not mip.proven_infeasible:
        bounds.append(mip.lower_bound_ns)
    bound = min(bounds)
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
    """The plan with the smallest peak in the host budget, and its simulation."""
    lean = find_leanest(problem)
    return lean.decisions, lean.simulation
