"""Say for every trainable parameter how its gradient is combined over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partitioner.pass_manager import Pass
from partitioner.plan import Plan
from partitioner.program import Program
from passes.attach_plan import UNIT
from passes.markers import reduce_grad


@dataclass(frozen=True, kw_only=True)
class InsertGradReduce(Pass):
    """Between each trainable parameter and its readers put ``reduce_grad``.

    1. Sharded: ``reduce_scatter``, in front of the unit's ``unshard``, whose backward hands it the whole gradient.
    2. Replicated: ``all_reduce``.

    Frozen parameters have no gradient and are left alone.
    """

    name: ClassVar[str] = "insert-grad-reduce"
    plan: Plan

    def run(self, program: Program) -> bool:
        graph = program.graph.graph
        unit_of = {p: unit for unit in self.plan.units for p in unit.parameters}
        trainable = {p.name for p in program.parameters if p.trainable}
        changed = False
        for node in list(graph.nodes):
            if node.op != "get_attr" or node.target not in trainable or not node.users:
                continue
            if any(user.target is reduce_grad for user in node.users):
                continue
            unit = unit_of[str(node.target)]
            collective = "reduce_scatter" if unit.placement == "shard" else "all_reduce"
            with graph.inserting_after(node):
                reduced = graph.call_function(reduce_grad, (), {"collective": collective})
            node.replace_all_uses_with(reduced)
            reduced.args = (node,)
            reduced.meta.update({"module_stack": (("", 0),), UNIT: unit.name, "val": node.meta["val"]})
            changed = True
        return changed
