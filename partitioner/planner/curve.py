"""The memory curve of a plan: bytes per rank, by category, at every window and boundary of the step.

Lifetimes follow [Note: schedule] in ``simulate.py``. They depend on what is decided, not on how long things take, so the
same sums stand in the MIP as linear rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from partitioner.planner.chosen import Chosen, split_choices
from partitioner.planner.problem import Decisions, Mode, PlanningProblem, Saved


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes per rank by category at one point of the step."""

    at: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def alive_windows(
    problem: PlanningProblem, record: Saved, recompute: frozenset[int], *, forward: bool
) -> tuple[int, int]:
    """First and last window in which a saved record holds its bytes (its own window's share is in the local bytes)."""
    end = problem.num_windows - 1
    if record.held_by and not recompute.intersection(record.held_by):
        return 0, -1
    dropper = next((s for s in record.droppable_by if s in recompute), None)
    if forward:
        return (record.produced + 1, end) if dropper is None else (0, -1)
    first = record.released if record.released > record.produced else record.produced + 1
    return first, end if dropper is None else problem.segments[dropper].last


def saved_bytes(problem: PlanningProblem, recompute: frozenset[int], *, forward: bool) -> list[int]:
    """Bytes of saved records by window."""
    change = [0] * (problem.num_windows + 1)
    for record in problem.saved:
        first, last = alive_windows(problem, record, recompute, forward=forward)
        if first <= last:
            change[first] += record.nbytes
            change[last + 1] -= record.nbytes
    return list(itertools.accumulate(change[:-1]))


def local_bytes(problem: PlanningProblem, recompute: frozenset[int], window: int, *, forward: bool) -> int:
    """Largest activation bytes inside one window beyond what the saved records count."""
    for index in recompute:
        segment = problem.segments[index]
        if segment.first <= window <= segment.last:
            local = segment.forward_local_bytes if forward else segment.backward_local_bytes
            return local[window - segment.first]
    entry = problem.windows[window]
    return entry.forward_local_bytes if forward else entry.backward_local_bytes


def bare_windows(problem: PlanningProblem) -> frozenset[int]:
    """Windows that no chain candidate with parameters covers: there a pinned unit's gather output outlives its copy-out."""
    covered = {w for c in problem.candidates if not c.pinned and c.gather_bytes for w in range(c.first, c.last + 1)}
    return frozenset(range(problem.num_windows)) - covered


class _Curve:
    """Shared tables of one plan's curve."""

    def __init__(self, problem: PlanningProblem, decisions: Decisions) -> None:
        self.problem = problem
        self.entries, self.pinned = split_choices(problem, decisions)
        self.chosen = self.entries + self.pinned
        self.recompute = frozenset(decisions.recompute)
        self.bare = bare_windows(problem)
        self.cover = [k for k, e in enumerate(self.entries) for _ in range(e.unit.first, e.unit.last + 1)]
        self.kept_before = [0, *itertools.accumulate(e.unit.gather_bytes * e.kept for e in self.entries)]
        self._reduced_from = [0] * (problem.num_windows + 1)  # gradients of units that begin in a window or later
        for c in self.chosen:
            self._reduced_from[c.unit.first] += grad_resident_bytes(c)
        for window in range(problem.num_windows - 1, -1, -1):
            self._reduced_from[window] += self._reduced_from[window + 1]
        self.saved_forward = saved_bytes(problem, self.recompute, forward=True)
        self.saved_backward = saved_bytes(problem, self.recompute, forward=False)
        self.parameters = sum(
            c.unit.full_bytes if c.choice.mode is Mode.REPLICATE else c.unit.shard_bytes for c in self.chosen
        )
        self.optimizer = sum(
            c.unit.optimizer_full_bytes if c.choice.mode is Mode.REPLICATE else c.unit.optimizer_shard_bytes
            for c in self.chosen
            if not c.choice.offload_optimizer
        )

    def row(self, at: str, **parts: int) -> MemoryRow:
        fixed = {"constant": self.problem.constant_bytes, "parameters": self.parameters, "optimizer": self.optimizer}
        return MemoryRow(at=at, parts={**fixed, **{k: v for k, v in parts.items() if v}})

    def grad_shards(self, window: int) -> int:
        """Reduced gradients of the units whose backward is over before a backward window; -1 for all."""
        return self._reduced_from[window + 1]

    def pinned_gathered(self, window: int, *, forward: bool) -> int:
        total = 0
        for c in self.pinned:
            in_call = any(first <= window <= last for first, last in c.unit.calls)
            kept = c.kept and (window >= c.unit.first if forward else window <= c.unit.last)
            total += c.unit.gather_bytes * (in_call or kept)
            if forward and c.gathers and window in self.bare:
                starts = [first for first, _ in c.unit.calls]
                total += c.unit.gather_bytes * ((starts[0] == window) if c.kept else starts.count(window))
        return total

    def pinned_grads(self, window: int) -> int:
        return sum(c.unit.grad_bytes for c in self.pinned if c.unit.first <= window <= c.unit.last)


