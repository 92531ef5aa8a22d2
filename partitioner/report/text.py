"""What a person reads on the terminal: the plan, its proof, what it was compared with, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from partitioner.plan import Plan, PlanInfeasible, PlanUnit
from partitioner.report.folding import fold
from partitioner.units import format_bytes, format_seconds

PARTS = {
    "constant": "buffers and inputs",
    "parameters": "parameter shards",
    "optimizer": "optimizer state",
    "gathered": "gathered parameters",
    "prefetched": "prefetched parameters",
    "gradients": "unreduced gradients",
    "reduced_gradients": "gradient shards",
    "reduction": "reduction buffers",
    "activations": "saved activations",
    "working": "operators at work",
    "offload": "state in transit",
}
"""Categories of the memory curve, as people call them."""


NAME_WIDTH = 18
"""Columns that a name gets at least, however narrow the terminal: what a row is about matters most."""


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", padding=0, pad_edge=False)
    table.add_column(columns[0], overflow="fold", min_width=NAME_WIDTH)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def headline(plan: Plan) -> RenderableType:
    """Step time, proof, use of the hardware, memory."""
    assert plan.step_time_s is not None
    assert plan.lower_bound_s is not None
    assert plan.peak_bytes is not None
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    own = plan.solver.answer in ("mip", "regular")
    shipped = "" if own else f" (the plan of the baseline {plan.solver.answer})"
    proof = "optimal" if plan.status == "optimal" else f"within {_percent(plan.gap)} of optimal"
    table.add_row(
        "step",
        f"{format_seconds(plan.step_time_s)}, {proof}{shipped}; no plan is faster than {format_seconds(plan.lower_bound_s)}",
    )
    table.add_row(
        "use",
        f"MFU {_percent(plan.mfu)}, HFU {_percent(plan.hfu)}, {plan.tokens_per_s_per_gpu:,.0f} tokens or samples/s/GPU",
    )
    if plan.comm_s:
        table.add_row(
            "communication",
            f"{format_seconds(plan.comm_s)}, of which exposed {format_seconds(plan.exposed_comm_s or 0)}",
        )
    table.add_row(
        "memory",
        f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.memory_limit_bytes)} a GPU, highest in the {escape(plan.peak_at)}",
    )
    if plan.host_bytes_per_node:
        table.add_row("host", f"{format_bytes(plan.host_bytes_per_node)} of optimizer state on every node")
    return table


def parameters_line(plan: Plan) -> str:
    p = plan.parameters
    frozen = f", {format_bytes(p.frozen_bytes)} of it frozen" if p.frozen_bytes else ""
    tied = f", {len(p.tied)} tied" if p.tied else ""
    return f"{p.numel:,} parameters in {p.unique} storages ({format_bytes(p.bytes)}{frozen}{tied}); {format_bytes(p.padded_shard_bytes)} a GPU when all is sharded"


def _fate(unit: PlanUnit) -> tuple[object, ...]:
    return (
        unit.placement, unit.reshard_after_forward, unit.prefetch_forward, unit.prefetch_backward, unit.offload,
        unit.gather_bytes, len(unit.modules),
    )  # fmt: skip


def _after_forward(unit: PlanUnit) -> str:
    if unit.placement == "replicate":
        return "replicate"
    return "reshard" if unit.reshard_after_forward else "keep"


def _recomputed(unit: PlanUnit, again: frozenset[str]) -> str:
    count = sum(m in again for m in unit.modules)
    if not count:
        return "no"
    return "yes" if count == len(unit.modules) else f"{count} of {len(unit.modules)}"


def units_table(plan: Plan) -> RenderableType:
    """One row for units of one fate. Columns that would say the same in every row are a sentence below the table."""
    again = frozenset(a.module for a in plan.activations if a.policy == "recompute")
    offloads = any(unit.offload == "optimizer_state" for unit in plan.units)
    optional = [*(["recompute"] if again else []), *(["optimizer"] if offloads else [])]
    columns = ("unit", "count", "gathers", "after forward", "prefetch")
    table = _table(*columns, *optional, title="Units (prefetch: units ahead in forward / backward)")
    for name, units in fold(plan.units, lambda u: u.name, lambda u: (*_fate(u), _recomputed(u, again))):
        unit = units[0]
        table.add_row(
            escape(name),
            str(len(units)),
            format_bytes(unit.gather_bytes) if unit.gather_bytes else "-",
            _after_forward(unit),
            f"{unit.prefetch_forward} / {unit.prefetch_backward}" if unit.placement == "shard" else "-",
            *([_recomputed(unit, again)] if again else []),
            *(["host" if unit.offload == "optimizer_state" else "GPU"] if offloads else []),
        )
    said = [
        *([] if again else ["all activations are kept"]),
        *([] if offloads else ["optimizer state stays on the GPUs"]),
    ]
    sentence = " and ".join(said)
    return Group(table, f"{sentence[0].upper()}{sentence[1:]}.", "") if said else table


def memory_table(plan: Plan) -> RenderableType:
    table = _table("what", "bytes", "share", title=f"Memory in the {plan.peak_at}")
    peak = max(plan.memory, key=lambda point: point.total_bytes)
    for key, value in sorted(peak.parts.items(), key=lambda row: (-row[1], row[0])):
        if value:
            table.add_row(PARTS[key], format_bytes(value), _percent(value / peak.total_bytes))
    return table


def baselines_table(plan: Plan) -> RenderableType:
    table = _table("plan", "step", "against ours", "peak", "fits", title="Compared with")
    for row in plan.baselines:
        ratio = f"{row.step_time_s / plan.step_time_s:.3f}x" if plan.step_time_s else "-"
        table.add_row(
            row.name,
            format_seconds(row.step_time_s),
            ratio,
            format_bytes(row.peak_bytes),
            "yes" if row.fits else "[red]no[/red]",
        )
    return table


def certificate(plan: Plan, why: PlanInfeasible) -> RenderableType:
    """Which budget, where in the step, how much is missing, what would make it fit."""
    lines = [
        f"[bold red]Infeasible:[/bold red] {why.budget} is short by {format_bytes(why.missing_bytes)}.",
        f"The leanest plan needs {format_bytes(why.needed_bytes)} in the {escape(why.at)}; the limit is {format_bytes(why.limit_bytes)}.",
        "There it holds " + ", ".join(f"{PARTS[k]} {format_bytes(v)}" for k, v in why.largest) + ".",
        "What would make it fit:",
        *(f"  {escape(line)}" for line in why.remedies),
    ]
    return "\n".join(lines)


def _notes(plan: Plan) -> Iterator[RenderableType]:
    if plan.defaults:
        table = Table(
            title="Assumed, because nobody said otherwise",
            box=None,
            show_header=False,
            title_justify="left",
            title_style="bold",
            pad_edge=False,
        )
        for key, value in plan.defaults.items():
            table.add_row(f"  {escape(key)}", escape(value))
        yield table
    for warning in plan.warnings:
        yield f"[yellow]warning:[/yellow] {escape(warning)}"


def render(plan: Plan) -> RenderableType:
    """The whole report of a plan."""
    parts: list[RenderableType] = [escape(f"{plan.source['spec']}: {parameters_line(plan)}")]
    if plan.infeasible is not None:
        parts += [certificate(plan, plan.infeasible)]
    else:
        parts += [headline(plan), "", units_table(plan), memory_table(plan), baselines_table(plan)]
    s = plan.solver
    solved = f"{s.name}: {s.variables:,} variables, {s.constraints:,} constraints, built in {s.build_s:.1f} s, solved in {s.solve_s:.1f} s."
    return Group(
        *parts,
        *_notes(plan),
        "",
        f"[dim]{solved} Every time and size here is an estimate from the hardware catalogue, not a measurement.[/dim]",
    )
