"""Put each unit's all-gather at its gather point, and let the unit's operators read the whole parameters."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from partitioner.errors import PassError
from partitioner.pass_manager import Pass
from partitioner.plan import Plan, PlanUnit
from partitioner.program import Program, node_info
from passes.attach_plan import UNIT
from passes.markers import is_marker, unshard
from passes.module_runs import operators


def unit_runs(program: Program, unit: PlanUnit) -> list[list[fx.Node]]:
    """The operators of each stretch in which the unit is whole.

    One stretch for a unit of several modules, the root, or a unit that is kept after its forward; one for every call of
    a module that is called again.
    """
    parameters = set(unit.parameters)
    mine = [
        n
        for n in operators(program)
        if not is_marker(n) and (n.meta.get(UNIT) == unit.name or parameters.intersection(node_info(n).reads))
    ]
    if len(unit.modules) > 1 or unit.modules == ("",) or not unit.reshard_after_forward:
        return [mine] if mine else []
    runs: dict[int, list[fx.Node]] = {}
    for node in mine:
        call = next((c for name, c in node.meta.get("module_stack", ()) if name == unit.modules[0]), 0)
        runs.setdefault(call, []).append(node)
    return list(runs.values())


def _gather_points(program: Program, plan: Plan) -> dict[str, fx.Node]:
    """The operator before which each unit's first gather is issued.

    Distance 1 is the unit's own first operator: the runtime overlaps that gather by itself. Distance d is the first
    operator of the unit d places earlier.
    """
    position = {node: i for i, node in enumerate(operators(program))}
    starts = {u.name: runs[0][0] for u in plan.units if (runs := unit_runs(program, u)) and u.parameters}
    chain = sorted(
        (u for u in plan.units if u.name in starts and u.modules != ("",)), key=lambda u: position[starts[u.name]]
    )
    points = dict(starts)
    for k, unit in enumerate(chain):
        if unit.prefetch_forward > 1:
            points[unit.name] = starts[chain[max(k - unit.prefetch_forward, 0)].name]
    return points


@dataclass(frozen=True, kw_only=True)
class InsertUnshard(Pass):
    """For every sharded unit with parameters:

    1. ``unshard(shards..., unit=NAME)`` stands before the operator where the plan issues the gather, and again before
       each later call of a unit that is resharded between calls;
    2. the unit's operators read its results instead of the shards.

    Replicated units are left alone.
    """

    name: ClassVar[str] = "insert-unshard"
    plan: Plan

    def requires(self, program: Program) -> None:
        nodes = operators(program)
        if nodes and not any(UNIT in n.meta for n in nodes):
            raise PassError("no operator carries a unit", hint="run attach-plan first")

    def run(self, program: Program) -> bool:
        graph = program.graph.graph
        done = {str(n.kwargs["unit"]) for n in graph.nodes if n.target is unshard}
        shards = {str(n.target): n for n in graph.nodes if n.op == "get_attr"}
        points = _gather_points(program, self.plan)
        changed = False
        for unit in self.plan.units:
            names = [p for p in unit.parameters if p in shards]
            if unit.placement != "shard" or not names or unit.name in done or unit.name not in points:
                continue
            for i, run in enumerate(unit_runs(program, unit)):
                self._gather(program, unit, [shards[p] for p in names], points[unit.name] if i == 0 else run[0], run)
            changed = True
        return changed

    def _gather(
        self, program: Program, unit: PlanUnit, shards: list[fx.Node], point: fx.Node, readers: list[fx.Node]
    ) -> None:
        graph = program.graph.graph
        stack = {"module_stack": (("", 0),), UNIT: unit.name}
        with graph.inserting_before(point):
            gathered = graph.call_function(unshard, tuple(shards), {"unit": unit.name})
            gathered.meta.update(stack, val=tuple(s.meta["val"] for s in shards))
            for i, shard in enumerate(shards):
                whole = graph.call_function(operator.getitem, (gathered, i))
                whole.meta.update(stack, val=shard.meta["val"])
                for reader in readers:
                    reader.replace_input_with(shard, whole)
