"""Rows of time: the queue of collectives against the compute stream (see the docstring of ``model.py``)."""

from __future__ import annotations

from partitioner.planner.model import MS, Model, Prefetch
from partitioner.planner.problem import Mode
from partitioner.planner.rows import Expr


class _Queue:
    """Work issued per step position; position i is window i in the forward and 2W-1-i in the backward."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.num_windows = model.problem.num_windows
        size = 2 * self.num_windows + 1
        self.issued = [Expr() for _ in range(size)]  # I_i: gathers issued when compute of i starts
        self.exposed = [Expr() for _ in range(size)]  # gathers issued when compute before i ends
        self.reductions = [Expr() for _ in range(size)]  # of the unit that ended before i
        self.later = [Expr() for _ in range(size)]  # issued before i, due after i
        self.starts = [Expr() for _ in range(size)]  # 1 if a unit starts at i

    def position(self, index: int, *, forward: bool, end: bool = False) -> int:
        """Where a candidate starts (or ends) in a direction."""
        unit = self.model.problem.candidates[index]
        if forward:
            return unit.last if end else unit.first
        return 2 * self.num_windows - 1 - (unit.first if end else unit.last)

    def add_prefetched(self, prefetch: Prefetch, *, forward: bool) -> None:
        units = self.model.problem.candidates
        flows = [((t, u), v) for (t, u), v in prefetch.one.items()]
        flows += [((q, u), v) for (q, _, u), v in prefetch.two.items()]
        for (issuer, gathered), flow in flows:
            time = units[gathered].all_gather_ns * MS
            start, due = self.position(issuer, forward=forward), self.position(gathered, forward=forward)
            self.issued[start].add(flow, time)
            for i in range(start + 1, due):
                self.later[i].add(flow, time)

    def add_exposed(self) -> None:
        """Gathers with nothing before them, and those of pinned units."""
        model, last = self.model, self.num_windows - 1
        for i, unit in model.chain():
            time = unit.all_gather_ns * MS
            if unit.first == 0:
                self.exposed[0].add_all(model.gathered(i, forward=True), time)
            if unit.last == last:
                self.exposed[last + 1].add_all(model.gathered(i, forward=False), time)
        for i, unit in model.pinned():
            time = unit.all_gather_ns * MS
            if not unit.gather_bytes:
                continue
            for n, (first, _) in enumerate(unit.calls):
                modes = (Mode.RESHARD, Mode.KEEP) if n == 0 else (Mode.RESHARD,)
                self.exposed[first].add_all(model.modes(i, *modes), time)
            for n, (_, end) in enumerate(unit.calls if unit.backward_gather else ()):
                modes = (Mode.RESHARD,) if n == len(unit.calls) - 1 else (Mode.RESHARD, Mode.KEEP)
                self.exposed[2 * self.num_windows - 1 - end].add_all(model.modes(i, *modes), time)

    def add_reductions(self) -> None:
        for i, unit in enumerate(self.model.problem.candidates):
            if unit.trainable:
                row = self.reductions[2 * self.num_windows - unit.first]
                row.add_all(self.model.modes(i, Mode.RESHARD, Mode.KEEP), unit.reduce_scatter_ns * MS)
                row.add_all(self.model.modes(i, Mode.REPLICATE), unit.all_reduce_ns * MS)

    def add_starts(self) -> None:
        for i, _ in self.model.chain():
            for forward in (True, False):
                self.starts[self.position(i, forward=forward)].plus(self.model.chosen(i))


def _compute(model: Model) -> list[Expr]:
    """p_i."""
    problem = model.problem
    last = 2 * problem.num_windows - 1
    compute = [Expr(w.forward_ns * MS) for w in problem.windows]
    compute += [Expr(w.backward_ns * MS) for w in reversed(problem.windows)]
    for s, segment in enumerate(problem.segments):
        compute[last - segment.last].add(model.recompute[s], segment.recompute_ns * MS)
    return compute


def _largest_reduction(model: Model) -> float:
    """Most work that the reductions of one boundary can be, in ms."""
    units = model.problem.candidates
    chain = max((max(c.reduce_scatter_ns, c.all_reduce_ns) for c in units if not c.pinned), default=0)
    return MS * (chain + sum(max(c.reduce_scatter_ns, c.all_reduce_ns) for c in units if c.pinned))


def time_rows(model: Model) -> Expr:
    """Add the queue rows; return the objective in ms."""
    rows, problem = model.rows, model.problem
    queue = _Queue(model)
    queue.add_prefetched(model.forward, forward=True)
    queue.add_prefetched(model.backward, forward=False)
    queue.add_exposed()
    queue.add_reductions()
    queue.add_starts()
    compute = _compute(model)
    slack = _largest_reduction(model)
    gather = MS * max((c.all_gather_ns for c in problem.candidates), default=0)
    objective = Expr()
    backlog: Expr = Expr()  # B_{i-1} + I_{i-1} - p_{i-1}
    for i, work in enumerate(compute):
        backward = i >= problem.num_windows
        arrive = rows.continuous(f"A[{i}]")
        start = rows.continuous(f"B[{i}]")
        stall = rows.continuous(f"S[{i}]")
        rows.at_most(Expr().plus(backlog).add(arrive, -1.0), 0.0, f"arrive[{i}]")
        row = Expr().add(arrive).plus(queue.reductions[i]).plus(queue.exposed[i]).add(stall, -1.0).add(start, -1.0)
        rows.at_most(row, 0.0, f"start[{i}]")
        inside = slack if backward else 0.0
        due = Expr(-inside).add(start).plus(queue.later[i], -1.0).plus(queue.reductions[i], -1.0)
        rows.at_most(due.plus(queue.starts[i], inside), 0.0, f"due[{i}]")
        for variable in queue.exposed[i].terms:  # nothing may be queued behind a gather that is needed now
            most = 2 * gather + slack
            rows.at_most(Expr(-most).add(start).add(variable, most), 0.0, f"exposed[{i}]")
        objective.add(stall).plus(work)
        backlog = Expr().add(start).plus(queue.issued[i]).plus(work, -1.0)
    drain = rows.continuous("S[optimizer]")
    left = rows.continuous("A[optimizer]")
    rows.at_most(backlog.add(left, -1.0), 0.0, "arrive[optimizer]")
    rows.at_most(Expr().add(left).plus(queue.reductions[-1]).add(drain, -1.0), 0.0, "drained")
    objective.add(drain)
    for i, unit in enumerate(problem.candidates):
        objective.add_all(model.modes(i, Mode.RESHARD, Mode.KEEP), unit.optimizer_shard_ns * MS)
        objective.add_all(model.modes(i, Mode.REPLICATE), unit.optimizer_full_ns * MS)
        if i in model.offload:
            objective.add(model.offload[i], unit.offload_ns * MS)
    return objective
