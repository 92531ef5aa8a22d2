"""The way through: capture, prepare, solve, assemble, lower. The one place that knows the passes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import fx

from partitioner.assemble import Setting, assemble, assemble_infeasible
from partitioner.capture.factory import load_factory
from partitioner.capture.module import capture_module
from partitioner.capture.onnx.importer import import_onnx
from partitioner.capture.pt2 import load_pt2
from partitioner.config import Cluster
from partitioner.cost.compute import make_clock
from partitioner.cost.step import make_step
from partitioner.errors import UsageError
from partitioner.pass_manager import Observer, Pass, PassRecord, run_passes
from partitioner.plan import Plan, PlanInfeasible
from partitioner.planner.baselines.wrapping import baselines
from partitioner.planner.decide import Decision, decide
from partitioner.planner.formulate import backward_reads, formulate, make_candidate
from partitioner.planner.problem import Mode, PlanningProblem
from partitioner.planner.solve import find_leanest
from partitioner.planner.step import StepTable
from partitioner.program import Program, Recipe
from partitioner.units import GIB, KIB, MIB, format_bytes
from passes.annotate_costs import AnnotateCosts
from passes.attach_plan import AttachPlan
from passes.canonicalize import Canonicalize
from passes.find_units import FindUnits
from passes.insert_grad_reduce import InsertGradReduce
from passes.insert_reshard import InsertReshard
from passes.insert_unshard import InsertUnshard
from passes.registry import LOWER, PREPARE, summary

DEFAULT_GAP = 0.01
"""Relative gap at which the solver may stop: finer than any cost model here can tell two plans apart."""
MORE_GPUS = (2, 4, 8, 16)
"""Multiples of the GPU count that are tried when nothing fits."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that planning is asked."""

    spec: str
    """``model.onnx``, ``model.pt2``, ``path/to/file.py:factory`` or ``package.module:factory``."""
    cluster: Cluster
    recipe: Recipe = field(default_factory=Recipe)
    pins: tuple[tuple[str, str], ...] = ()
    """(unit, module or parameter name, "reshard" | "keep" | "replicate")."""
    gap: float = DEFAULT_GAP
    passes: tuple[str, ...] | None = None
    """Names of the passes to run; None for all."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """What the caller assumed, for the report."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A plan, the program it was made for, and what the passes did."""

    plan: Plan
    program: Program
    """Prepared, not lowered."""
    lowered: Program
    """With the gathers and reductions of the plan; the program itself if nothing fits."""
    records: tuple[PassRecord, ...]


def capture(spec: str, recipe: Recipe) -> Program:
    """Any door: the suffix of ``spec`` decides which.

    Raises:
        UsageError: there is no such file, or the name has no known form.
    """
    suffix = Path(spec).suffix.lower()
    if suffix in (".onnx", ".pt2"):
        if not Path(spec).is_file():
            raise UsageError(f"{spec}: no such file")
        return import_onnx(Path(spec), recipe) if suffix == ".onnx" else load_pt2(Path(spec), recipe)
    if ":" not in spec:
        exists = Path(spec).exists()
        raise UsageError(
            f"{spec}: not a model" if exists else f"{spec}: no such file",
            hint="give model.onnx, model.pt2, path/to/file.py:factory or package.module:factory",
        )
    module, args, kwargs = load_factory(spec, recipe)
    return capture_module(module, args, kwargs, recipe, spec=spec)


def pass_table() -> list[tuple[str, str, str]]:
    """(stage, name, what it does) of every pass, in the order in which they run."""
    stages = (("prepare", PREPARE), ("lower", LOWER))
    return [(stage, kind.name, summary(kind)) for stage, kinds in stages for kind in kinds]


def check_pass_names(names: Sequence[str]) -> None:
    """Raises UsageError for a pass that does not exist, with the nearest that does."""
    known = [kind.name for kind in (*PREPARE, *LOWER)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"no pass is called {name!r}", hint=f"{hint}the passes are: {', '.join(known)}")


