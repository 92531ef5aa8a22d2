"""Decision -> Plan: what was decided, in the model's names and people's terms, with predictions and proof."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from partitioner.config import Cluster
from partitioner.cost.compute import peak_flop_per_s
from partitioner.plan import (
    MemoryPoint,
    Plan,
    PlanActivation,
    PlanBaseline,
    PlanInfeasible,
    PlanParameters,
    PlanSolver,
    PlanUnit,
    Status,
)
from partitioner.planner.decide import Compared, Decision, NothingFits
from partitioner.planner.problem import Candidate, Decisions, Mode, PlanningProblem, UnitChoice
from partitioner.planner.simulate import Simulation
from partitioner.planner.solve import SOLVER_NAME
from partitioner.planner.step import StepTable
from partitioner.program import Program, TensorInfo, node_info

NS = 1_000_000_000
PROVEN_GAP = 1e-5
"""A plan this close to its bound is called optimal; the rest is the solver's own feasibility tolerance."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What planning was given, for the record."""

    program: Program
    step: StepTable
    cluster: Cluster
    problem: PlanningProblem
    defaults: Mapping[str, str]


def parameter_totals(parameters: Sequence[TensorInfo], buffer_bytes: int, num_gpus: int) -> PlanParameters:
    """Totals over unique storages."""
    trainable = [p for p in parameters if p.trainable]
    return PlanParameters(
        unique=len(parameters),
        numel=sum(p.numel for p in parameters),
        bytes=sum(p.nbytes for p in parameters),
        trainable_numel=sum(p.numel for p in trainable),
        trainable_bytes=sum(p.nbytes for p in trainable),
        frozen_bytes=sum(p.nbytes for p in parameters if not p.trainable),
        buffer_bytes=buffer_bytes,
        padded_shard_bytes=sum(p.padded_shard_bytes(num_gpus) for p in parameters),
        tied=tuple(p.aliases for p in parameters if len(p.aliases) > 1),
    )


def _unit(candidate: Candidate, choice: UnitChoice) -> PlanUnit:
    replicated = choice.mode is Mode.REPLICATE
    return PlanUnit(
        name=candidate.name,
        modules=candidate.modules,
        parameters=candidate.parameters,
        placement="replicate" if replicated else "shard",
        reshard_after_forward=choice.mode is Mode.RESHARD,
        prefetch_forward=choice.prefetch_forward,
        prefetch_backward=choice.prefetch_backward,
        offload="optimizer_state" if choice.offload_optimizer else "none",
        gather_bytes=0 if replicated else candidate.gather_bytes,
        shard_bytes=candidate.full_bytes if replicated else candidate.shard_bytes,
    )


def plan_units(problem: PlanningProblem, decisions: Decisions) -> tuple[PlanUnit, ...]:
    """The units that hold parameters, in execution order, the root first."""
    rows = [(problem.candidates[c.candidate], c) for c in decisions.units]
    held = [(unit, choice) for unit, choice in rows if unit.parameters]
    held.sort(key=lambda row: (row[0].modules != ("",), row[0].first, not row[0].pinned))
    return tuple(_unit(unit, choice) for unit, choice in held)


def plan_activations(problem: PlanningProblem, decisions: Decisions) -> tuple[PlanActivation, ...]:
    """What is kept and what is recomputed, one row a module of the chosen units."""
    modules = {m for c in decisions.units for m in problem.candidates[c.candidate].modules}
    again = set(decisions.recompute)
    rows = []
    for s, segment in enumerate(problem.segments):
        if segment.module not in modules:
            continue
        kept = sum(r.nbytes for r in problem.saved if s in r.droppable_by)
        inputs = sum(r.nbytes for r in problem.saved if s in r.held_by)
        rows.append(
            PlanActivation(
                module=segment.module,
                policy="recompute" if s in again else "keep",
                saved_bytes=inputs if s in again else kept,
                recompute_s=segment.recompute_ns / NS if s in again else 0.0,
            )
        )
    return tuple(rows)


def _recompute_flop(program: Program, activations: Sequence[PlanActivation]) -> int:
    """Forward FLOPs that run a second time, per rank and micro-batch."""
    again = {a.module for a in activations if a.policy == "recompute"}
    return sum(
        node_info(n).forward_flop
        for n in program.graph.graph.nodes
        if again.intersection(name for name, _ in n.meta.get("module_stack", ()))
    )


def plan_baselines(compared: Sequence[Compared]) -> tuple[PlanBaseline, ...]:
    return tuple(
        PlanBaseline(
            name=row.baseline.name,
            step_time_s=row.simulation.step_ns / NS,
            peak_bytes=row.simulation.peak_bytes,
            fits=row.fits,
        )
        for row in compared
    )


