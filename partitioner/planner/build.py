"""The whole ILP of a planning problem: every family of rows, and the step time as its objective."""

from __future__ import annotations

from partitioner.planner.model import Model, add_boundaries, add_choices, add_prefetch
from partitioner.planner.model_memory import memory_rows
from partitioner.planner.model_time import time_rows
from partitioner.planner.problem import PlanningProblem
from partitioner.planner.rows import Rows


def build(problem: PlanningProblem) -> Model:
    """All variables and rows of ``problem``; the objective (in ms) is set."""
    model = Model(problem=problem, rows=Rows("gather plan"))
    add_choices(model)
    add_boundaries(model)
    add_prefetch(model, model.forward, forward=True)
    add_prefetch(model, model.backward, forward=False)
    objective = time_rows(model)
    memory_rows(model)
    model.rows.minimize(objective)
    return model
