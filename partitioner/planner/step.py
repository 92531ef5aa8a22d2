"""StepTable: one training step of a captured model as plain tables.

The bridge between the graph (torch) and the planner (integers): operators in execution order with their seconds and
storages, parameters with their sizes, and the groups that could be units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Op:
    """One forward operator and its backward."""

    name: str
    target: str  # short operator name, for people
    window: int
    modules: tuple[str, ...]  # FQNs of the modules that run it
    needs_grad: bool
    forward_ns: int
    backward_ns: int
    forward_temp_bytes: int
    backward_temp_bytes: int
    reads: tuple[int, ...]  # parameters
    inputs: tuple[int, ...]  # storages
    outputs: tuple[int, ...]  # storages; an input's for views
    saves: tuple[int, ...]  # storages kept for the backward


@dataclass(frozen=True, kw_only=True)
class Storage:
    """One activation storage."""

    nbytes: int
    producer: int  # operator; -1 for model inputs
    carries_grad: bool  # whether a gradient of this size flows back through it


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One unique parameter storage."""

    name: str
    shape: tuple[int, ...]
    itemsize: int  # at rest
    compute_itemsize: int  # gathered
    trainable: bool

    @property
    def numel(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    def padded_shard_numel(self, num_shards: int) -> int:
        """FSDP2's Shard(0): every rank allocates ceil(dim0 / n) rows."""
        if not self.shape or self.shape[0] == 0:
            return self.numel
        return -(-self.shape[0] // num_shards) * (self.numel // self.shape[0])


@dataclass(frozen=True, kw_only=True)
class Group:
    """Modules that could be one unit; ``calls`` in windows."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[int, ...]
    calls: tuple[tuple[int, int], ...]
    level: Literal["atom", "block", "merge", "pinned", "bare"]


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Everything about the model and the recipe that planning needs."""

    windows: tuple[str, ...]
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...]
    groups: tuple[Group, ...]
    buffer_bytes: int
    input_bytes: int
    reduce_itemsize: int  # dtype of gradient reduction
    forward_flop: int  # per rank and micro-batch
    backward_flop: int
    tokens: int  # sequence positions (or samples) per rank and micro-batch
