"""StepTable + cluster -> PlanningProblem: sizes per rank and seconds per collective for every candidate unit."""

from __future__ import annotations

from dataclasses import replace

from partitioner.config import Cluster
from partitioner.cost import collective, optimizer
from partitioner.planner.activations import Activations, activation_tables
from partitioner.planner.problem import Candidate, Mode, PlanningProblem
from partitioner.planner.step import Group, Parameter, StepTable

NS = 1_000_000_000


def nanoseconds(seconds: float) -> int:
    """Rounded up, so that no time vanishes."""
    return int(seconds * NS + 0.999)


def backward_reads(step: StepTable) -> set[int]:
    """Windows in which some backward needs parameters of its own operators."""
    return {op.window for op in step.ops if op.needs_grad and op.reads}


def make_candidate(
    step: StepTable, group: Group, cluster: Cluster, optimizer_name: str, backward: set[int]
) -> Candidate:
    """Everything a unit costs in each mode, per rank."""
    n = cluster.num_gpus
    parameters = [step.parameters[p] for p in group.parameters]
    trainable = [p for p in parameters if p.trainable]

    def total(items: list[Parameter], itemsize: str | int, *, shards: int = 1) -> int:
        return sum(
            p.padded_shard_numel(shards) * (getattr(p, itemsize) if isinstance(itemsize, str) else itemsize)
            for p in items
        )

    def state(shards: int) -> int:
        return sum(
            p.padded_shard_numel(shards) * optimizer.state_bytes_per_element(optimizer_name, p.itemsize)
            for p in trainable
        )

    def step_ns(shards: int) -> int:
        return sum(
            nanoseconds(optimizer.step_seconds(cluster.gpu, optimizer_name, p.padded_shard_numel(shards), p.itemsize))
            for p in trainable
        )

    gather = total(parameters, "compute_itemsize", shards=n) * n
    reduce = total(trainable, step.reduce_itemsize, shards=n) * n
    alone = n == 1
    return Candidate(
        name=group.name,
        modules=group.modules,
        parameters=tuple(p.name for p in parameters),
        calls=group.calls,
        pinned=group.level == "pinned",
        trainable=bool(trainable),
        backward_gather=any(w in backward for first, last in group.calls for w in range(first, last + 1)),
        shard_bytes=total(parameters, "itemsize", shards=n),
        full_bytes=total(parameters, "itemsize"),
        gather_bytes=gather,
        grad_bytes=total(trainable, "compute_itemsize"),
        reduce_bytes=reduce,
        grad_shard_bytes=total(trainable, "itemsize", shards=n),
        grad_full_bytes=total(trainable, "itemsize"),
        optimizer_shard_bytes=state(n),
        optimizer_full_bytes=state(1),
        all_gather_ns=0 if alone or not gather else nanoseconds(collective.all_gather_s(cluster, gather, n)),
        reduce_scatter_ns=0 if alone or not reduce else nanoseconds(collective.reduce_scatter_s(cluster, reduce, n)),
        all_reduce_ns=0 if alone or not reduce else nanoseconds(collective.all_reduce_s(cluster, reduce, n)),
        optimizer_shard_ns=step_ns(n),
        optimizer_full_ns=step_ns(1),
        offload_ns=nanoseconds(optimizer.host_transfer_s(cluster.gpu, state(n))) if state(n) else 0,
    )


def formulate(
    step: StepTable,
    cluster: Cluster,
    *,
    optimizer_name: str,
    pins: tuple[tuple[str, Mode], ...] = (),
    activations: Activations | None = None,
) -> PlanningProblem:
    """The planning problem of a step on a cluster."""
    tables = activations or activation_tables(step)
    backward = backward_reads(step)
    return PlanningProblem(
        windows=tables.windows,
        segments=tables.segments,
        saved=tables.saved,
        candidates=tuple(make_candidate(step, g, cluster, optimizer_name, backward) for g in step.groups),
        num_gpus=cluster.num_gpus,
        memory_limit_bytes=cluster.memory_bytes,
        constant_bytes=step.buffer_bytes + step.input_bytes,
        host_limit_bytes=cluster.host_memory_bytes // min(cluster.gpus_per_node, cluster.num_gpus),
        pins=pins,
    )


def regroup(problem: PlanningProblem, candidates: tuple[Candidate, ...]) -> PlanningProblem:
    """The same step with other candidate units (what a baseline wraps)."""
    return replace(problem, candidates=candidates, pins=())
