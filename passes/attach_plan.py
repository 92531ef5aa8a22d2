"""Write a plan's decisions onto the graph: which unit an operator belongs to, and what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partitioner.errors import PassError
from partitioner.pass_manager import Pass
from partitioner.plan import Plan
from partitioner.program import Program
from passes.module_runs import ROOT, find_runs

UNIT = "unit"
"""``node.meta`` key: name of the unit whose forward runs the operator."""
RECOMPUTE = "recompute"
"""``node.meta`` key: module whose forward runs again in the backward, this operator with it."""


@dataclass(frozen=True, kw_only=True)
class AttachPlan(Pass):
    """Tag every operator; later passes act on tags and on the plan, and decide nothing.

    1. An operator belongs to the unit of the deepest module around it that a unit names; the root's unit takes the rest.
    2. An operator inside a module that the plan recomputes carries that module's name.
    """

    name: ClassVar[str] = "attach-plan"
    plan: Plan

    def requires(self, program: Program) -> None:
        named = {p.name for p in program.parameters}
        planned = [p for unit in self.plan.units for p in unit.parameters]
        if unknown := [p for p in planned if p not in named]:
            raise PassError(
                f"the plan gathers {unknown[0]!r}, which this model does not have",
                hint="a plan belongs to the model it was made for; plan again",
            )
        if missing := sorted(named.difference(planned)):
            raise PassError(f"no unit of the plan gathers {missing[0]!r}", hint="plan again for this model")

    def run(self, program: Program) -> bool:
        unit_of = {module: unit.name for unit in self.plan.units for module in unit.modules}
        again = {a.module for a in self.plan.activations if a.policy == "recompute"}
        runs = find_runs(program)
        changed = False
        for node, stack in zip(runs.nodes, runs.stacks, strict=True):
            around = [*reversed([m for m in stack if m != ROOT]), ROOT]
            tags = {
                UNIT: next((unit_of[m] for m in around if m in unit_of), ""),
                RECOMPUTE: next((m for m in around if m in again), ""),
            }
            for key, value in tags.items():
                if node.meta.get(key, "") != value:
                    node.meta[key] = value
                    changed = True
        return changed
