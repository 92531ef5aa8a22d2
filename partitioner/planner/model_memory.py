"""Rows of memory: the sums of ``curve.py``, linear in the choices (see the docstring of ``model.py``)."""

from __future__ import annotations

from partitioner.planner.curve import bare_windows
from partitioner.planner.model import Model
from partitioner.planner.problem import Candidate, Mode, Saved
from partitioner.planner.rows import Expr, Variable

LIMIT = 64.0  # the memory limit in row units: keeps coefficients near one


class _Memory:
    """Partial sums that many rows share, as variables."""

    def __init__(self, model: Model) -> None:
        self.model, self.rows, self.problem = model, model.rows, model.problem
        self.scale = LIMIT / model.problem.memory_limit_bytes
        self.num_windows = model.problem.num_windows
        self.static = self.define("static", self.static_sum())
        self.kept = self.running_kept()
        self.reduced = self.running_reduced()
        self.weights = [self.weight(i, r) for i, r in enumerate(self.problem.saved)]
        self.saved = self.running_saved()

    def limit(self, row: Expr, name: str) -> None:
        """A point of the step at which the GPU memory limit must hold."""
        self.model.memory_budget.append(self.rows.at_most(row, LIMIT, f"memory[{name}]"))

    def define(self, name: str, value: Expr) -> Variable:
        """A variable equal to an expression of bytes (scaled)."""
        variable = self.rows.continuous(name)
        self.rows.equal(Expr().plus(value).add(variable, -1.0), 0.0, f"def[{name}]")
        return variable

    def bytes_of(self, row: Expr, index: int, nbytes: int, *modes: Mode) -> None:
        row.add_all(self.model.modes(index, *modes), nbytes * self.scale)

    def static_sum(self) -> Expr:
        row = Expr(self.problem.constant_bytes * self.scale)
        for i, unit in enumerate(self.problem.candidates):
            self.bytes_of(row, i, unit.shard_bytes + unit.optimizer_shard_bytes, Mode.RESHARD, Mode.KEEP)
            self.bytes_of(row, i, unit.full_bytes + unit.optimizer_full_bytes, Mode.REPLICATE)
            if i in self.model.offload:
                row.add(self.model.offload[i], -unit.optimizer_shard_bytes * self.scale)
        return row

    def running_kept(self) -> list[Expr]:
        """kept[w]: chain units kept from the forward whose windows lie before w."""
        ends: dict[int, list[int]] = {}
        for i, unit in self.model.chain():
            ends.setdefault(unit.last, []).append(i)
        kept = [Expr()]
        for w in range(1, self.num_windows):
            row = Expr().plus(kept[-1])
            for i in ends.get(w - 1, []):
                self.bytes_of(row, i, self.problem.candidates[i].gather_bytes, Mode.KEEP)
            kept.append(Expr().add(self.define(f"kept[{w}]", row)) if row.terms else Expr())
        return kept

    def reduced_bytes(self, row: Expr, index: int, unit: Candidate) -> None:
        if unit.trainable:
            self.bytes_of(row, index, unit.grad_shard_bytes, Mode.RESHARD, Mode.KEEP)
            self.bytes_of(row, index, unit.grad_full_bytes, Mode.REPLICATE)

    def running_reduced(self) -> list[Expr]:
        """reduced[w]: reduced gradients of the units that start after w; the last entry (index -1) is all of them."""
        firsts: dict[int, list[int]] = {}
        for i, unit in enumerate(self.problem.candidates):
            firsts.setdefault(unit.first, []).append(i)
        reduced = [Expr() for _ in range(self.num_windows + 1)]
        for w in range(self.num_windows - 2, -2, -1):
            row = Expr().plus(reduced[w + 1])
            for i in firsts.get(w + 1, []):
                self.reduced_bytes(row, i, self.problem.candidates[i])
            reduced[w] = Expr().add(self.define(f"reduced[{w}]", row)) if row.terms else Expr()
        return reduced

    def weight(self, index: int, record: Saved) -> Expr:
        """1 while the record is held from forward to backward."""
        if not record.held_by:
            row = Expr(1.0)
            for s in record.droppable_by:
                row.add(self.model.recompute[s], -1.0)
            return row
        if len(record.held_by) == 1:
            return Expr().add(self.model.recompute[record.held_by[0]])
        held = self.rows.continuous(f"held[{index}]", upper=1.0)
        for s in record.held_by:
            self.rows.at_most(Expr().add(self.model.recompute[s]).add(held, -1.0), 0.0, f"held[{index},{s}]")
        return Expr().add(held)

    def running_saved(self) -> list[Expr]:
        """saved[w]: records made before w that are still held when the forward reaches w."""
        made: dict[int, list[int]] = {}
        for i, record in enumerate(self.problem.saved):
            made.setdefault(record.produced, []).append(i)
        saved = [Expr()]
        for w in range(1, self.num_windows):
            row = Expr().plus(saved[-1])
            for i in made.get(w - 1, []):
                row.plus(self.weights[i], self.problem.saved[i].nbytes * self.scale)
            saved.append(Expr().add(self.define(f"saved[{w}]", row)) if row.terms or row.constant else Expr())
        return saved

    def saved_backward(self) -> list[Expr]:
        """The same for the backward: less what nobody needs any more, plus what a segment has made again."""
        rows = [Expr().plus(e) for e in self.saved]
        for record, weight in zip(self.problem.saved, self.weights, strict=True):
            size = record.nbytes * self.scale
            for w in range(record.produced + 1, max(record.released, record.produced + 1)):
                rows[w].plus(weight, -size)
            from_window = max(record.released, record.produced + 1)
            for s in record.droppable_by:
                for w in range(from_window, self.problem.segments[s].last + 1):
                    rows[w].add(self.model.recompute[s], size)
        return rows

    def local(self, window: int, *, forward: bool) -> Expr:
        entry = self.problem.windows[window]
        base = entry.forward_local_bytes if forward else entry.backward_local_bytes
        row = Expr(base * self.scale)
        for s, segment in enumerate(self.problem.segments):
            if segment.first <= window <= segment.last:
                own = segment.forward_local_bytes if forward else segment.backward_local_bytes
                row.add(self.model.recompute[s], (own[window - segment.first] - base) * self.scale)
        return row


