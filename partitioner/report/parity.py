"""What a person reads after ``partition verify``: were loss and gradients equal, and how closely."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from partitioner.parity import ParityReport
from partitioner.units import format_bytes

SHOWN = 10
"""Problems that are listed; the JSON has them all."""


def _error(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"


def _rows(report: ParityReport) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    losses = ", ".join(f"{pair.sharded:.6g}" for pair in report.losses)
    table.add_row(
        "loss",
        f"{losses}; largest relative error {_error(report.max_loss_error)} (allowed {report.loss_tolerance:.0e})",
    )
    others = [f"{count} {what}" for count, what in ((report.frozen, "frozen"), (report.unused, "unused")) if count]
    worst = f" in {report.worst_gradient}" if report.max_gradient_error else ""
    table.add_row(
        "gradients",
        f"{report.gradients} compared element by element{''.join(f', {text}' for text in others)}; largest relative error "
        f"{_error(report.max_gradient_error)}{escape(worst)} (allowed {report.gradient_tolerance:.0e})",
    )
    measured = sorted(set(report.parameter_bytes))
    spread = (
        format_bytes(measured[0])
        if len(measured) == 1
        else f"{format_bytes(measured[0])} to {format_bytes(measured[-1])}"
    )
    table.add_row(
        "parameters", f"{spread} measured on each process, {format_bytes(report.expected_parameter_bytes)} by the plan"
    )
    return table


def render_parity(report: ParityReport) -> RenderableType:
    """The comparison, and every problem in a sentence."""
    what = f"one step on {report.ranks} gloo process{'es' if report.ranks > 1 else ''}, computed in {report.dtype}"
    if report.equal:
        return Group(f"[bold green]Equal:[/bold green] {what}.", _rows(report))
    listed = [f"  {escape(text)}" for text in report.problems[:SHOWN]]
    if len(report.problems) > SHOWN:
        listed.append(f"  and {len(report.problems) - SHOWN} more; --json lists them all")
    return Group(f"[bold red]Different:[/bold red] {what}.", _rows(report), *listed)
