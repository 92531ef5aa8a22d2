"""``parallelize.py``: the plan as the FSDP2 calls that a person would write, depending on torch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partitioner.emit.statements import STEP, Expr, Module, call, fold, lines_of, listed, module
from partitioner.errors import EmitError
from partitioner.plan import Plan, PlanUnit

ROOT = ("",)
BODY = STEP


def is_inside(name: str, outer: str) -> bool:
    """Whether a module lies strictly under another; everything lies under the root."""
    return name != outer and (outer == "" or name.startswith(outer + "."))


def _holds(outer: PlanUnit, inner: PlanUnit) -> bool:
    return any(is_inside(m, o) for m in inner.modules for o in outer.modules)


def nesting(units: Sequence[PlanUnit]) -> list[list[PlanUnit]]:
    """Units in layers, innermost first: ``fully_shard`` takes what deeper calls left, so children go before parents.

    Raises:
        EmitError: two units lie inside one another, which no order of calls can express.
    """
    held = {o.name: [u.name for u in units if u is not o and _holds(o, u)] for o in units}
    layers, done = [], set[str]()
    waiting = list(units)
    while waiting:
        layer = [u for u in waiting if done.issuperset(held[u.name])]
        if not layer:
            raise EmitError(
                f"units {waiting[0].name} and {held[waiting[0].name][0]} lie inside one another",
                hint="this plan has no FSDP2 form; plan again, and report the model if it happens again",
            )
        layers.append(layer)
        done.update(u.name for u in layer)
        waiting = [u for u in waiting if u.name not in done]
    return layers


def chain(plan: Plan) -> list[PlanUnit]:
    """The units that prefetch distances count over, in execution order.

    Not among them: the root, units around other units, and tied modules, whose parameters live across the others'.
    """
    tied = {names[0] for names in plan.parameters.tied}
    return [
        unit
        for unit in plan.units
        if unit.modules
        and unit.modules != ROOT
        and not any(_holds(unit, other) for other in plan.units)
        and not (len(unit.modules) > 1 and tied.intersection(unit.parameters))
    ]


def _shard(unit: PlanUnit) -> Expr:
    """One ``fully_shard`` call.

    A replicated unit is "sharded" over a mesh axis of one: nothing is gathered, gradients are averaged over the other
    axis, and resharding only drops the copy in the compute dtype.
    """
    target: Expr = module(unit.modules[0]) if len(unit.modules) == 1 else listed(unit.modules)
    replicated = unit.placement == "replicate"
    reshard = replicated or unit.reshard_after_forward
    options = "**replicate" if replicated else "**shard"
    return call("fully_shard", target, f"reshard_after_forward={reshard}", options)


def _issue(units: Sequence[PlanUnit], distances: Sequence[int], method: str) -> Iterator[Expr]:
    """Prefetch lists, for units in the order in which they run and the distances at which they are gathered.

    The list of a unit names all units up to the farthest that is due when it starts, since the gathers in between must
    be issued first; one that was issued before is skipped at run time. Distance 1 needs no list: FSDP2 does it by itself.
    """
    farthest: dict[int, int] = {}
    for k, distance in enumerate(distances):
        issuer = max(k - distance, 0)
        if distance > 1 and k - issuer > 1:
            farthest[issuer] = max(k, farthest.get(issuer, k))
    for issuer, last in farthest.items():
        names = [unit.modules[0] for unit in units[issuer + 1 : last + 1]]
        yield (module(units[issuer].modules[0]), call(f".set_modules_to_{method}_prefetch", listed(names)))


def _section(comment: str, lines: list[str]) -> list[str]:
    return ["", f"{BODY}# {comment}", *lines] if lines else []


def _checkpoint_lines(plan: Plan) -> list[str]:
    names = [a.module for a in plan.activations if a.policy == "recompute"]
    calls = [call("checkpoint", module(name)) for name in names]
    return _section("Run again in the backward instead of keeping what they computed.", fold(calls, BODY))


def _unit_lines(plan: Plan) -> list[str]:
    lines: list[str] = []
    inner = [unit for unit in plan.units if unit.modules and unit.modules != ROOT]
    for depth, layer in enumerate(nesting(inner)):
        comment = "One gather unit a call." if depth == 0 else "Around those: what is left of their parents."
        lines += _section(comment, fold([_shard(unit) for unit in layer], BODY))
    root = next((unit for unit in plan.units if unit.modules == ROOT), None)
    last = call("fully_shard", Module(""), "**shard") if root is None else _shard(root)
    return lines + _section(
        "Last the root: it runs the others, and takes what none of them took.", lines_of(last, BODY)
    )


def _prefetch_lines(plan: Plan) -> list[str]:
    units = chain(plan)
    forward = fold(_issue(units, [u.prefetch_forward for u in units], "forward"), BODY)
    reverse = units[::-1]
    backward = fold(_issue(reverse, [u.prefetch_backward for u in reverse], "backward"), BODY)
    return [
        *_section("Forward gathers that start earlier than one unit ahead, and the units that issue them.", forward),
        *_section("Backward gathers that start earlier than one unit ahead, and the units that issue them.", backward),
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def _docstring(plan: Plan) -> list[str]:
    units = [u for u in plan.units if u.modules]
    replicated = sum(u.placement == "replicate" for u in units)
    kept = sum(u.placement == "shard" and not u.reshard_after_forward for u in units)
    again = len(units) - replicated - kept
    recomputed = sum(a.policy == "recompute" for a in plan.activations)
    gpus = _counted(int(plan.cluster["num_gpus"]), "GPU")
    spec = plan.source["spec"].encode("unicode_escape").decode().replace('"', '\\"')
    return [
        f'"""FSDP2 for {spec} on {gpus}, as planned in plan.json ({plan.fingerprint[:12]}).',
        "",
        f"{_counted(len(units), 'gather unit')}: {again} gathered again in the backward, {kept} kept whole from forward to backward,",
        f"{replicated} replicated. {_counted(recomputed, 'module')} recomputed.",
        '"""',
    ]


