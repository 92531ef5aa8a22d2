"""Replay a plan: the step as FSDP2 runs it, in time and in memory.

[Note: schedule] What is replayed is stock eager FSDP2 (torch 2.13) on a device with streams:

* The chosen chain units are *entries*; they run in order in the forward and in reverse in the backward. Compute is one
  stream. All collectives of the shard group share one communicator and therefore run one after the other, in the order
  of issue (NCCL serialises the kernels of one communicator).
* Forward: the gather of an entry is issued when the entry ``prefetch_forward`` places before it starts to compute. The
  first entry has nothing to hide behind. Distance 1 is FSDP2's implicit prefetch: its buffer is allocated only when the
  entry itself begins (the host runs ahead of the device, the allocator counts in host order). A larger distance is an
  explicit prefetch list and holds its buffer, and those of the entries in between, from the issue on.
* An entry needs its own parameters once gathered and once flat (the gather's output is freed by the next copy-out).
* Backward: the gather of a resharded entry is issued when the entry ``prefetch_backward`` places later in the model
  starts its backward. After an entry's backward its gradients are copied into a reduction buffer and reduced; compute
  first waits for the reduction of the entry before (FSDP2 keeps one reduction buffer in flight).
* A pinned unit gathers at the start of each call, exposed; kept units gather once. It reduces once, at the end.
* The optimizer starts when every reduction is done. Offloaded optimizer state is brought to the device, used and taken
  back unit by unit; that traffic is not overlapped.

The MIP in ``model.py`` states the same schedule as linear rows; ``tests/planner`` holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from partitioner.planner.chosen import Chosen, recompute_at, split_choices
from partitioner.planner.curve import MemoryRow, memory_curve
from partitioner.planner.problem import Decisions, Mode, PlanningProblem


@dataclass(frozen=True, kw_only=True)
class Event:
    """One span of a stream. ``unit`` names what is computed or moved."""

    stream: str  # "compute", "communication", "host"
    kind: str  # "forward", "backward", "all_gather", "reduce_scatter", "all_reduce", "optimizer", "offload"
    unit: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a plan costs."""

    step_ns: int
    compute_ns: int  # forward, backward, recomputation
    recompute_ns: int
    optimizer_ns: int  # optimizer and its offload traffic
    comm_ns: int
    memory: tuple[MemoryRow, ...]
    host_bytes: int  # per rank
    events: tuple[Event, ...] = field(repr=False, default=())

    @property
    def exposed_comm_ns(self) -> int:
        """Time in which compute waits for communication."""
        return self.step_ns - self.compute_ns - self.optimizer_ns

    @property
    def peak(self) -> MemoryRow:
        return max(self.memory, key=lambda row: row.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes


class _Clock:
    """The compute stream and the one communication queue."""

    def __init__(self) -> None:
        self.now = 0  # compute stream
        self.queue_free = 0  # when the communication stream has done all that was issued
        self.events: list[Event] = []
        self.comm_ns = 0

    def compute(self, kind: str, unit: str, duration: int) -> None:
        if duration:
            self.events.append(
                Event(stream="compute", kind=kind, unit=unit, start_ns=self.now, end_ns=self.now + duration)
            )
        self.now += duration

    def issue(self, kind: str, unit: str, duration: int) -> int:
        """Queue a collective now; return when it ends."""
        if not duration:
            return self.queue_free if self.queue_free > self.now else self.now
        start = max(self.now, self.queue_free)
        self.queue_free = start + duration
        self.comm_ns += duration
        self.events.append(Event(stream="communication", kind=kind, unit=unit, start_ns=start, end_ns=self.queue_free))
        return self.queue_free

    def wait(self, until: int) -> None:
        self.now = max(self.now, until)


def _gather_pinned(pinned: list[Chosen], window: int, clock: _Clock, *, forward: bool) -> None:
    """Calls of pinned units that begin here gather now and wait; kept units gather once in the forward, and once for
    every backward call but the first to run."""
    for unit in pinned:
        if not unit.gathers or not (forward or unit.unit.backward_gather):
            continue
        if forward:
            points = [first for first, _ in unit.unit.calls][: 1 if unit.kept else None]
        else:
            points = [end for _, end in unit.unit.calls][: -1 if unit.kept else None]
        if window in points:
            clock.wait(clock.issue("all_gather", unit.unit.name, unit.unit.all_gather_ns))


class _Gathers:
    """Prefetched gathers of one direction: who issues them, and when they are there."""

    def __init__(self, entries: list[Chosen], clock: _Clock, *, forward: bool) -> None:
        self.entries, self.clock = entries, clock
        self.ready: dict[int, int] = {}
        self.due: dict[int, list[int]] = {}
        last = len(entries) - 1
        for k in range(1, last + 1) if forward else range(last - 1, -1, -1):
            entry = entries[k]
            if forward and entry.gathers:
                self.due.setdefault(max(k - entry.choice.prefetch_forward, 0), []).append(k)
            elif not forward and entry.gathers_in_backward:
                self.due.setdefault(min(k + entry.choice.prefetch_backward, last), []).append(k)

    def issue(self, k: int) -> None:
        unit = self.entries[k].unit
        self.ready[k] = self.clock.issue("all_gather", unit.name, unit.all_gather_ns)

    def start(self, k: int) -> None:
        """Entry ``k`` begins: wait for its own gather, then issue those that are due."""
        self.clock.wait(self.ready.pop(k, 0))
        for target in self.due.get(k, ()):
            self.issue(target)


def _forward(problem: PlanningProblem, entries: list[Chosen], pinned: list[Chosen], clock: _Clock) -> None:
    gathers = _Gathers(entries, clock, forward=True)
    for k, entry in enumerate(entries):
        for window in range(entry.unit.first, entry.unit.last + 1):
            _gather_pinned(pinned, window, clock, forward=True)
            if window == entry.unit.first:
                if k == 0 and entry.gathers:
                    gathers.issue(k)
                gathers.start(k)
            clock.compute("forward", problem.windows[window].name, problem.windows[window].forward_ns)


def _backward(
    problem: PlanningProblem, entries: list[Chosen], pinned: list[Chosen], extra_ns: list[int], clock: _Clock
) -> None:
    last = len(entries) - 1
    gathers = _Gathers(entries, clock, forward=False)
    reduced = 0  # when the reductions issued so far are done
    for k in range(last, -1, -1):
        entry = entries[k]
        for window in range(entry.unit.last, entry.unit.first - 1, -1):
            _gather_pinned(pinned, window, clock, forward=False)
            if window == entry.unit.last:
                if k == last and entry.gathers_in_backward:
                    gathers.issue(k)
                gathers.start(k)
            duration = problem.windows[window].backward_ns + extra_ns[window]
            clock.compute("backward", problem.windows[window].name, duration)
            ended = [u for u in pinned if u.unit.first == window]
            if window == entry.unit.first:
                clock.wait(reduced)  # one reduction buffer in flight
                ended.insert(0, entry)
            for unit in ended:
                if unit.reduce_ns:
                    kind = "all_reduce" if unit.choice.mode is Mode.REPLICATE else "reduce_scatter"
                    reduced = clock.issue(kind, unit.unit.name, unit.reduce_ns)
    clock.wait(reduced)


def _optimizer(chosen: list[Chosen], clock: _Clock) -> int:
    start = clock.now
    for unit in chosen:
        replicated = unit.choice.mode is Mode.REPLICATE
        if unit.choice.offload_optimizer and unit.unit.offload_ns:
            clock.events.append(
                Event(
                    stream="host",
                    kind="offload",
                    unit=unit.unit.name,
                    start_ns=clock.now,
                    end_ns=clock.now + unit.unit.offload_ns,
                )
            )
            clock.now += unit.unit.offload_ns
        clock.compute(
            "optimizer", unit.unit.name, unit.unit.optimizer_full_ns if replicated else unit.unit.optimizer_shard_ns
        )
    return clock.now - start


def _run(problem: PlanningProblem, decisions: Decisions) -> tuple[_Clock, int, int]:
    """(clock at the end of the step, recomputation, optimizer), times in ns."""
    entries, pinned = split_choices(problem, decisions)
    extra_ns = recompute_at(problem, decisions)
    clock = _Clock()
    _forward(problem, entries, pinned, clock)
    _backward(problem, entries, pinned, extra_ns, clock)
    return clock, sum(extra_ns), _optimizer(entries + pinned, clock)


def step_ns(problem: PlanningProblem, decisions: Decisions) -> int:
    """The time of a plan alone: a third of the work of ``simulate``, for searches."""
    return _run(problem, decisions)[0].now


def simulate(problem: PlanningProblem, decisions: Decisions) -> Simulation:
    """Time and memory of a plan that ``check.py`` accepts. Pure; integers in, integers out."""
    clock, recompute_ns, optimizer_ns = _run(problem, decisions)
    offloaded = (problem.candidates[c.candidate] for c in decisions.units if c.offload_optimizer)
    return Simulation(
        step_ns=clock.now,
        compute_ns=sum(w.forward_ns + w.backward_ns for w in problem.windows) + recompute_ns,
        recompute_ns=recompute_ns,
        optimizer_ns=optimizer_ns,
        comm_ns=clock.comm_ns,
        memory=memory_curve(problem, decisions),
        host_bytes=sum(unit.optimizer_shard_bytes for unit in offloaded),
        events=tuple(clock.events),
    )