def _prefetched(memory: _Memory, *, forward: bool) -> list[Expr]:
    """Gathers in flight per window."""
    model, units = memory.model, memory.problem.candidates
    rows = [Expr() for _ in range(memory.num_windows)]

    def hold(flow: Variable, gathered: int, during: int) -> None:
        for w in range(units[during].first, units[during].last + 1):
            rows[w].add(flow, units[gathered].gather_bytes * memory.scale)

    prefetch = model.forward if forward else model.backward
    if not forward:
        for (issuer, gathered), flow in prefetch.one.items():
            hold(flow, gathered, issuer)
    explicit: dict[tuple[int, int], Expr] = {}
    for (issuer, between, gathered), flow in prefetch.two.items():
        hold(flow, gathered, issuer)
        hold(flow, gathered, between)
        explicit.setdefault((issuer, between), Expr()).add(flow)
    for (issuer, between), flows in explicit.items() if forward else ():
        # an explicit list also issues the unit in between, unless that one is already two ahead or gathers nothing
        along = model.rows.continuous(f"along[{units[issuer].name},{units[between].name}]")
        row = Expr(-1.0).plus(flows).add_all(model.gathered(between, forward=True)).add(along, -1.0)
        if between in prefetch.switch:
            row.add(prefetch.switch[between], -1.0)
        model.rows.at_most(row, 0.0, f"along[{units[issuer].name},{units[between].name}]")
        hold(along, between, issuer)
    return rows


