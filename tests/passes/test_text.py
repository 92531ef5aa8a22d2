"""Every pass as text: ``text/NAME.txt`` holds the graph before and after."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
from small import UNITS, capture, pipeline, plan_of, program_before, unit
from torch import nn

from partitioner.errors import PassError
from partitioner.pass_manager import run_passes
from partitioner.printer import print_program
from passes.attach_plan import AttachPlan
from passes.insert_reshard import InsertReshard
from passes.insert_unshard import InsertUnshard
from passes.markers import reduce_grad, reshard, unshard
from passes.registry import LOWER, PREPARE

TEXT = Path(__file__).parent / "text"
NAMES = [kind.name for kind in (*PREPARE, *LOWER)]


def text_of(name: str) -> str:
    """Before and after, costs shown where they are made."""
    program, item = program_before(name)
    costs = name == "annotate-costs"
    before = print_program(program)
    run_passes(program, [item], check_flags=True)
    return f"// before {name}\n{before}// after {name}\n{print_program(program, with_costs=costs)}"


@pytest.mark.parametrize("name", NAMES)
def test_pass_as_text(name: str) -> None:
    assert text_of(name) == (TEXT / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_pass_is_idempotent(name: str) -> None:
    program, item = program_before(name)
    assert run_passes(program, [item], check_flags=True)[0].changed
    again = run_passes(program, [item], check_flags=True)[0]
    assert not again.changed
    assert again.op_changes == ()


def test_every_pass_of_the_registry_is_in_the_pipeline() -> None:
    assert [item.name for item in pipeline()] == NAMES


def test_lowered_graph_computes_the_same_loss() -> None:
    """On one device the markers are identities."""
    plain, lowered = capture(), capture()
    run_passes(lowered, pipeline())
    generator = torch.Generator().manual_seed(0)
    weights = {p.name: torch.randn(p.shape, generator=generator).bfloat16() for p in plain.parameters}
    x = torch.randn(2, 4, generator=generator).bfloat16()
    losses = []
    for program in (plain, lowered):
        for name, value in weights.items():
            owner, _, attribute = name.rpartition(".")
            setattr(program.graph.get_submodule(owner), attribute, nn.Parameter(value))
        losses.append(program.graph(x))
    assert torch.equal(losses[0], losses[1])


def test_a_module_called_twice_is_gathered_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared(torch.relu(self.shared(x))).float().mean()

    from partitioner.capture.module import capture_module
    from partitioner.program import Recipe

    program = capture_module(Twice(), (torch.empty(2, 4),), {}, Recipe(), spec="twice")
    plan = plan_of((unit("shared", ("shared",), ("shared.weight",)),))
    run_passes(program, [AttachPlan(plan=plan), InsertUnshard(plan=plan), InsertReshard(plan=plan)])
    targets = [n.target for n in program.graph.graph.nodes if n.op == "call_function"]
    kinds = [t for t in targets if t in (unshard, reshard, torch.ops.aten.linear.default)]
    assert kinds == [unshard, torch.ops.aten.linear.default, reshard] * 2
    assert targets.count(operator.getitem) == 2


def test_frozen_parameters_have_no_reduction() -> None:
    from dataclasses import replace

    program = capture()
    frozen = [replace(p, trainable=p.name != "head.weight") for p in program.parameters]
    program.parameters = tuple(frozen)
    run_passes(program, pipeline())
    reduced = [n for n in program.graph.graph.nodes if n.target is reduce_grad]
    assert [n.args[0].target for n in reduced] == ["layers.0.up.weight", "layers.0.down.weight",
        "layers.1.up.weight", "layers.1.down.weight"]  # fmt: skip


def test_order_and_ownership_are_checked() -> None:
    plan = plan_of()
    with pytest.raises(PassError, match=r"insert-unshard: no operator carries a unit .*passes done: none"):
        run_passes(capture(), [InsertUnshard(plan=plan)])
    with pytest.raises(PassError, match="nothing is gathered"):
        run_passes(capture(), [AttachPlan(plan=plan), InsertReshard(plan=plan)])
    with pytest.raises(PassError, match=r"no unit of the plan gathers 'head.weight'"):
        run_passes(capture(), [AttachPlan(plan=plan_of(UNITS[:2]))])
    stranger = plan_of((*UNITS, unit("tail", ("tail",), ("tail.weight",))))
    with pytest.raises(PassError, match=r"gathers 'tail.weight', which this model does not have"):
        run_passes(capture(), [AttachPlan(plan=stranger)])
