"""How long the exact solve takes on transformers of a given depth.

Builds the planning problem of a decoder-only transformer from its dimensions alone (no model, no graph), solves it, and
prints one row for each memory budget:

    python benchmarks/solver.py --blocks 80
    python benchmarks/solver.py --blocks 32 --hidden 4096 --ffn 14336 --gpus 8 --gap 0.001

Defaults are the dimensions of a 70B model (hidden 8192, ffn 28672, vocabulary 128256, grouped-query attention with 8
key/value heads of 128) trained in bf16 with fp32 parameters at rest and AdamW on 64 GPUs of 80 GiB in nodes of 8. Times
are a plain roofline (assumed 550 TFLOP/s and 2.6 TB/s reached, 25 GB/s over the host link, a ring that reaches
``--bandwidth``), which is enough to put compute and communication into the right proportion.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from partitioner.planner.baselines.wrapping import Baseline
from partitioner.planner.decide import Decision, NothingFits, decide
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

GIB = 2**30
FLOP_PER_S = 550e12
MEMORY_BYTES_PER_S = 2.6e12
HOST_BYTES_PER_S = 25e9
LATENCY_NS = 60_000  # of one collective
COMPUTE_BYTES, REST_BYTES = 2, 4  # bf16 gathered, fp32 at rest; reductions in fp32
HEAD_DIM, KV_HEADS = 128, 8
MERGES = (2, 4)


@dataclass(frozen=True)
class Shape:
    """What the tables depend on."""

    blocks: int
    hidden: int
    ffn: int
    vocab: int
    sequence: int  # tokens per rank and micro-batch
    gpus: int
    bandwidth: float  # bytes/s that a ring over all ranks reaches

    @property
    def key_value(self) -> int:
        return KV_HEADS * HEAD_DIM

    @property
    def attention_numel(self) -> int:
        return 2 * self.hidden * (self.hidden + self.key_value) + self.hidden

    @property
    def ffn_numel(self) -> int:
        return 3 * self.hidden * self.ffn + self.hidden

    @property
    def activation_bytes(self) -> int:
        """One residual stream."""
        return COMPUTE_BYTES * self.sequence * self.hidden

    @property
    def attention_saved_bytes(self) -> int:
        """Normed input, q, k, v, attention output."""
        return COMPUTE_BYTES * self.sequence * (3 * self.hidden + 2 * self.key_value)

    @property
    def ffn_saved_bytes(self) -> int:
        """Normed input, gate, up, activated gate and their product."""
        return COMPUTE_BYTES * self.sequence * (self.hidden + 4 * self.ffn)


def _candidate(
    shape: Shape, name: str, modules: tuple[str, ...], first: int, last: int, numels: tuple[int, ...]
) -> Candidate:
    """A unit of tensors with the given sizes; sizes divide by the ranks, so nothing is padded."""
    numel, ranks = sum(numels), shape.gpus
    ring_ns = int(COMPUTE_BYTES * numel * (ranks - 1) / ranks / shape.bandwidth * 1e9) + LATENCY_NS
    update_ns = int(numel * 28 / MEMORY_BYTES_PER_S * 1e9)  # fp32 AdamW: 4 reads and 3 writes of 4 bytes
    return Candidate(
        name=name,
        modules=modules,
        parameters=tuple(f"{name}.{i}" for i in range(len(numels))),
        calls=((first, last),),
        pinned=False,
        trainable=True,
        backward_gather=True,
        shard_bytes=REST_BYTES * numel // ranks,
        full_bytes=REST_BYTES * numel,
        gather_bytes=COMPUTE_BYTES * numel,
        grad_bytes=COMPUTE_BYTES * numel,
        reduce_bytes=REST_BYTES * numel,
        grad_shard_bytes=REST_BYTES * numel // ranks,
        grad_full_bytes=REST_BYTES * numel,
        optimizer_shard_bytes=2 * REST_BYTES * numel // ranks,
        optimizer_full_bytes=2 * REST_BYTES * numel,
        all_gather_ns=ring_ns,
        reduce_scatter_ns=2 * ring_ns,
        all_reduce_ns=4 * ring_ns,
        optimizer_shard_ns=update_ns // ranks,
        optimizer_full_ns=update_ns,
        offload_ns=int(2 * 2 * REST_BYTES * numel / ranks / HOST_BYTES_PER_S * 1e9),
    )


def _candidates(shape: Shape) -> Iterator[Candidate]:
    """Embedding, the atoms of every block, blocks, runs of blocks, head."""
    block = (shape.attention_numel, shape.ffn_numel)
    table = (shape.vocab * shape.hidden,)
    yield _candidate(shape, "embed", ("embed",), 0, 0, table)
    for b in range(shape.blocks):
        name, first = f"layers.{b}", 1 + 2 * b
        yield _candidate(shape, f"{name}.attn", (f"{name}.attn",), first, first, block[:1])
        yield _candidate(shape, f"{name}.mlp", (f"{name}.mlp",), first + 1, first + 1, block[1:])
        yield _candidate(shape, name, (name,), first, first + 1, block)
        for size in MERGES:
            if b % size == 0 and b + size <= shape.blocks:
                modules = tuple(f"layers.{b + i}" for i in range(size))
                yield _candidate(shape, f"{name}..{b + size - 1}", modules, first, first + 2 * size - 1, size * block)
    last = 1 + 2 * shape.blocks
    yield _candidate(shape, "head", ("head",), last, last, table)


def _forward_ns(flop: float) -> int:
    return int(flop / FLOP_PER_S * 1e9)


def _windows(shape: Shape) -> Iterator[Window]:
    tokens, residual = shape.sequence, shape.activation_bytes

    def window(name: str, flop: float, local_bytes: int, backward_bytes: int) -> Window:
        forward = _forward_ns(flop)
        return Window(
            name=name,
            forward_ns=forward,
            backward_ns=2 * forward,
            forward_local_bytes=local_bytes,
            backward_local_bytes=backward_bytes,
        )

    yield window("embed", 0, residual, residual)
    attention = 2 * tokens * shape.attention_numel + 2 * tokens * tokens * shape.hidden
    for b in range(shape.blocks):
        for name, flop, saved in (
            ("attn", attention, shape.attention_saved_bytes),
            ("mlp", 2 * tokens * shape.ffn_numel, shape.ffn_saved_bytes),
        ):
            yield window(f"layers.{b}.{name}", flop, saved + 2 * residual, saved + saved // 2 + 2 * residual)
    logits = COMPUTE_BYTES * tokens * shape.vocab
    yield window("head", 2 * tokens * shape.hidden * shape.vocab, 3 * logits, 4 * logits)


def _activations(shape: Shape, windows: tuple[Window, ...]) -> tuple[tuple[Segment, ...], tuple[Saved, ...]]:
    """Per block: recompute the attention, the feed-forward, or all of it; residual streams are saved by the norms."""
    segments: list[Segment] = []
    saved = [Saved(nbytes=shape.activation_bytes, produced=0, released=1)]
    for b in range(shape.blocks):
        first = 1 + 2 * b
        attn, mlp = windows[first], windows[first + 1]
        for name, spans in ((".attn", (attn,)), (".mlp", (mlp,)), ("", (attn, mlp))):
            start = first + (name == ".mlp")
            segments.append(
                Segment(
                    module=f"layers.{b}{name}",
                    first=start,
                    last=start + len(spans) - 1,
                    recompute_ns=sum(w.forward_ns for w in spans),
                    forward_local_bytes=tuple(w.forward_local_bytes * 3 // 4 for w in spans),
                    backward_local_bytes=tuple(
                        w.backward_local_bytes + (shape.activation_bytes if w is spans[-1] else 0) for w in spans
                    ),
                )
            )
        s = 3 * b
        saved += [
            Saved(nbytes=shape.attention_saved_bytes, produced=first, released=first, droppable_by=(s, s + 2)),
            Saved(nbytes=shape.activation_bytes, produced=first, released=first + 1, droppable_by=(s + 2,)),
            Saved(nbytes=shape.ffn_saved_bytes, produced=first + 1, released=first + 1, droppable_by=(s + 1, s + 2)),
            Saved(nbytes=shape.activation_bytes, produced=first + 1, released=first + 2),
        ]
    return tuple(segments), tuple(saved)


def make_problem(shape: Shape, *, memory_bytes: int, host_bytes: int) -> PlanningProblem:
    """The planning problem of a transformer; bytes are per rank."""
    windows = tuple(_windows(shape))
    segments, saved = _activations(shape, windows)
    return PlanningProblem(
        windows=windows,
        segments=segments,
        saved=saved,
        candidates=tuple(sorted(_candidates(shape), key=lambda c: (c.first, c.last))),
        num_gpus=shape.gpus,
        memory_limit_bytes=memory_bytes,
        constant_bytes=GIB // 4,
        host_limit_bytes=host_bytes,
    )


def make_baselines(problem: PlanningProblem) -> tuple[Baseline, ...]:
    """One unit for each block, as most people shard: nothing recomputed, and every block recomputed."""
    ends = {"embed", "head"}
    blocks = tuple(c for c in problem.candidates if c.name in ends or (c.name.count(".") == 1 and len(c.modules) == 1))
    own = replace(problem, candidates=blocks)
    units = tuple(UnitChoice(candidate=i, mode=Mode.RESHARD) for i in range(len(blocks)))
    every = tuple(s for s, segment in enumerate(problem.segments) if segment.module.count(".") == 1)
    return (
        Baseline(name="per block", problem=own, decisions=Decisions(units=units)),
        Baseline(name="per block, recomputed", problem=own, decisions=Decisions(units=units, recompute=every)),
    )


def _row(budget_gib: float, outcome: Decision | NothingFits) -> str:
    mip = outcome.mip
    head = f"{budget_gib:9.1f} {mip.variables:9d} {mip.constraints:11d} {mip.build_s:8.2f} {mip.solve_s:8.2f} {mip.stage:>12}"
    if isinstance(outcome, NothingFits):
        return f"{head}  nothing fits; the leanest plan needs {outcome.simulation.peak_bytes / GIB:.2f} GiB"
    return (
        f"{head} {outcome.answer:>22} {outcome.simulation.step_ns / 1e6:10.2f} {outcome.lower_bound_ns / 1e6:10.2f}"
        f" {outcome.gap:9.5f} {outcome.simulation.peak_bytes / GIB:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=80)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--ffn", type=int, default=28672)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--bandwidth", type=float, default=250e9, help="bytes/s that a ring over all ranks reaches")
    parser.add_argument("--host-memory", type=float, default=128.0, help="GiB per rank; 0 for no offload")
    parser.add_argument("--memory", type=float, nargs="+", default=[28.0, 36.0, 48.0, 74.0, 140.0], help="GiB per GPU")
    parser.add_argument("--gap", type=float, default=0.001)
    parser.add_argument("--progress", action="store_true", help="print what the solver is doing")
    args = parser.parse_args()
    shape = Shape(args.blocks, args.hidden, args.ffn, args.vocab, args.sequence, args.gpus, args.bandwidth)
    print(
        f"{'GiB':>9} {'variables':>9} {'constraints':>11} {'build_s':>8} {'solve_s':>8} {'stage':>12} {'answer':>22}"
        f" {'step_ms':>10} {'bound_ms':>10} {'gap':>9} {'peak_GiB':>8}"
    )
    for budget in args.memory:
        problem = make_problem(shape, memory_bytes=int(budget * GIB), host_bytes=int(args.host_memory * GIB))
        report = (lambda text: print(f"# {text}", flush=True)) if args.progress else (lambda _: None)
        print(_row(budget, decide(problem, make_baselines(problem), gap=args.gap, progress=report)), flush=True)


if __name__ == "__main__":
    main()