def _pinned(memory: _Memory, window: int, *, forward: bool, bare: frozenset[int]) -> Expr:
    row = Expr()
    for i, unit in memory.model.pinned():
        if any(first <= window <= last for first, last in unit.calls):
            memory.bytes_of(row, i, unit.gather_bytes)
        elif window >= unit.first if forward else window <= unit.last:
            memory.bytes_of(row, i, unit.gather_bytes, Mode.KEEP)
        if forward and window in bare:
            starts = [first for first, _ in unit.calls]
            memory.bytes_of(row, i, unit.gather_bytes * (starts[0] == window), Mode.KEEP)
            memory.bytes_of(row, i, unit.gather_bytes * starts.count(window), Mode.RESHARD)
        if not forward and unit.first <= window <= unit.last:
            memory.bytes_of(row, i, unit.grad_bytes)
    return row


def _forward_rows(memory: _Memory, bare: frozenset[int]) -> None:
    prefetched = _prefetched(memory, forward=True)
    own = [Expr() for _ in range(memory.num_windows)]
    for i, unit in memory.model.chain():
        for w in range(unit.first, unit.last + 1):
            memory.bytes_of(own[w], i, 2 * unit.gather_bytes, Mode.RESHARD, Mode.KEEP)
            memory.bytes_of(own[w], i, unit.gather_bytes, Mode.REPLICATE)
    for w in range(memory.num_windows):
        row = Expr().add(memory.static).plus(memory.kept[w]).plus(memory.saved[w]).plus(own[w]).plus(prefetched[w])
        row.plus(memory.local(w, forward=True)).plus(_pinned(memory, w, forward=True, bare=bare))
        memory.limit(row, f"forward {memory.problem.windows[w].name}")


def _backward_rows(memory: _Memory, bare: frozenset[int]) -> None:
    model, units = memory.model, memory.problem.candidates
    prefetched = _prefetched(memory, forward=False)
    saved = memory.saved_backward()
    own = [Expr() for _ in range(memory.num_windows)]
    boundary = [Expr() for _ in range(memory.num_windows)]
    for i, unit in model.chain():
        for w in range(unit.first, unit.last + 1):
            memory.bytes_of(own[w], i, unit.gather_bytes + unit.grad_bytes)
        memory.bytes_of(boundary[unit.first], i, unit.grad_bytes + unit.reduce_bytes)
        memory.reduced_bytes(boundary[unit.first], i, unit)
    for i, unit in model.pinned():
        memory.bytes_of(boundary[unit.first], i, unit.reduce_bytes)
    for (i, j), y in model.edge.items():
        for w in range(units[i].first, units[i].last + 1):
            own[w].add(y, units[j].reduce_bytes * memory.scale)
    for w in range(memory.num_windows):
        shared = Expr().add(memory.static).plus(memory.kept[w]).plus(saved[w]).plus(prefetched[w])
        shared.plus(memory.reduced[w]).plus(_pinned(memory, w, forward=False, bare=bare))
        name = memory.problem.windows[w].name
        row = Expr().plus(shared).plus(own[w]).plus(memory.local(w, forward=False))
        memory.limit(row, f"backward {name}")
        memory.limit(shared.plus(boundary[w]), f"reduction {name}")


def _optimizer_rows(memory: _Memory) -> None:
    model, units = memory.model, memory.problem.candidates
    row = Expr().add(memory.static).plus(memory.reduced[-1])
    if model.offload:
        moved = memory.rows.continuous("moved")
        host = Expr()
        for i, offload in model.offload.items():
            size = units[i].optimizer_shard_bytes
            memory.rows.at_most(
                Expr().add(offload, size * memory.scale).add(moved, -1.0), 0.0, f"moved[{units[i].name}]"
            )
            host.add(offload, size / memory.problem.host_limit_bytes)
        model.host_budget.append(memory.rows.at_most(host, 1.0, "host memory"))
        row.add(moved)
    memory.limit(row, "optimizer step")


def memory_rows(model: Model) -> None:
    """Add every row of the memory limit."""
    memory = _Memory(model)
    bare = bare_windows(model.problem)
    _forward_rows(memory, bare)
    _backward_rows(memory, bare)
    _optimizer_rows(memory)
