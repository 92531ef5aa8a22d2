"""Plans made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partitioner.plan import Plan, PlanActivation, PlanParameters, PlanSolver, PlanUnit

HERE = Path(__file__).parent
BLOCK = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")


def unit(*modules: str, parameters: Sequence[str] = (), **changes: Any) -> PlanUnit:
    fields: dict[str, Any] = {
        "name": "+".join(modules) or "(root)",
        "modules": modules,
        "parameters": tuple(parameters),
        "placement": "shard",
        "reshard_after_forward": True,
        "prefetch_forward": 1,
        "prefetch_backward": 1,
        "offload": "none",
        "gather_bytes": 0,
        "shard_bytes": 0,
    }
    return PlanUnit(**{**fields, **changes})


def plan_of(
    units: Sequence[PlanUnit],
    *,
    recompute: Sequence[str] = (),
    tied: tuple[tuple[str, ...], ...] = (),
    spec: str = "models.py:lm",
    num_gpus: int = 2,
    **recipe: Any,
) -> Plan:
    return Plan(
        status="optimal",
        gap=0.0,
        lower_bound_s=1.0,
        step_time_s=1.0,
        mfu=0.5,
        hfu=0.5,
        tokens_per_s_per_gpu=1.0,
        peak_bytes=1,
        peak_at="",
        memory_limit_bytes=1,
        host_bytes_per_node=0,
        parameters=PlanParameters(
            unique=26, numel=1289, bytes=5156, trainable_numel=1274, trainable_bytes=5096, frozen_bytes=60,
            buffer_bytes=0, padded_shard_bytes=0, tied=tied,
        ),
        units=tuple(units),
        activations=tuple(
            PlanActivation(module=m, policy="recompute", saved_bytes=0, recompute_s=0.0) for m in recompute
        ),
        baselines=(),
        defaults={},
        warnings=(),
        solver=PlanSolver(name="none", variables=0, constraints=0, answer="mip"),
        fingerprint="0123456789abcdef",
        source={"kind": "module", "spec": spec},
        cluster={"num_gpus": num_gpus},
        recipe={
            "batch": 2, "seq": 5, "compute_dtype": "bfloat16", "reduce_dtype": "float32", "optimizer": "adamw",
            "loss": "cross_entropy", **recipe,
        },
    )  # fmt: skip


def tiny_plan(factory: str = "tiny_lm", **changes: Any) -> Plan:
    """Tied list group, kept, replicated, recomputed, gathered two ahead both ways, offloaded, the root's own."""
    blocks: list[dict[str, Any]] = [
        {"offload": "optimizer_state", "prefetch_backward": 2},
        {"reshard_after_forward": False},
        {"placement": "replicate", "reshard_after_forward": False},
        {"prefetch_forward": 2},
    ]
    units = [
        unit("", parameters=("scale",)),
        unit("embed", "head", parameters=("embed.weight",)),
        *(
            unit(f"layers.{i}", parameters=[f"layers.{i}.{name}" for name in BLOCK], **choice)
            for i, choice in enumerate(blocks)
        ),
    ]
    return plan_of(
        units,
        recompute=("layers.0", "layers.3"),
        tied=(("embed.weight", "head.weight"),),
        spec=f"{HERE / 'tiny_lm.py'}:{factory}",
        **changes,
    )