def fingerprint(problem: PlanningProblem) -> str:
    """sha256 of the planning tables: equal problems, equal fingerprints."""
    text = json.dumps(asdict(problem), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _curve(simulation: Simulation) -> tuple[MemoryPoint, ...]:
    return tuple(
        MemoryPoint(at=row.at, total_bytes=row.total_bytes, parts=dict(row.parts)) for row in simulation.memory
    )


def _common(setting: Setting) -> dict[str, Any]:
    program, cluster, step = setting.program, setting.cluster, setting.step
    return {
        "memory_limit_bytes": cluster.memory_bytes,
        "parameters": parameter_totals(program.parameters, step.buffer_bytes, cluster.num_gpus),
        "defaults": {**program.defaults, **setting.defaults},
        "warnings": tuple(program.warnings),
        "fingerprint": fingerprint(setting.problem),
        "source": {"kind": program.source.kind, "spec": program.source.spec},
        "cluster": cluster.to_dict(),
        "recipe": {**asdict(program.recipe), "dims": dict(program.recipe.dims), "tokens": step.tokens},
    }


def assemble(setting: Setting, decision: Decision) -> Plan:
    """The plan of a decision."""
    program, cluster, step = setting.program, setting.cluster, setting.step
    simulation, gap = decision.simulation, decision.gap
    seconds = simulation.step_ns / NS
    activations = plan_activations(decision.problem, decision.decisions)
    peak_rate = peak_flop_per_s(cluster.gpu, program.recipe.compute_dtype) * seconds
    flop = step.forward_flop + step.backward_flop
    status: Status = "optimal" if gap <= PROVEN_GAP else "feasible"
    return Plan(
        status=status,
        gap=gap,
        lower_bound_s=decision.lower_bound_ns / NS,
        step_time_s=seconds,
        mfu=flop / peak_rate,
        hfu=(flop + _recompute_flop(program, activations)) / peak_rate,
        tokens_per_s_per_gpu=step.tokens / seconds,
        peak_bytes=simulation.peak_bytes,
        peak_at=simulation.peak.at,
        host_bytes_per_node=simulation.host_bytes * min(cluster.gpus_per_node, cluster.num_gpus),
        units=plan_units(decision.problem, decision.decisions),
        activations=activations,
        baselines=plan_baselines(decision.compared),
        solver=PlanSolver(
            name=SOLVER_NAME,
            variables=decision.mip.variables,
            constraints=decision.mip.constraints,
            answer=decision.answer,
            build_s=decision.mip.build_s,
            solve_s=decision.mip.solve_s,
        ),
        memory=_curve(simulation),
        exposed_comm_s=simulation.exposed_comm_ns / NS,
        comm_s=simulation.comm_ns / NS,
        **_common(setting),
    )


def assemble_infeasible(
    setting: Setting, nothing: NothingFits, remedies: Callable[[PlanInfeasible], tuple[str, ...]]
) -> Plan:
    """The certificate: the leanest plan that exists, and how far over the budget it still is.

    Args:
        remedies: given the shortfall, says what would make the model fit.
    """
    simulation, limit = nothing.simulation, setting.problem.memory_limit_bytes
    over_memory = simulation.peak_bytes > limit
    needed = simulation.peak_bytes if over_memory else simulation.host_bytes
    budget = limit if over_memory else setting.problem.host_limit_bytes
    peak = simulation.peak
    certificate = PlanInfeasible(
        budget="gpu memory" if over_memory else "host memory",
        needed_bytes=needed,
        limit_bytes=budget,
        missing_bytes=needed - budget,
        at=peak.at,
        largest=tuple(sorted(((k, v) for k, v in peak.parts.items() if v), key=lambda row: (-row[1], row[0]))),
        remedies=(),
    )
    return Plan(
        status="infeasible",
        gap=None,
        lower_bound_s=None,
        step_time_s=None,
        mfu=None,
        hfu=None,
        tokens_per_s_per_gpu=None,
        peak_bytes=simulation.peak_bytes,
        peak_at=peak.at,
        host_bytes_per_node=0,
        units=(),
        activations=(),
        baselines=plan_baselines(nothing.compared),
        solver=PlanSolver(
            name=SOLVER_NAME,
            variables=nothing.mip.variables,
            constraints=nothing.mip.constraints,
            answer="none",
            build_s=nothing.mip.build_s,
            solve_s=nothing.mip.solve_s,
        ),
        infeasible=PlanInfeasible(
            **{**asdict(certificate), "largest": certificate.largest, "remedies": remedies(certificate)}
        ),
        memory=_curve(simulation),
        **_common(setting),
    )
