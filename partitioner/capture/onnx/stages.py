"""Modules for a graph that names none: consecutive stages, cut where a single value passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

STAGES = "stages"
MAX_STAGES = 64
"""A stage holds at least this fraction of all parameter bytes, so that gathering it is not all latency."""


def _cuts(operators: Sequence[fx.Node]) -> list[int]:
    """Positions after which exactly one computed value is still to be read."""
    position = {node: i for i, node in enumerate(operators)}
    last_use = {}
    for node in operators:
        users = [position[u] if u in position else len(operators) for u in node.users]
        last_use[node] = max(users, default=position[node])
    expiring: dict[int, int] = {}
    live, cuts = 0, []
    for i, node in enumerate(operators):
        live += 1
        expiring[last_use[node]] = expiring.get(last_use[node], 0) + 1
        live -= expiring.pop(i, 0)
        if live == 1:
            cuts.append(i)
    return cuts


def find_stages(
    operators: Sequence[fx.Node], reads: Mapping[fx.Node, Sequence[str]], sizes: Mapping[str, int]
) -> dict[fx.Node, str]:
    """The stage of each operator: ``stages.0``, ``stages.1``, ... in execution order; empty if there is nothing to cut.

    Args:
        operators: in execution order, the loss excluded.
        reads: names of the parameters each reads.
        sizes: bytes of each parameter.
    """
    total = sum(sizes.values())
    cuts = set(_cuts(operators))
    stages: dict[fx.Node, int] = {}
    seen: set[str] = set()
    number, held = 0, 0
    for i, node in enumerate(operators):
        for name in reads.get(node, ()):
            if name not in seen:
                seen.add(name)
                held += sizes[name]
        stages[node] = number
        if i in cuts and held * MAX_STAGES >= total and len(seen) < len(sizes):
            number, held = number + 1, 0
    if number == 0:
        return {}
    return {node: f"{STAGES}.{stage}" for node, stage in stages.items()}
