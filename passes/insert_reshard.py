"""Free a unit's whole parameters after the last operator that reads them in the forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from partitioner.errors import PassError
from partitioner.pass_manager import Pass
from partitioner.plan import Plan
from partitioner.program import Program
from passes.attach_plan import UNIT
from passes.insert_unshard import unit_runs
from passes.markers import reshard, unshard


@dataclass(frozen=True, kw_only=True)
class InsertReshard(Pass):
    """After the last operator of each stretch of a unit with ``reshard_after_forward``, put ``reshard``.

    A unit that is kept has none: its whole parameters live until its backward is over.
    """

    name: ClassVar[str] = "insert-reshard"
    plan: Plan

    def requires(self, program: Program) -> None:
        gathers = any(u.placement == "shard" and u.parameters for u in self.plan.units)
        if gathers and not any(n.target is unshard for n in program.graph.graph.nodes):
            raise PassError("nothing is gathered", hint="run insert-unshard first")

    def run(self, program: Program) -> bool:
        graph = program.graph.graph
        gathers: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.target is unshard:
                gathers.setdefault(str(node.kwargs["unit"]), []).append(node)
        changed = False
        for unit in self.plan.units:
            if not unit.reshard_after_forward:
                continue
            for gathered, run in zip(gathers.get(unit.name, ()), unit_runs(program, unit), strict=False):
                if any(user.target is reshard for user in gathered.users):
                    continue
                with graph.inserting_after(run[-1]):
                    freeing = graph.call_function(reshard, (gathered,), {"unit": unit.name})
                freeing.meta.update({"module_stack": (("", 0),), UNIT: unit.name, "val": None})
                changed = True
        return changed
