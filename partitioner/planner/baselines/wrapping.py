"""Plans that a person would write by hand: the usual wrapping and sharding strategies, as decisions in our tables.

Each baseline is a planning problem of its own (same windows, other units) with one plan in it, so that it is simulated and
checked like ours and can be shipped if nothing is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from partitioner.planner.formulate import regroup
from partitioner.planner.problem import Candidate, Decisions, Mode, PlanningProblem, UnitChoice
from partitioner.planner.step import Group, StepTable

MakeCandidate = Callable[[Group], Candidate]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One plan of the usual kind."""

    name: str
    problem: PlanningProblem
    decisions: Decisions


def block_groups(step: StepTable) -> tuple[Group, ...]:
    """FSDP2 as most people apply it: every block is a unit, the root holds the rest (embedding, final norm, head).

    A model without repeated blocks is one unit: the root.
    """
    blocks = [g for g in step.groups if g.level == "block"]
    pinned = [g for g in step.groups if g.level == "pinned" and g.modules != ("",)]
    inside = {p for g in (*blocks, *pinned) for p in g.parameters}
    rest = tuple(p for p in range(len(step.parameters)) if p not in inside)
    covered = {w for g in blocks for first, last in g.calls for w in range(first, last + 1)}
    bare = [
        Group(name=f"({name})", modules=(), parameters=(), calls=((w, w),), level="bare")
        for w, name in enumerate(step.windows)
        if w not in covered
    ]
    root = Group(name="(root)", modules=("",), parameters=rest, calls=((0, len(step.windows) - 1),), level="pinned")
    chain = sorted((*blocks, *bare), key=lambda g: g.calls)
    return (*chain, *pinned, *((root,) if rest else ()))


def whole_model(step: StepTable) -> tuple[Group, ...]:
    """One unit, the root."""
    bare = [
        Group(name=f"({name})", modules=(), parameters=(), calls=((w, w),), level="bare")
        for w, name in enumerate(step.windows)
    ]
    everything = tuple(range(len(step.parameters)))
    root = Group(
        name="(root)", modules=("",), parameters=everything, calls=((0, len(step.windows) - 1),), level="pinned"
    )
    return (*bare, root)


def _uniform(problem: PlanningProblem, mode: Mode, *, root: Mode, recompute: bool) -> Decisions:
    units = []
    for i, c in enumerate(problem.candidates):
        chosen = Mode.RESHARD if not c.gather_bytes else root if c.modules == ("",) else mode
        units.append(UnitChoice(candidate=i, mode=chosen))
    modules = {m for c in problem.candidates for m in c.modules}
    again: list[int] = []
    busy: set[int] = set()
    for s, segment in enumerate(problem.segments) if recompute else ():
        span = set(range(segment.first, segment.last + 1))
        if segment.module in modules and not span & busy:
            again.append(s)
            busy |= span
    return Decisions(units=tuple(units), recompute=tuple(again))


def baselines(step: StepTable, problem: PlanningProblem, make: MakeCandidate) -> tuple[Baseline, ...]:
    """FSDP2 per block (stock; with every block recomputed), ZeRO-2 style keep, one root unit, and DDP."""
    blocks = regroup(problem, tuple(make(g) for g in block_groups(step)))
    whole = regroup(problem, tuple(make(g) for g in whole_model(step)))
    found = [
        Baseline(
            name="FSDP2 per block",
            problem=blocks,
            decisions=_uniform(blocks, Mode.RESHARD, root=Mode.KEEP, recompute=False),
        ),
        Baseline(
            name="FSDP2 per block, blocks recomputed",
            problem=blocks,
            decisions=_uniform(blocks, Mode.RESHARD, root=Mode.KEEP, recompute=True),
        ),
        Baseline(
            name="ZeRO-2 style (kept after forward)",
            problem=blocks,
            decisions=_uniform(blocks, Mode.KEEP, root=Mode.KEEP, recompute=False),
        ),
        Baseline(
            name="FSDP2 root only",
            problem=whole,
            decisions=_uniform(whole, Mode.KEEP, root=Mode.KEEP, recompute=False),
        ),
    ]
    if problem.num_gpus > 1:
        ddp = _uniform(blocks, Mode.REPLICATE, root=Mode.REPLICATE, recompute=False)
        found.append(Baseline(name="DDP", problem=blocks, decisions=ddp))
    return tuple(found)
