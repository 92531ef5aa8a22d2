"""PlanningProblem: the frozen tables that every planner, baseline, checker and simulator reads.

No torch and no OR-Tools here. Bytes and nanoseconds are integers, so that equal inputs give equal plans anywhere.

Words. The forward pass is cut into **windows** ``0..W-1`` in execution order; the backward pass runs the same windows
from ``W-1`` down to ``0``; then comes one optimizer step. A **candidate** is a set of modules whose parameters could be
gathered together. A *chain* candidate runs in one contiguous range of windows; the chosen chain candidates must tile
all windows. A *pinned* candidate (tied weights read at both ends, a module called many times, parameters of the root
itself) is always a unit of its own and has one range per call. A **segment** is a module whose activations can be
recomputed. A **saved** record is a set of activation storages that live and die together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mode(str, Enum):
    """Where a unit's parameters live between uses."""

    RESHARD = "reshard"  # sharded; gathered for forward, freed, gathered again for backward (ZeRO-3)
    KEEP = "keep"  # sharded; gathered in forward and kept until its backward is done (ZeRO-2-like)
    REPLICATE = "replicate"  # whole on every rank; gradients all-reduced (DDP)


@dataclass(frozen=True, kw_only=True)
class Window:
    """A contiguous run of forward operators, and their backward."""

    name: str
    forward_ns: int
    backward_ns: int
    forward_local_bytes: int
    """Largest activation bytes inside the forward of this window with nothing recomputed, counting only storages made in
    this window or not saved at all; what earlier windows saved is counted by the saved records."""
    backward_local_bytes: int
    """The same in the backward: gradients in flight, operator temporaries, and storages both made and saved in this window."""
    forward_peak_op: str = ""
    backward_peak_op: str = ""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A module whose forward can be run again in the backward instead of keeping its activations."""

    module: str
    first: int
    last: int  # windows, inclusive
    recompute_ns: int
    forward_local_bytes: tuple[int, ...]  # one per window first..last: as Window.forward_local_bytes, when recomputed
    backward_local_bytes: tuple[int, ...]  # one per window first..last, when recomputed


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Activation bytes made in window ``produced`` and needed by the backward of windows down to ``released``.

    Between those windows they are held unless a recomputed segment drops them. Local contributions inside
    ``produced`` itself are in the windows' local bytes, so this record counts in forward windows ``> produced`` and in
    backward windows ``>= released``, except backward window ``produced`` where the local bytes hold it again.
    """

    nbytes: int
    produced: int  # window; -1 for model inputs
    released: int  # window of the earliest operator that saved it
    droppable_by: tuple[int, ...] = ()
    """Segments (indices) that hold every operator that made or saved it: recomputing one of them drops the bytes until
    that segment's backward begins, where they live again."""
    held_by: tuple[int, ...] = ()
    """Segments that must keep these bytes as their own inputs when they are recomputed; such a record counts only while
    one of them is recomputed (it is an extra record; bytes that somebody else saves anyway have none)."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Modules whose parameters could be one unit, with what each mode costs. Bytes are per rank."""

    name: str
    modules: tuple[str, ...]  # FQNs, in execution order; ("",) means the root module's own parameters
    parameters: tuple[str, ...]  # canonical names
    calls: tuple[tuple[int, int], ...]  # window ranges (first, last), inclusive, one per forward call
    pinned: bool  # not part of the chain; always chosen
    trainable: bool
    backward_gather: bool  # whether the backward reads the parameters
    shard_bytes: int  # resident padded shard, in the parameters' own dtype
    full_bytes: int  # resident whole parameters when replicated
    gather_bytes: int  # gathered, padded, in compute dtype
    grad_bytes: int  # unsharded gradients in compute dtype (trainable only)
    reduce_bytes: int  # reduction buffer in reduce dtype (trainable only)
    grad_shard_bytes: int  # reduced gradient shard, in the parameters' own dtype
    grad_full_bytes: int  # reduced gradient when replicated, in the parameters' own dtype
    optimizer_shard_bytes: int
    optimizer_full_bytes: int
    all_gather_ns: int
    reduce_scatter_ns: int
    all_reduce_ns: int
    optimizer_shard_ns: int
    optimizer_full_ns: int
    offload_ns: int
    """Optimizer state of the shard to the device and back over the host link, not overlapped."""

    @property
    def first(self) -> int:
        return self.calls[0][0]

    @property
    def last(self) -> int:
        return self.calls[-1][1]


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """Everything a planner may know."""

    windows: tuple[Window, ...]
    segments: tuple[Segment, ...]
    saved: tuple[Saved, ...]
    candidates: tuple[Candidate, ...]
    num_gpus: int
    memory_limit_bytes: int  # per GPU, for everything below
    constant_bytes: int  # buffers, model inputs, reserve inside the limit
    host_limit_bytes: int  # per rank, for offloaded optimizer state
    max_prefetch: int = 2  # gather at most this many units ahead (1 or 2)
    pins: tuple[tuple[str, Mode], ...] = ()
    """(candidate or module name, mode): every chosen unit that holds the module must have the mode."""

    @property
    def num_windows(self) -> int:
        return len(self.windows)


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """What is decided for one unit."""

    candidate: int
    mode: Mode
    prefetch_forward: int = 1  # units ahead of its use that its gather is issued (1 is what FSDP2 does by itself)
    prefetch_backward: int = 1
    offload_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """A complete assignment: units in execution order (pinned ones by first window), and recomputed segments."""

    units: tuple[UnitChoice, ...]
    recompute: tuple[int, ...] = ()  # indices of segments, ascending
