"""The functions that lowering puts into a graph to say where parameters are whole and where gradients are combined.

On one device each is the identity, so a lowered graph still runs and computes the same loss; what a runtime does at
each is in its docstring.
"""

from __future__ import annotations

import operator

import torch
from torch import fx


def unshard(*shards: torch.Tensor, unit: str) -> tuple[torch.Tensor, ...]:
    """Make the parameters of a unit whole: one all-gather over ``dp_shard`` for all of them, issued here."""
    return shards


def reshard(gathered: tuple[torch.Tensor, ...], *, unit: str) -> None:
    """Drop the whole copies of a unit; from here on each rank holds its shard only."""


def reduce_grad(parameter: torch.Tensor, *, collective: str) -> torch.Tensor:
    """The parameter itself; its gradient is combined over the ranks by ``collective`` (reduce_scatter or all_reduce)."""
    return parameter


fx.node.has_side_effect(reshard)  # nothing reads it, and it must survive dead-code elimination
_MARKERS = frozenset({unshard, reshard, reduce_grad})


def is_marker(node: fx.Node) -> bool:
    """Whether lowering put the node there: a marker, or one of the results of ``unshard``."""
    source = node.args[0] if node.args else None
    picks = node.target is operator.getitem and isinstance(source, fx.Node) and source.target is unshard
    return node.target in _MARKERS or picks
