"""The ILP against the simulator, and against every plan of tiny problems."""

from __future__ import annotations

import random

import pytest
from instances import brute_force, random_problem, sample
from ortools.math_opt.python import mathopt

from partitioner.planner.build import build
from partitioner.planner.check import check, fits
from partitioner.planner.model import MS
from partitioner.planner.problem import Decisions, PlanningProblem
from partitioner.planner.reading import fixing
from partitioner.planner.search import MIP_SOLVER
from partitioner.planner.simulate import simulate
from partitioner.planner.solve import solve_mip


def mip_value_of(problem: PlanningProblem, decisions: Decisions) -> float | None:
    """What the MIP says a fixed plan takes, in ns; None if it says the plan does not fit."""
    model = build(problem)
    for variable, value in fixing(model, decisions).items():
        variable.lower_bound = variable.upper_bound = value
    result = mathopt.solve(model.rows.model, MIP_SOLVER)
    return result.objective_value() / MS if result.has_primal_feasible_solution() else None


@pytest.mark.parametrize("seed", range(40))
def test_mip_of_a_fixed_plan_is_its_simulation(seed: int) -> None:
    """Time equal, and the memory rows say "fits" exactly when the simulated curve does."""
    problem = random_problem(seed, windows=5)
    rng = random.Random(seed)
    for decisions in sample(problem, rng, 3):
        simulation = simulate(problem, decisions)
        value = mip_value_of(problem, decisions)
        if fits(problem, simulation):
            assert value == pytest.approx(simulation.step_ns, abs=10)
        else:
            assert value is None


@pytest.mark.parametrize("seed", range(60))
def test_mip_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed, windows=3)
    best = brute_force(problem)
    answer = solve_mip(problem, gap=0.0)
    if best is None:
        assert answer.proven_infeasible
        return
    assert answer.decisions is not None
    simulation = check(problem, answer.decisions)
    assert fits(problem, simulation)
    assert simulation.step_ns == pytest.approx(best, abs=10)
    assert answer.lower_bound_ns <= best
