"""Search for a good plan under a proven bound.

A relaxation of the ILP gives the bound. It is tight (all but the units near the memory peak and the ends of the step cost
the same), while branch and bound finds plans slowly, because equal blocks make equal trees. So plans come from the ILP
*restricted* to few units: first to one tiling, where only modes, prefetching, offload and recomputation are open and the
solver takes parts of a second; then to the best tiling with the units of some windows set free again. What the plan is
worth is what the simulator says of it. If bound and plan are then still further apart than asked for, and few enough
choices are left after reduced-cost fixing, branch and bound closes the gap.

Every limit counts nodes or rounds, never seconds, so that equal problems give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from partitioner.errors import PartitionerError
from partitioner.planner.check import check
from partitioner.planner.model import Model
from partitioner.planner.model_memory import LIMIT
from partitioner.planner.pins import usable_candidates
from partitioner.planner.problem import Decisions
from partitioner.planner.quiet import quiet_stdout
from partitioner.planner.reading import fixing, read_decisions
from partitioner.planner.rows import Variable
from partitioner.planner.simulate import Simulation
from partitioner.planner.tilings import Tiling, starting_tilings

LP_SOLVER, MIP_SOLVER = mathopt.SolverType.GLOP, mathopt.SolverType.HIGHS
SEED = 7
RESTRICTED_NODES = 50
FULL_NODES = 2_000
FULL_BINARIES = 400  # branch and bound over all units only if at most this many choices are left
SHORTEN = 4  # sub-problems are solved to this fraction of the gap
ROUNDING_RETRIES = 4  # how often the budgets are lowered when the solver's rounding let a plan run over by some bytes
END_UNITS = 2  # how many units at either end are set free first
FREED_UNITS = 4  # length of a neighbourhood inside
MAX_NEIGHBOURHOODS = 6
FRUITLESS = 2  # neighbourhoods in a row without a better plan after which the search for cuts ends


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is minimised, as the simulator sees it. Values are in the objective's units."""

    value: Callable[[Simulation], float]
    memory_over_bytes: Callable[[Simulation], int]  # over the GPU budget; 0 if that is no constraint
    host_over_bytes: Callable[[Simulation], int]
    beat: float = math.inf  # a plan worse than this is not good enough, however small the gap


@dataclass(frozen=True)
class _Relaxed:
    """A solved relaxation."""

    value: float
    values: dict[Variable, float]
    reduced_costs: dict[Variable, float]


