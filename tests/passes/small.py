"""A model of two blocks and a head, and a plan with one decision of every kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partitioner.capture.module import capture_module
from partitioner.pass_manager import Pass, run_passes
from partitioner.plan import Plan, PlanActivation, PlanParameters, PlanSolver, PlanUnit
from partitioner.program import Program, Recipe
from passes.annotate_costs import AnnotateCosts
from passes.attach_plan import AttachPlan
from passes.canonicalize import Canonicalize
from passes.find_units import FindUnits
from passes.insert_grad_reduce import InsertGradReduce
from passes.insert_reshard import InsertReshard
from passes.insert_unshard import InsertUnshard


class Block(nn.Module):
    """Up, relu, down, and the residual; with a cast and a reshape that do nothing, for canonicalize to remove."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x)).view(2, 8)
        return x + torch.ops.aten.alias(self.down(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().mean()


def unit(name: str, modules: tuple[str, ...], parameters: tuple[str, ...], **changes: Any) -> PlanUnit:
    fields: dict[str, Any] = {
        "name": name, "modules": modules, "parameters": parameters, "placement": "shard", "reshard_after_forward": True,
        "prefetch_forward": 1, "prefetch_backward": 1, "offload": "none", "gather_bytes": 0, "shard_bytes": 0,
    }  # fmt: skip
    return PlanUnit(**(fields | changes))


def block(i: int) -> tuple[str, ...]:
    return f"layers.{i}.up.weight", f"layers.{i}.down.weight"


UNITS = (
    unit("layers.0", ("layers.0",), block(0)),
    unit("layers.1", ("layers.1",), block(1), placement="replicate", reshard_after_forward=False),
    unit("head", ("head",), ("head.weight",), prefetch_forward=2),
)


def plan_of(units: tuple[PlanUnit, ...] = UNITS) -> Plan:
    """Layer 0 sharded and recomputed, layer 1 replicated, the head gathered two units early."""
    return Plan(
        status="optimal",
        gap=0.0,
        lower_bound_s=1.0,
        step_time_s=1.0,
        mfu=0.5,
        hfu=0.5,
        tokens_per_s_per_gpu=1.0,
        peak_bytes=1,
        peak_at="forward of head",
        memory_limit_bytes=1,
        host_bytes_per_node=0,
        parameters=PlanParameters(
            unique=5,
            numel=140,
            bytes=560,
            trainable_numel=140,
            trainable_bytes=560,
            frozen_bytes=0,
            buffer_bytes=0,
            padded_shard_bytes=280,
            tied=(),
        ),
        units=units,
        activations=(PlanActivation(module="layers.0", policy="recompute", saved_bytes=16, recompute_s=1e-6),),
        baselines=(),
        defaults={},
        warnings=(),
        solver=PlanSolver(name="", variables=0, constraints=0, answer="mip"),
        fingerprint="",
        source={"kind": "module", "spec": "small.py:model"},
        cluster={},
        recipe={},
    )


def capture() -> Program:
    return capture_module(Model(), (torch.empty(2, 4),), {}, Recipe(), spec="small.py:model")


def microseconds(op_class: str, dtype: str, flop: int, nbytes: int, kernels: int) -> float:
    """A clock that is easy to follow by hand: one byte a microsecond."""
    return nbytes * 1e-6


def pipeline() -> tuple[Pass, ...]:
    plan = plan_of()
    return (
        Canonicalize(),
        AnnotateCosts(clock=microseconds),
        FindUnits(),
        AttachPlan(plan=plan),
        InsertUnshard(plan=plan),
        InsertReshard(plan=plan),
        InsertGradReduce(plan=plan),
    )


def program_before(name: str) -> tuple[Program, Pass]:
    """The program as a pass of the pipeline finds it, and the pass."""
    passes = pipeline()
    at = next(i for i, item in enumerate(passes) if item.name == name)
    program = capture()
    run_passes(program, passes[:at])
    return program, passes[at]
