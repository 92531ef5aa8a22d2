"""The passes by name, in the order in which they run."""

from __future__ import annotations

import sys

from partitioner.pass_manager import Pass
from passes.annotate_costs import AnnotateCosts
from passes.attach_plan import AttachPlan
from passes.canonicalize import Canonicalize
from passes.find_units import FindUnits
from passes.insert_grad_reduce import InsertGradReduce
from passes.insert_reshard import InsertReshard
from passes.insert_unshard import InsertUnshard

PREPARE: tuple[type[Pass], ...] = (Canonicalize, AnnotateCosts, FindUnits)
"""Before the solver: the graph is brought to one spelling, priced, and cut into what could be units."""
LOWER: tuple[type[Pass], ...] = (AttachPlan, InsertUnshard, InsertReshard, InsertGradReduce)
"""After the solver: the plan is written into the graph."""


def summary(kind: type[Pass]) -> str:
    """The first line of what a pass says of itself."""
    return (sys.modules[kind.__module__].__doc__ or "").strip().splitlines()[0]