class Search:
    """One search. Read ``best``, ``simulation``, ``lower``, ``infeasible`` and ``stage`` after ``run``."""

    def __init__(self, model: Model, goal: Goal, *, gap: float, progress: Callable[[str], None]) -> None:
        self.model, self.goal, self.gap, self.progress = model, goal, gap, progress
        self.problem = model.problem
        self.usable = usable_candidates(model.problem)
        self.best: Decisions | None = None
        self.simulation: Simulation | None = None
        self.upper = math.inf
        self.lower = 0.0
        self.infeasible = False  # proven
        self.stage = "relaxation"  # in which the plan was found

    def run(self) -> None:
        """Search until the gap is closed or every stage is done."""
        self.progress("solving the relaxation")
        relaxed = self._relax()
        if relaxed is None:
            self.infeasible = True
            return
        self.lower = relaxed.value
        for stage in (self._tilings, self._neighbourhoods, self._full):
            if self.closed:
                return
            stage(relaxed)

    @property
    def closed(self) -> bool:
        """Whether there is a plan, good enough and proven to be within the gap."""
        if self.best is None:
            return False
        return self.upper <= self.goal.beat and self.upper - self.lower <= self.gap * self.upper

    def _relax(self) -> _Relaxed | None:
        binaries = self.model.binaries()
        for variable in binaries:
            variable.integer = False
        parameters = mathopt.SolveParameters(lp_algorithm=mathopt.LPAlgorithm.PRIMAL_SIMPLEX, random_seed=SEED)
        result = mathopt.solve(self.model.rows.model, LP_SOLVER, params=parameters)
        for variable in binaries:
            variable.integer = True
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return None
        if reason is not mathopt.TerminationReason.OPTIMAL:
            raise PartitionerError(
                f"the linear solver stopped without an answer: {result.termination.detail or reason.name}",
                hint="a slightly different --memory changes the numbers it works on",
            )
        bounds = result.termination.objective_bounds
        return _Relaxed(
            value=min(bounds.dual_bound, bounds.primal_bound),
            values=result.variable_values(),
            reduced_costs=result.reduced_costs(),
        )

    def _open(self, candidates: set[int]) -> None:
        """Let only these chain candidates be chosen."""
        for i, _ in self.model.chain():
            for variable in self.model.modes(i):
                variable.upper_bound = float(i in candidates)

    def _lower_budgets(self, memory_bytes: int, host_bytes: int) -> None:
        """Take bytes from the budgets (negative: give them back)."""
        for row in self.model.memory_budget if memory_bytes else ():
            row.upper_bound -= memory_bytes * LIMIT / self.problem.memory_limit_bytes
        for row in self.model.host_budget if host_bytes else ():
            row.upper_bound -= host_bytes / self.problem.host_limit_bytes

    def _accept(self, stage: str, decisions: Decisions) -> tuple[int, int]:
        """Keep a plan if it is in the budgets and the best so far; return the bytes by which it is over them."""
        simulation = check(self.problem, decisions)
        over = self.goal.memory_over_bytes(simulation), self.goal.host_over_bytes(simulation)
        value = self.goal.value(simulation)
        if over == (0, 0) and value < self.upper:
            self.best, self.simulation, self.upper, self.stage = decisions, simulation, value, stage
            self.progress(f"{stage}: {value:.3f}, bound {self.lower:.3f}")
        return over

    def _solve(self, stage: str, *, gap: float, nodes: int, hint: bool = False) -> mathopt.SolveResult:
        """Solve the MIP as it stands and look at its plan.

        A plan that the solver's rounding let run over a budget by some bytes is sought again with that much less.
        Returns the first result: it is the one that belongs to the true budgets.
        """
        parameters = mathopt.SolveParameters(relative_gap_tolerance=gap, node_limit=nodes, random_seed=SEED)
        if self.gap:
            target = min(self.lower / (1 - self.gap / 2), self.goal.beat)
            parameters.highs.double_options["objective_target"] = target
        hints = []
        if hint and self.best is not None:
            hints.append(mathopt.SolutionHint(variable_values=fixing(self.model, self.best)))
        first = None
        taken = (0, 0)
        for _ in range(ROUNDING_RETRIES):
            with quiet_stdout():
                result = mathopt.solve(
                    self.model.rows.model,
                    MIP_SOLVER,
                    params=parameters,
                    model_params=mathopt.ModelSolveParameters(solution_hints=hints),
                )
            first = first or result
            if not result.has_primal_feasible_solution():
                break
            over = self._accept(stage, read_decisions(self.model, result.variable_values()))
            if over == (0, 0):
                break
            self._lower_budgets(2 * over[0], 2 * over[1])
            taken = taken[0] + 2 * over[0], taken[1] + 2 * over[1]
        self._lower_budgets(-taken[0], -taken[1])
        assert first is not None
        return first

    def _restricted(self, stage: str, candidates: set[int]) -> None:
        self._open(candidates)
        self._solve(stage, gap=self.gap / SHORTEN, nodes=RESTRICTED_NODES)
        self._open(set(self.usable))

    def _tilings(self, relaxed: _Relaxed) -> None:
        def share(index: int) -> float:
            return sum(relaxed.values[v] for v in self.model.modes(index))

        tilings = starting_tilings(self.problem, self.usable, share)
        self.progress(f"trying {len(tilings)} ways to cut the model into units")
        for tiling in tilings:
            self._restricted("tilings", set(tiling))
            if self.closed:
                return

    def _best_tiling(self) -> Tiling:
        assert self.best is not None
        candidates = self.problem.candidates
        return tuple(c.candidate for c in self.best.units if not candidates[c.candidate].pinned)

    def _neighbourhoods(self, relaxed: _Relaxed) -> None:
        """Set the units of some windows free: at the ends, where gathers and reductions are exposed, then all along."""
        if self.best is None:
            return
        self.progress("improving the cuts")
        fruitless = 0
        for parts in _neighbourhoods(len(self._best_tiling())):
            tiling = self._best_tiling()
            free = set(tiling)
            for first, last in parts:
                ends = tiling[min(first, len(tiling) - 1)], tiling[min(last, len(tiling) - 1)]
                low, high = self.problem.candidates[ends[0]].first, self.problem.candidates[ends[1]].last
                free |= {i for i in self.usable if self._inside(i, low, high)}
            if len(free) == len(tiling):
                continue
            before = self.upper
            self._restricted("neighbourhoods", free)
            fruitless = 0 if self.upper < before else fruitless + 1
            if self.closed or fruitless == FRUITLESS:
                return

    def _inside(self, index: int, low: int, high: int) -> bool:
        unit = self.problem.candidates[index]
        return not unit.pinned and low <= unit.first and unit.last <= high

    def _full(self, relaxed: _Relaxed) -> None:
        """Branch and bound over all units, if few choices are open once those are fixed whose reduced cost says that
        deciding otherwise cannot beat the plan in hand."""
        fixed = {
            v: float(relaxed.values[v] > 0.5)
            for v in self.model.binaries()
            if abs(relaxed.reduced_costs[v]) > self.upper - self.lower + 1e-6 * abs(self.upper)
        }
        if len(self.model.binaries()) - len(fixed) > FULL_BINARIES:
            return
        self.progress("branch and bound over all units")
        saved = {v: (v.lower_bound, v.upper_bound) for v in fixed}
        for variable, value in fixed.items():
            variable.lower_bound = variable.upper_bound = value
        result = self._solve("branch and bound", gap=self.gap, nodes=FULL_NODES, hint=True)
        for variable, (low, high) in saved.items():
            variable.lower_bound, variable.upper_bound = low, high
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            if self.best is None:
                self.infeasible = True
            self.lower = max(self.lower, self.upper)  # nothing but the plan in hand is left
            return
        self.lower = max(self.lower, min(result.termination.objective_bounds.dual_bound, self.upper))


def _neighbourhoods(num_units: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ranges of units (first, last) to set free together, one tuple after the other."""
    yield (0, END_UNITS - 1), (max(num_units - END_UNITS, 0), num_units - 1)
    starts = range(0, max(num_units - FREED_UNITS, 0) + 1, FREED_UNITS // 2)
    step = max(1, math.ceil(len(starts) / MAX_NEIGHBOURHOODS))
    for start in starts[::step]:
        yield ((start, start + FREED_UNITS - 1),)
