"""Random tiny planning problems, and every plan of one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from partitioner.planner.check import fits, violations
from partitioner.planner.model import allowed_modes
from partitioner.planner.problem import (
    Candidate,
    Decisions,
    Mode,
    PlanningProblem,
    Saved,
    Segment,
    UnitChoice,
    Window,
)
from partitioner.planner.simulate import simulate


def candidate(rng: random.Random, name: str, first: int, last: int, size: int, **changes: object) -> Candidate:
    """A unit of ``size`` elements on 4 ranks, fp32 at rest and bf16 gathered, with communication of the right order."""
    trainable = rng.random() < 0.85
    gather = size * 1_000_000 // 8 + 30_000 if size else 0
    fields: dict[str, object] = {
        "name": name,
        "modules": (name,),
        "parameters": (f"{name}.weight",) if size else (),
        "calls": ((first, last),),
        "pinned": False,
        "trainable": trainable and size > 0,
        "backward_gather": rng.random() < 0.9,
        "shard_bytes": size,
        "full_bytes": 4 * size,
        "gather_bytes": 2 * size,
        "grad_bytes": 2 * size * trainable,
        "reduce_bytes": 4 * size * trainable,
        "grad_shard_bytes": size * trainable,
        "grad_full_bytes": 4 * size * trainable,
        "optimizer_shard_bytes": 2 * size * trainable,
        "optimizer_full_bytes": 8 * size * trainable,
        "all_gather_ns": gather,
        "reduce_scatter_ns": 2 * gather * trainable,
        "all_reduce_ns": 3 * gather * trainable,
        "optimizer_shard_ns": size * 2_000 * trainable,
        "optimizer_full_ns": size * 8_000 * trainable,
        "offload_ns": size * 90_000 * trainable,
    }
    return Candidate(**(fields | changes))  # type: ignore[arg-type]


def random_problem(
    seed: int,
    *,
    windows: int = 3,
    offload: bool = True,
    recompute: bool = True,
    pinned: bool = True,
    merges: bool = True,
) -> PlanningProblem:
    """A problem whose memory limit lies between what the leanest and the richest plans need."""
    rng = random.Random(seed)
    sizes = [rng.choice([2, 3, 5, 8, 13]) for _ in range(windows)]
    pin = pinned and rng.random() < 0.4
    if pin and rng.random() < 0.5:
        sizes[0] = 0  # a window of the pinned unit alone
    table = [candidate(rng, f"m{w}", w, w, sizes[w]) for w in range(windows)]
    if merges:
        for first, last in itertools.combinations(range(windows), 2):
            if last - first == 1 or rng.random() < 0.3:
                inner = table[first : last + 1]
                joined = candidate(rng, f"m{first}-{last}", first, last, sum(sizes[first : last + 1]))
                trainable = any(c.trainable for c in inner)
                table.append(
                    replace(
                        joined,
                        modules=tuple(c.name for c in inner),
                        parameters=tuple(p for c in inner for p in c.parameters),
                        trainable=trainable,
                        **{
                            f: sum(getattr(c, f) for c in inner)
                            for f in (
                                "grad_bytes",
                                "reduce_bytes",
                                "grad_shard_bytes",
                                "grad_full_bytes",
                                "optimizer_shard_bytes",
                                "optimizer_full_bytes",
                                "reduce_scatter_ns",
                                "all_reduce_ns",
                                "optimizer_shard_ns",
                                "optimizer_full_ns",
                                "offload_ns",
                            )
                        },
                    )
                )
    if pin:
        calls = ((0, 0), (windows - 1, windows - 1)) if rng.random() < 0.5 else ((0, windows - 1),)
        table.append(candidate(rng, "tied", 0, 0, rng.choice([2, 5]), pinned=True, calls=calls))
    segments, saved = [], []
    for w in range(windows):
        kept = rng.choice([4, 10, 20, 40])
        if recompute:
            segments.append(
                Segment(
                    module=f"m{w}",
                    first=w,
                    last=w,
                    recompute_ns=rng.choice([150_000, 400_000]),
                    forward_local_bytes=(kept // 2,),
                    backward_local_bytes=(kept + 6,),
                )
            )
            saved.append(Saved(nbytes=kept, produced=w, released=w, droppable_by=(w,)))
            if rng.random() < 0.5:
                saved.append(Saved(nbytes=3, produced=max(w - 1, 0), released=w, held_by=(w,)))
        if w + 1 < windows:
            saved.append(Saved(nbytes=rng.choice([2, 6]), produced=w, released=w + 1))
    problem = PlanningProblem(
        windows=tuple(
            Window(
                name=f"m{w}",
                forward_ns=rng.choice([200_000, 900_000]),
                backward_ns=rng.choice([400_000, 1_800_000]),
                forward_local_bytes=rng.choice([10, 40]),
                backward_local_bytes=rng.choice([20, 60]),
            )
            for w in range(windows)
        ),
        segments=tuple(segments),
        saved=tuple(saved),
        candidates=tuple(table),
        num_gpus=4,
        memory_limit_bytes=10**9,
        constant_bytes=rng.choice([0, 7]),
        host_limit_bytes=rng.choice([20, 1000]) if offload else 0,
    )
    if not offload:
        problem = replace(problem, candidates=tuple(replace(c, offload_ns=0) for c in problem.candidates))
    peaks = sorted(simulate(problem, d).peak_bytes for d in sample(problem, rng, 60))
    return replace(
        problem, memory_limit_bytes=rng.choice([peaks[0], peaks[len(peaks) // 8], peaks[len(peaks) // 2], peaks[-1]])
    )


def tilings(problem: PlanningProblem) -> Iterator[tuple[int, ...]]:
    """Every choice of chain candidates that covers all windows."""

    def extend(at: int, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if at == problem.num_windows:
            yield chosen
            return
        for i, c in enumerate(problem.candidates):
            if not c.pinned and c.first == at:
                yield from extend(c.last + 1, (*chosen, i))

    yield from extend(0, ())


def _unit_choices(problem: PlanningProblem, index: int, k: int | None, last: int) -> list[UnitChoice]:
    unit = problem.candidates[index]
    choices = []
    for mode in allowed_modes(problem, unit):
        gathers = unit.gather_bytes > 0 and mode is not Mode.REPLICATE
        again = gathers and mode is Mode.RESHARD and unit.backward_gather
        ahead = [1, 2] if gathers and k is not None and k >= 2 else [1]
        behind = [1, 2] if again and k is not None and k <= last - 2 else [1]
        offloads = (
            [False, True] if unit.offload_ns and mode is not Mode.REPLICATE and problem.host_limit_bytes else [False]
        )
        choices += [
            UnitChoice(candidate=index, mode=mode, prefetch_forward=f, prefetch_backward=b, offload_optimizer=o)
            for f in ahead
            for b in behind
            for o in offloads
        ]
    return choices


def every_plan(problem: PlanningProblem) -> Iterator[Decisions]:
    """All legal plans, whatever they need."""
    pinned = [i for i, c in enumerate(problem.candidates) if c.pinned]
    for tiling in tilings(problem):
        parts = [_unit_choices(problem, i, k, len(tiling) - 1) for k, i in enumerate(tiling)]
        parts += [_unit_choices(problem, i, None, 0) for i in pinned]
        modules = {m for i in (*tiling, *pinned) for m in problem.candidates[i].modules}
        free = [s for s, segment in enumerate(problem.segments) if segment.module in modules]
        for units in itertools.product(*parts):
            for size in range(len(free) + 1):
                for recompute in itertools.combinations(free, size):
                    yield Decisions(units=units, recompute=recompute)


def sample(problem: PlanningProblem, rng: random.Random, count: int) -> list[Decisions]:
    """Random legal plans."""
    plans = []
    all_tilings = list(tilings(problem))
    pinned = [i for i, c in enumerate(problem.candidates) if c.pinned]
    for _ in range(count):
        tiling = rng.choice(all_tilings)
        units = [rng.choice(_unit_choices(problem, i, k, len(tiling) - 1)) for k, i in enumerate(tiling)]
        units += [rng.choice(_unit_choices(problem, i, None, 0)) for i in pinned]
        modules = {m for u in units for m in problem.candidates[u.candidate].modules}
        recompute = tuple(s for s, g in enumerate(problem.segments) if g.module in modules and rng.random() < 0.5)
        plans.append(Decisions(units=tuple(units), recompute=recompute))
        assert not violations(problem, plans[-1])
    return plans


def brute_force(problem: PlanningProblem) -> int | None:
    """The smallest step time of any plan that fits, in ns; None if none fits."""
    best = None
    for decisions in every_plan(problem):
        simulation = simulate(problem, decisions)
        if fits(problem, simulation) and (best is None or simulation.step_ns < best):
            best = simulation.step_ns
    return best
