"""Plan: the one artefact between deciding and rewriting, as versioned JSON.

``Plan.to_json`` is the text that ``plan.json`` holds: the same bytes on every run and machine. The summary that
``--json`` prints is the same object with the two solver times, the only figures in it that the clock has a part in.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from partitioner.errors import PlanError

SCHEMA = "gatherpoint.plan/1"

Placement = Literal["shard", "replicate"]
Offload = Literal["none", "optimizer_state"]
Policy = Literal["keep", "recompute"]
Status = Literal["optimal", "feasible", "infeasible"]


@dataclass(frozen=True, kw_only=True)
class PlanUnit:
    """One gather unit: what ``fully_shard`` is called on, and how."""

    name: str
    modules: tuple[str, ...]
    """FQNs in execution order; ``("",)`` is the root module, whose unit takes every parameter no other unit has."""
    parameters: tuple[str, ...]
    placement: Placement
    reshard_after_forward: bool
    prefetch_forward: int
    """How many units ahead of its use this unit's forward gather is issued; 1 is what FSDP2 does by itself."""
    prefetch_backward: int
    offload: Offload
    gather_bytes: int  # whole unit in compute dtype, padded
    shard_bytes: int  # resident on each rank between uses


@dataclass(frozen=True, kw_only=True)
class PlanActivation:
    """What happens to the activations of one module that could be recomputed."""

    module: str
    policy: Policy
    saved_bytes: int  # held from forward to backward under this policy
    recompute_s: float  # extra compute each step under this policy


@dataclass(frozen=True, kw_only=True)
class PlanParameters:
    """Totals over unique storages."""

    unique: int
    numel: int
    bytes: int
    trainable_numel: int
    trainable_bytes: int
    frozen_bytes: int
    buffer_bytes: int
    padded_shard_bytes: int  # per rank, if every parameter were sharded over all GPUs
    tied: tuple[tuple[str, ...], ...]  # every set of names that share one storage


@dataclass(frozen=True, kw_only=True)
class PlanBaseline:
    """A plan of the usual kind, simulated like ours."""

    name: str
    step_time_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class PlanSolver:
    """What was solved, in numbers that do not depend on the machine."""

    name: str
    variables: int
    constraints: int
    answer: str  # which of the answers was shipped: "mip", "regular" (blocks treated alike), or the name of a baseline
    build_s: float = 0.0
    solve_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanInfeasible:
    """Why nothing fits."""

    budget: str  # which budget: "gpu memory" or "host memory"
    needed_bytes: int  # smallest peak that any plan reaches
    limit_bytes: int
    missing_bytes: int
    at: str  # point of the step
    largest: tuple[tuple[str, int], ...]  # what fills the memory there, largest first
    remedies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """One point of the predicted memory curve; bytes by category, per rank."""

    at: str
    total_bytes: int
    parts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Decisions, predictions and the proof, for one model on one cluster with one recipe."""

    schema: str = SCHEMA
    status: Status
    gap: float | None
    lower_bound_s: float | None
    step_time_s: float | None
    mfu: float | None
    hfu: float | None
    tokens_per_s_per_gpu: float | None
    peak_bytes: int | None
    peak_at: str
    memory_limit_bytes: int
    host_bytes_per_node: int
    parameters: PlanParameters
    units: tuple[PlanUnit, ...]
    """In execution order; the root unit, if it has parameters of its own, comes first."""
    activations: tuple[PlanActivation, ...]
    baselines: tuple[PlanBaseline, ...]
    defaults: dict[str, str]
    warnings: tuple[str, ...]
    solver: PlanSolver
    fingerprint: str
    source: dict[str, str]
    cluster: dict[str, Any]
    recipe: dict[str, Any]
    infeasible: PlanInfeasible | None = None
    memory: tuple[MemoryPoint, ...] = ()
    exposed_comm_s: float | None = None
    comm_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, *, timings: bool = False) -> str:
        """Stable text: keys in declaration order, two spaces, newline at the end; ``timings`` adds the solver's."""
        data = self.to_dict()
        if not timings:
            del data["solver"]["build_s"], data["solver"]["solve_s"]
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def unit_of(self, parameter: str) -> PlanUnit:
        """The unit that gathers a parameter (canonical name). Raises KeyError."""
        for unit in self.units:
            if parameter in unit.parameters:
                return unit
        raise KeyError(parameter)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def plan_from_dict(data: dict[str, Any]) -> Plan:
    """The inverse of ``Plan.to_dict``. Raises PlanError on another schema or a missing or unknown key."""
    if data.get("schema") != SCHEMA:
        raise PlanError(
            f"plan has schema {data.get('schema')!r}; this version reads {SCHEMA!r}",
            hint="make the plan again with this version",
        )
    rows: dict[str, type] = {
        "units": PlanUnit, "activations": PlanActivation, "baselines": PlanBaseline, "memory": MemoryPoint,
    }  # fmt: skip
    records: dict[str, type] = {"parameters": PlanParameters, "solver": PlanSolver, "infeasible": PlanInfeasible}
    try:
        fields: dict[str, Any] = {}
        for key, value in data.items():
            if key in rows:
                fields[key] = tuple(rows[key](**{k: _tuples(v) for k, v in row.items()}) for row in value)
            elif key in records and value is not None:
                fields[key] = records[key](**{k: _tuples(v) for k, v in value.items()})
            else:
                fields[key] = _tuples(value)
        return Plan(**fields)
    except (TypeError, AttributeError) as error:
        raise PlanError(f"plan does not have the fields of {SCHEMA!r}: {error}") from error


def load_plan(path: Path) -> Plan:
    """Read a plan file. Raises PlanError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{path}: not a readable plan: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path}: not a plan: the top level is not an object")
    return plan_from_dict(data)
