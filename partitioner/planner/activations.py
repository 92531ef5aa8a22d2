"""From operators to activation memory: what is saved between forward and backward, and how high each window rises.

A storage that some operator saves lives from its producer to the backward of the *first* operator that saved it. One
that nobody saves lives to its last forward reader. Gradients live from the backward of the last reader to the backward
of the producer. Recomputing a segment makes the storages that are made and saved inside it transient in the forward, and
brings them back at the start of the segment's backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.planner.problem import Saved, Segment, Window
from partitioner.planner.step import StepTable


@dataclass(frozen=True)
class Lifetimes:
    """Per storage: who reads it last, and who saves it first."""

    last_reader: tuple[int, ...]  # operator; the producer itself if nobody reads it
    first_saver: tuple[int, ...]  # operator; -1 if not saved
    savers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Activations:
    """The activation tables of a PlanningProblem."""

    windows: tuple[Window, ...]
    segments: tuple[Segment, ...]
    saved: tuple[Saved, ...]


def lifetimes(step: StepTable) -> Lifetimes:
    """One walk over the operators."""
    last = [max(s.producer, 0) for s in step.storages]
    savers: list[list[int]] = [[] for _ in step.storages]
    for i, op in enumerate(step.ops):
        for s in (*op.inputs, *op.outputs):
            last[s] = i
        for s in op.saves:
            savers[s].append(i)
    return Lifetimes(
        last_reader=tuple(last),
        first_saver=tuple(x[0] if x else -1 for x in savers),
        savers=tuple(tuple(x) for x in savers),
    )


@dataclass(frozen=True)
class _Range:
    """Operators of one module call."""

    module: str
    first: int
    last: int

    def holds(self, op: int) -> bool:
        return self.first <= op <= self.last


def _ranges(step: StepTable) -> list[_Range]:
    """The modules that could be recomputed: listed in a candidate, called once, with a backward."""
    wanted = {m for g in step.groups if g.level != "pinned" for m in g.modules}
    spans: dict[str, list[int]] = {}
    for i, op in enumerate(step.ops):
        for module in op.modules:
            if module in wanted:
                span = spans.setdefault(module, [i, i])
                span[1] = i
    return [_Range(m, a, b) for m, (a, b) in spans.items() if any(op.needs_grad for op in step.ops[a : b + 1])]


def _peak_forward(
    step: StepTable, life: Lifetimes, window: int, ops: range, carried: set[int], dropped: set[int]
) -> tuple[int, str]:
    """Highest local bytes in the forward of a window, and the operator where.

    ``carried`` are unsaved storages alive at the start of the window; ``dropped`` those that a recomputed segment frees.
    """
    transient = {s: step.storages[s].nbytes for s in carried}
    live = sum(transient.values())
    held = 0  # made here and saved
    peak, where = live, ""
    for i in ops:
        op = step.ops[i]
        for s in (*op.outputs, *op.saves):
            storage = step.storages[s]
            if storage.producer != i:
                continue
            if life.first_saver[s] >= 0 and s not in dropped:
                held += storage.nbytes
            elif s not in transient:
                transient[s] = storage.nbytes
                live += storage.nbytes
        if held + live + op.forward_temp_bytes > peak:
            peak, where = held + live + op.forward_temp_bytes, op.target
        for s in [s for s in transient if life.last_reader[s] <= i]:
            live -= transient.pop(s)
    return peak, where


def _carried_forward(step: StepTable, life: Lifetimes, starts: list[int]) -> list[set[int]]:
    """Per window: storages made earlier, saved by nobody, still to be read."""
    carried: list[set[int]] = [set() for _ in starts]
    window_of = [op.window for op in step.ops]
    for s, storage in enumerate(step.storages):
        if storage.producer < 0 or life.first_saver[s] >= 0:
            continue
        for w in range(window_of[storage.producer] + 1, window_of[life.last_reader[s]] + 1):
            carried[w].add(s)
    return carried


def _peak_backward(
    step: StepTable, life: Lifetimes, window: int, ops: range, gradients: set[int]
) -> tuple[int, str, set[int]]:
    """Highest local bytes in the backward of a window, where, and the gradients alive when it ends."""
    live = {s: step.storages[s].nbytes for s in gradients}
    alive = sum(live.values())
    own = [s for i in ops for s in {*step.ops[i].outputs, *step.ops[i].saves} if step.storages[s].producer == i]
    saved = sum(
        step.storages[s].nbytes
        for s in dict.fromkeys(own)
        if life.first_saver[s] >= 0 and step.ops[life.first_saver[s]].window == window
    )
    peak, where = saved + alive, ""
    for i in reversed(ops):
        op = step.ops[i]
        if not op.needs_grad:
            continue
        for s in op.inputs:
            storage = step.storages[s]
            if storage.carries_grad and storage.producer >= 0 and s not in live:
                live[s] = storage.nbytes
                alive += storage.nbytes
        if saved + alive + op.backward_temp_bytes > peak:
            peak, where = saved + alive + op.backward_temp_bytes, op.target
        for s in op.outputs:
            if step.storages[s].producer == i and s in live:
                alive -= live.pop(s)
        for s in op.saves:
            if (
                life.first_saver[s] == i
                and step.storages[s].producer >= 0
                and step.ops[step.storages[s].producer].window == window
            ):
                saved -= step.storages[s].nbytes
    return peak, where, set(live)


def _droppable(step: StepTable, life: Lifetimes, span: _Range) -> set[int]:
    """Storages made and saved only inside a range."""
    found: dict[int, None] = {}
    for i in range(span.first, span.last + 1):
        for s in (*step.ops[i].outputs, *step.ops[i].saves):
            if step.storages[s].producer == i and life.savers[s] and all(span.holds(o) for o in life.savers[s]):
                found.setdefault(s)
    return set(found)


def _held_inputs(step: StepTable, life: Lifetimes, span: _Range) -> list[int]:
    """Storages that a range reads from outside and that nobody else keeps."""
    found: dict[int, None] = {}
    for i in range(span.first, span.last + 1):
        for s in step.ops[i].inputs:
            storage = step.storages[s]
            if 0 <= storage.producer < span.first and not life.savers[s] and storage.carries_grad:
                found.setdefault(s)
    return list(found)


def activation_tables(step: StepTable) -> Activations:
    """Windows, segments and saved records of a step."""
    life = lifetimes(step)
    num_windows = len(step.windows)
    by_window: list[list[int]] = [[] for _ in range(num_windows)]
    for i, op in enumerate(step.ops):
        by_window[op.window].append(i)
    ops = [range(x[0], x[-1] + 1) if x else range(0) for x in by_window]
    carried = _carried_forward(step, life, [r.start for r in ops])
    forward = [_peak_forward(step, life, w, ops[w], carried[w], set()) for w in range(num_windows)]
    backward: list[tuple[int, str]] = [(0, "")] * num_windows
    entering: list[int] = [0] * num_windows
    gradients: set[int] = set()
    for w in range(num_windows - 1, -1, -1):
        entering[w] = sum(step.storages[s].nbytes for s in gradients)
        peak, where, gradients = _peak_backward(step, life, w, ops[w], gradients)
        backward[w] = (peak, where)
    windows = tuple(
        Window(
            name=step.windows[w],
            forward_ns=sum(step.ops[i].forward_ns for i in ops[w]),
            backward_ns=sum(step.ops[i].backward_ns for i in ops[w]),
            forward_local_bytes=forward[w][0],
            backward_local_bytes=backward[w][0],
            forward_peak_op=forward[w][1],
            backward_peak_op=backward[w][1],
        )
        for w in range(num_windows)
    )
    kept = [(span, drop) for span in _ranges(step) if (drop := _droppable(step, life, span))]
    segments = [_segment(step, life, span, drop, windows, ops, carried, entering) for span, drop in kept]
    return Activations(windows, tuple(segments), _records(step, life, kept))


def _segment(
    step: StepTable,
    life: Lifetimes,
    span: _Range,
    dropped: set[int],
    windows: tuple[Window, ...],
    ops: list[range],
    carried: list[set[int]],
    entering: list[int],
) -> Segment:
    first, last = step.ops[span.first].window, step.ops[span.last].window
    forward, alive = [], {s for s in dropped if step.ops[step.storages[s].producer].window < first}
    for w in range(first, last + 1):
        extra = {
            s
            for s in dropped
            if step.ops[step.storages[s].producer].window < w and step.ops[life.last_reader[s]].window >= w
        }
        forward.append(_peak_forward(step, life, w, ops[w], carried[w] | extra | alive, dropped)[0])
    backward = [windows[w].backward_local_bytes for w in range(first, last + 1)]
    backward[-1] = max(backward[-1], windows[last].forward_local_bytes + entering[last])  # while it runs again
    return Segment(
        module=span.module,
        first=first,
        last=last,
        recompute_ns=sum(op.forward_ns for op in step.ops[span.first : span.last + 1]),
        forward_local_bytes=tuple(forward),
        backward_local_bytes=tuple(backward),
    )


def _records(step: StepTable, life: Lifetimes, kept: list[tuple[_Range, set[int]]]) -> tuple[Saved, ...]:
    """Saved records, storages of equal lifetime and fate joined."""
    droppers: dict[int, list[int]] = {}
    holders: dict[int, list[int]] = {}
    for n, (span, dropped) in enumerate(kept):
        for s in dropped:
            droppers.setdefault(s, []).append(n)
        for s in _held_inputs(step, life, span):
            holders.setdefault(s, []).append(n)
    joined: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], int] = {}
    for s, storage in enumerate(step.storages):
        if storage.producer < 0 or not storage.nbytes:
            continue
        produced = step.ops[storage.producer].window
        key: tuple[int, int, tuple[int, ...], tuple[int, ...]]
        if life.first_saver[s] >= 0:
            key = (produced, step.ops[life.first_saver[s]].window, tuple(sorted(droppers.get(s, ()))), ())
        elif s in holders:
            released = min(step.ops[kept[n][0].first].window for n in holders[s])
            key = (produced, released, (), tuple(sorted(holders[s])))
        else:
            continue
        joined[key] = joined.get(key, 0) + storage.nbytes
    return tuple(
        Saved(nbytes=nbytes, produced=p, released=r, droppable_by=d, held_by=h)
        for (p, r, d, h), nbytes in sorted(joined.items())
    )