def _copy(program: Program) -> Program:
    """The same program with a graph of its own. Tensors and records are shared; neither is ever changed in place."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(program.graph.graph, nodes)
    last = next(iter(reversed(program.graph.graph.nodes)))
    graph.output(result).meta = dict(last.meta)
    return replace(program, graph=fx.GraphModule(program.graph, graph))


def _chosen(passes: Sequence[Pass], names: tuple[str, ...] | None) -> list[Pass]:
    return [p for p in passes if names is None or p.name in names]


def parse_pins(pins: Sequence[tuple[str, str]], problem: PlanningProblem) -> tuple[tuple[str, Mode], ...]:
    """Names checked against the problem. Raises UsageError with the nearest name or the legal choices."""
    names = dict.fromkeys(
        name for c in problem.candidates if c.parameters for name in (c.name, *c.modules, *c.parameters) if name
    )
    found = []
    for name, choice in pins:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            raise UsageError(
                f"--pin {name}={choice}: no unit, module or parameter is called {name!r}",
                hint="nearest: " + ", ".join(near) if near else "the report of a run without --pin lists the units",
            )
        try:
            mode = Mode(choice)
        except ValueError as error:
            legal = ", ".join(m.value for m in Mode)
            raise UsageError(f"--pin {name}={choice}: {choice!r} is not one of {legal}") from error
        if mode is Mode.REPLICATE and problem.num_gpus == 1:
            raise UsageError(f"--pin {name}={choice}: there is nothing to replicate over on one GPU")
        found.append((name, mode))
    return tuple(found)


def _remedies(step: StepTable, cluster: Cluster, request: Request, certificate: PlanInfeasible) -> tuple[str, ...]:
    """What would make the model fit; every line was checked by solving, except where it says so."""
    lines = []
    if certificate.budget == "gpu memory":
        lines.append(
            f"--memory {_size(certificate.needed_bytes)}: the leanest plan needs {format_bytes(certificate.needed_bytes)} on every GPU"
        )
    else:
        per_node = certificate.needed_bytes * min(cluster.gpus_per_node, cluster.num_gpus)
        lines.append(f"--host-memory {_size(per_node)}: the leanest plan keeps {format_bytes(per_node)} on every node")
    for factor in MORE_GPUS:
        larger = replace(cluster, num_gpus=cluster.num_gpus * factor)
        if larger.num_gpus > cluster.gpus_per_node and cluster.num_gpus < cluster.gpus_per_node:
            larger = replace(larger, gpus_per_node=min(larger.num_gpus, 8))
        problem = formulate(step, larger, optimizer_name=request.recipe.optimizer)
        lean = find_leanest(problem).simulation
        if lean.peak_bytes <= problem.memory_limit_bytes:
            lines.append(f"--gpus {larger.num_gpus}: a plan then peaks at {format_bytes(lean.peak_bytes)}")
            break
    else:
        lines.append(f"more GPUs alone do not help: {cluster.num_gpus * MORE_GPUS[-1]} were tried")
    if request.recipe.batch > 1:
        lines.append(f"--batch {request.recipe.batch // 2}: halves activations (not checked)")
    elif request.recipe.seq:
        lines.append(f"--seq {request.recipe.seq // 2}: halves activations (not checked)")
    return tuple(lines)


def _size(nbytes: int) -> str:
    """Rounded up to a whole number of a unit that loses little, as a flag takes it."""
    for unit, size in (("GiB", GIB), ("MiB", MIB)):
        if nbytes >= 10 * size:
            return f"{-(-nbytes // size)}{unit}"
    return f"{-(-nbytes // KIB)}KiB"


def plan_model(
    request: Request, *, progress: Callable[[str], None] = lambda _: None, observer: Observer | None = None
) -> Outcome:
    """Plan a model.

    Args:
        request: what to plan and for what.
        progress: told what is being done, in a few words.
        observer: called after each pass with its name and the program.

    Raises:
        PartitionerError: of the kind that fits; an infeasible model is not an error but a plan with that status.
    """
    check_pass_names(request.passes or ())
    progress(f"capturing {request.spec}")
    program = capture(request.spec, request.recipe)
    cluster = request.cluster
    prepare = (Canonicalize(), AnnotateCosts(clock=make_clock(cluster.gpu)), FindUnits())
    progress("measuring operators")
    records = run_passes(program, _chosen(prepare, request.passes), observer=observer)
    plan = solve(program, request, progress=progress)
    if plan.status == "infeasible":
        return Outcome(plan=plan, program=program, lowered=program, records=tuple(records))
    progress("lowering")
    lowered = _copy(program)
    lower = (AttachPlan(plan=plan), InsertUnshard(plan=plan), InsertReshard(plan=plan), InsertGradReduce(plan=plan))
    records += run_passes(lowered, _chosen(lower, request.passes), observer=observer)
    return Outcome(plan=plan, program=program, lowered=lowered, records=tuple(records))


def solve(program: Program, request: Request, *, progress: Callable[[str], None] = lambda _: None) -> Plan:
    """Plan a prepared program (annotate-costs and find-units have run)."""
    if not program.windows:
        raise UsageError("the program has no windows to plan over", hint="run the passes annotate-costs and find-units")
    cluster, optimizer = request.cluster, request.recipe.optimizer
    progress("building the planning problem")
    step = make_step(program)
    problem = formulate(step, cluster, optimizer_name=optimizer)
    problem = replace(problem, pins=parse_pins(request.pins, problem))
    reads = backward_reads(step)
    usual = baselines(step, problem, lambda g: make_candidate(step, g, cluster, optimizer, reads))
    decision = decide(problem, usual, gap=request.gap, progress=progress)
    setting = Setting(program=program, step=step, cluster=cluster, problem=problem, defaults=request.defaults)
    if isinstance(decision, Decision):
        return assemble(setting, decision)
    progress("nothing fits: looking for what would")
    return assemble_infeasible(setting, decision, lambda c: _remedies(step, cluster, request, c))