def grad_resident_bytes(c: Chosen) -> int:
    """What one unit's gradients take from their reduction to the optimizer step."""
    if not c.unit.trainable:
        return 0
    return c.unit.grad_full_bytes if c.choice.mode is Mode.REPLICATE else c.unit.grad_shard_bytes


def _forward_rows(curve: _Curve) -> list[MemoryRow]:
    rows = []
    entries = curve.entries
    for window, entry in enumerate(curve.problem.windows):
        k = curve.cover[window]
        own = entries[k]
        gathered = own.unit.gather_bytes * (2 if own.gathers else 1)
        gathered += curve.kept_before[k]
        prefetched = 0
        for target in (k + 1, k + 2):  # explicit lists: entry t with distance 2 is issued at t - 2, and t - 1 with it
            if (
                target < len(entries)
                and entries[target].gathers
                and entries[target].choice.prefetch_forward == 2
                and target >= 2
            ):
                prefetched += entries[target].unit.gather_bytes
                if target == k + 2 and entries[k + 1].gathers and not _ahead(entries, k + 1):
                    prefetched += entries[k + 1].unit.gather_bytes
        rows.append(
            curve.row(
                f"forward of {entry.name}" + (f" ({entry.forward_peak_op})" if entry.forward_peak_op else ""),
                gathered=gathered + curve.pinned_gathered(window, forward=True),
                prefetched=prefetched,
                activations=curve.saved_forward[window],
                working=local_bytes(curve.problem, curve.recompute, window, forward=True),
            )
        )
    return rows


def _ahead(entries: list[Chosen], k: int) -> bool:
    return k >= 2 and entries[k].choice.prefetch_forward == 2


def _prefetched_backward(entries: list[Chosen], k: int) -> int:
    """Gathers in flight while entry ``k`` runs its backward."""
    total = 0
    for target in (k - 1, k - 2):
        if target >= 0 and entries[target].gathers_in_backward:
            issued = min(target + entries[target].choice.prefetch_backward, len(entries) - 1)
            total += entries[target].unit.gather_bytes * (issued >= k)
    return total


def _backward_rows(curve: _Curve) -> list[MemoryRow]:
    rows = []
    entries, problem = curve.entries, curve.problem
    for window in range(problem.num_windows - 1, -1, -1):
        k = curve.cover[window]
        own = entries[k]
        entry = problem.windows[window]
        kept = curve.kept_before[k]
        prefetched = _prefetched_backward(entries, k)
        activations = curve.saved_backward[window]
        rows.append(
            curve.row(
                f"backward of {entry.name}" + (f" ({entry.backward_peak_op})" if entry.backward_peak_op else ""),
                gathered=own.unit.gather_bytes + kept + curve.pinned_gathered(window, forward=False),
                prefetched=prefetched,
                gradients=own.unit.grad_bytes + curve.pinned_grads(window),
                reduced_gradients=curve.grad_shards(window),
                reduction=entries[k + 1].unit.reduce_bytes if k + 1 < len(entries) else 0,
                activations=activations,
                working=local_bytes(problem, curve.recompute, window, forward=False),
            )
        )
        ended = [c for c in curve.pinned if c.unit.first == window] + [own] * (window == own.unit.first)
        if ended:
            rows.append(
                curve.row(
                    f"gradient reduction of {ended[-1].unit.name}",
                    gathered=kept + curve.pinned_gathered(window, forward=False),
                    prefetched=prefetched,
                    gradients=own.unit.grad_bytes * (own in ended) + curve.pinned_grads(window),
                    reduced_gradients=curve.grad_shards(window) + grad_resident_bytes(own) * (own in ended),
                    reduction=sum(c.unit.reduce_bytes for c in ended),
                    activations=activations,
                )
            )
    return rows


def memory_curve(problem: PlanningProblem, decisions: Decisions) -> tuple[MemoryRow, ...]:
    """Rows in the order of the step: forward windows, backward windows with their reductions, the optimizer step."""
    curve = _Curve(problem, decisions)
    moved = max(
        (c.unit.optimizer_shard_bytes for c in curve.chosen if c.choice.offload_optimizer),
        default=0,
    )
    optimizer = curve.row("optimizer step", reduced_gradients=curve.grad_shards(-1), offload=moved)
    return (*_forward_rows(curve), *_backward_rows(curve), optimizer)
