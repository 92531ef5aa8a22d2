"""The ILP. This docstring is the mathematics; each function below adds one family of rows.

Sets. Windows w = 0..W-1; step positions i = w in the forward, i = 2W-1-w in the backward. Chain candidates u with range
[a_u, b_u]; pinned candidates p; segments s; modes m in {R reshard, K keep, P replicate}.

Variables. x[u,m] in {0,1} unit u is chosen in mode m; y[u,v] >= 0 unit v follows unit u; r[s] in {0,1} segment s is
recomputed; o[u] in {0,1} the optimizer state of u's shard lives on the host; z[u] in {0,1} (forward and backward apart)
the gather of u is issued two units ahead instead of one; g1[u,v], g2[t,u,v] >= 0 the same, with who issues it;
S_i >= 0 stall before position i; A_i, B_i >= 0 communication queued (seconds of work) when the compute before i ends, and
when compute of i starts.

Boundaries (``add_boundaries``): units are a path through the windows.
    sum_{u: a_u = 0} X_u = 1,  sum_v y[v,u] = X_u (a_u > 0),  sum_v y[u,v] = X_u (b_u < W-1),   X_u = sum_m x[u,m]
    sum_m x[p,m] = 1;   r[s] <= sum of X_u over the candidates that list the module of s
    sum of r[s] over the segments that touch a window <= 1
Prefetch (``add_prefetch``), forward; the backward mirrors it with R alone in place of R + K:
    sum_t g1[t,u] + sum g2[.,.,u] = x[u,R] + x[u,K],   sum g2[.,.,u] = z[u],   g1[t,u] <= y[t,u],
    g2[t,u,v] <= y[t,u],  g2[t,u,v] <= y[u,v]
Queue (``time_rows``): one server for all collectives, work issued at the start of compute (I_i) or at its end (E_i):
    A_i >= B_{i-1} + I_{i-1} - p_{i-1},     B_i >= A_i + E_i - S_i
    B_i <= work issued before that is only due after i + E_i's reductions     at a unit's start
p_i is compute (with recomputation); I_i holds the gathers that position i issues, E_i reductions of the unit that just
ended and gathers that nothing hides. The last row says: all that is due is done, and only the latest reduction may still
be under way. It is exact, not a relaxation, because with at most two units of prefetch the work that may remain is always
the tail of the queue. No big-M: the only switched row is relaxed inside a unit, by the largest reduction.
Memory (``memory_rows``): sums of ``curve.py`` as rows, one for every window of the forward and backward, one for every
possible boundary, one for the optimizer step; kept units, saved activations and reduced gradients are running sums, so
that rows stay sparse.
Objective: sum_i p_i + S_i + optimizer time.

For integral x, r, o, z the optimum over the other variables is what ``simulate.py`` measures: the MIP's value of a plan is
its simulated step time, and the MIP's proven bound holds for every plan over these candidates. Units: ms and shares of
the memory limit, so that coefficients stay near one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from partitioner.planner.pins import allowed_modes
from partitioner.planner.problem import Candidate, Mode, PlanningProblem
from partitioner.planner.rows import Expr, Row, Rows, Variable

MS = 1e-6  # ns -> ms


@dataclass
class Prefetch:
    """Who issues the gathers of one direction. Keys are candidate indices in the order in which they run there."""

    one: dict[tuple[int, int], Variable] = field(default_factory=dict)  # (issuer, gathered)
    two: dict[tuple[int, int, int], Variable] = field(default_factory=dict)  # (issuer, between, gathered)
    switch: dict[int, Variable] = field(default_factory=dict)


@dataclass
class Model:
    """The variables by meaning, and the rows they stand in."""

    problem: PlanningProblem
    rows: Rows
    mode: dict[tuple[int, Mode], Variable] = field(default_factory=dict)
    edge: dict[tuple[int, int], Variable] = field(default_factory=dict)
    recompute: dict[int, Variable] = field(default_factory=dict)
    offload: dict[int, Variable] = field(default_factory=dict)
    forward: Prefetch = field(default_factory=Prefetch)
    backward: Prefetch = field(default_factory=Prefetch)
    memory_budget: list[Row] = field(default_factory=list)  # every row of the GPU memory limit
    host_budget: list[Row] = field(default_factory=list)

    def chain(self) -> Iterator[tuple[int, Candidate]]:
        return ((i, c) for i, c in enumerate(self.problem.candidates) if not c.pinned)

    def pinned(self) -> Iterator[tuple[int, Candidate]]:
        return ((i, c) for i, c in enumerate(self.problem.candidates) if c.pinned)

    def modes(self, index: int, *modes: Mode) -> list[Variable]:
        """The mode variables of a candidate that exist; all of them if no mode is named."""
        return [self.mode[index, m] for m in (modes or tuple(Mode)) if (index, m) in self.mode]

    def binaries(self) -> list[Variable]:
        """x, z, o and r: the choices. Every other variable follows from them."""
        return [
            *self.mode.values(), *self.forward.switch.values(), *self.backward.switch.values(),
            *self.offload.values(), *self.recompute.values(),
        ]  # fmt: skip

    def chosen(self, index: int, coefficient: float = 1.0) -> Expr:
        return Expr().add_all(self.modes(index), coefficient)

    def gathered(self, index: int, *, forward: bool) -> list[Variable]:
        """The modes in which a candidate gathers in a direction."""
        unit = self.problem.candidates[index]
        if not unit.gather_bytes or not (forward or unit.backward_gather):
            return []
        return self.modes(index, Mode.RESHARD, Mode.KEEP) if forward else self.modes(index, Mode.RESHARD)


def add_choices(model: Model) -> None:
    """x, r and o."""
    problem, rows = model.problem, model.rows
    for i, unit in enumerate(problem.candidates):
        for mode in allowed_modes(problem, unit):
            model.mode[i, mode] = rows.binary(f"x[{unit.name},{mode.value}]")
        if unit.pinned:
            rows.equal(model.chosen(i), 1.0, f"pinned[{unit.name}]")
        sharded = model.modes(i, Mode.RESHARD, Mode.KEEP)
        if unit.offload_ns and problem.host_limit_bytes and sharded:
            model.offload[i] = rows.binary(f"o[{unit.name}]")
            rows.at_most(Expr().add(model.offload[i]).add_all(sharded, -1.0), 0.0, f"offload_sharded[{unit.name}]")
    for s, segment in enumerate(problem.segments):
        model.recompute[s] = rows.binary(f"r[{segment.module}]")
        holders = Expr().add(model.recompute[s])
        for i, unit in enumerate(problem.candidates):
            if segment.module in unit.modules:
                holders.add_all(model.modes(i), -1.0)
        rows.at_most(holders, 0.0, f"segment_in_unit[{segment.module}]")
    for window in range(problem.num_windows):
        here = [
            r for s, r in model.recompute.items() if problem.segments[s].first <= window <= problem.segments[s].last
        ]
        if len(here) > 1:
            rows.at_most(Expr().add_all(here), 1.0, f"one_segment[{problem.windows[window].name}]")


def add_boundaries(model: Model) -> None:
    """Units as a path: y and its flow rows."""
    problem, rows = model.problem, model.rows
    starts: dict[int, list[int]] = {}
    for i, unit in model.chain():
        starts.setdefault(unit.first, []).append(i)
    source = Expr()
    for i in starts.get(0, []):
        source.plus(model.chosen(i))
    rows.equal(source, 1.0, "first_unit")
    into: dict[int, Expr] = {}
    for i, unit in model.chain():
        out = Expr()
        for j in starts.get(unit.last + 1, []):
            y = rows.continuous(f"y[{unit.name},{problem.candidates[j].name}]", upper=1.0)
            model.edge[i, j] = y
            out.add(y)
            into.setdefault(j, Expr()).add(y)
        if unit.last < problem.num_windows - 1:
            rows.equal(out.plus(model.chosen(i), -1.0), 0.0, f"leaves[{unit.name}]")
    for i, unit in model.chain():
        if unit.first > 0:
            rows.equal(into.get(i, Expr()).plus(model.chosen(i), -1.0), 0.0, f"enters[{unit.name}]")


def add_prefetch(model: Model, prefetch: Prefetch, *, forward: bool) -> None:
    """g1, g2 and z of one direction."""
    rows, units = model.rows, model.problem.candidates
    side = "f" if forward else "b"
    steps = {(i, j) if forward else (j, i): y for (i, j), y in model.edge.items()}  # in running order
    before: dict[int, list[int]] = {}
    for i, j in steps:
        before.setdefault(j, []).append(i)
    for u, unit in model.chain():
        gathers = model.gathered(u, forward=forward)
        if not gathers or u not in before:
            continue
        total = Expr().add_all(gathers, -1.0)
        two = Expr()
        for t in before[u]:
            one = rows.continuous(f"g1{side}[{units[t].name},{unit.name}]", upper=1.0)
            prefetch.one[t, u] = one
            total.add(one)
            rows.at_most(Expr().add(one).add(steps[t, u], -1.0), 0.0, f"g1{side}_follows[{units[t].name},{unit.name}]")
            for q in before.get(t, []) if model.problem.max_prefetch >= 2 else []:
                name = f"{units[q].name},{units[t].name},{unit.name}"
                g2 = rows.continuous(f"g2{side}[{name}]", upper=1.0)
                prefetch.two[q, t, u] = g2
                total.add(g2)
                two.add(g2)
                rows.at_most(Expr().add(g2).add(steps[q, t], -1.0), 0.0, f"g2{side}_first[{name}]")
                rows.at_most(Expr().add(g2).add(steps[t, u], -1.0), 0.0, f"g2{side}_second[{name}]")
        rows.equal(total, 0.0, f"gather{side}[{unit.name}]")
        if two.terms:
            prefetch.switch[u] = rows.binary(f"z{side}[{unit.name}]")
            rows.equal(two.add(prefetch.switch[u], -1.0), 0.0, f"ahead{side}[{unit.name}]")