def _imports(plan: Plan) -> list[str]:
    replicated = any(u.placement == "replicate" for u in plan.units)
    recomputed = any(a.policy == "recompute" for a in plan.activations)
    return [
        "from __future__ import annotations",
        "",
        "import torch",
        "from torch import nn",
        *(["from torch.distributed._composable import checkpoint"] if recomputed else []),
        "from torch.distributed.device_mesh import DeviceMesh" + (", init_device_mesh" if replicated else ""),
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
    ]


def _signature(plan: Plan) -> list[str]:
    replicated = any(u.placement == "replicate" for u in plan.units)
    named = any(name for u in plan.units for name in u.modules)
    signature = [
        "def parallelize(",
        f"{STEP}model: nn.Module,",
        f"{STEP}mesh: DeviceMesh,",
        f"{STEP}*,",
        f"{STEP}param_dtype: torch.dtype = torch.{plan.recipe['compute_dtype']},",
        f"{STEP}reduce_dtype: torch.dtype = torch.{plan.recipe['reduce_dtype']},",
        ") -> nn.Module:",
        f'{BODY}"""Shard the model in place over a mesh of one axis that holds every rank."""',
        *([f"{BODY}at = model.get_submodule"] if named else []),
        f"{BODY}precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)",
        f'{BODY}shard = {{"mesh": mesh, "mp_policy": precision}}',
    ]
    if replicated:
        copies = 'init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("dp_replicate", "dp_shard"))'
        signature += [
            f"{BODY}copies = {copies}",
            f'{BODY}replicate = {{"mesh": copies, "mp_policy": precision}}',
        ]
    return signature


def parallelize_source(plan: Plan) -> str:
    """The text of ``parallelize.py``: ``parallelize(model, mesh, *, param_dtype, reduce_dtype)`` applies the plan.

    Checkpointing comes before sharding (FSDP2's hooks must surround it), units innermost first, the root last even where
    it has no parameters of its own (FSDP2 wants one root module), prefetch lists at the end.

    Raises:
        EmitError: the units cannot be written as FSDP2 calls.
    """
    lines = [
        *_docstring(plan),
        "",
        *_imports(plan),
        "",
        "",
        *_signature(plan),
        *_checkpoint_lines(plan),
        *_unit_lines(plan),
        *_prefetch_lines(plan),
        "",
        f"{BODY}return model",
    ]
    return "\n".join(lines) + "\n"
