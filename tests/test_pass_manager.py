"""The runner holds passes to their word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from partitioner.capture.module import capture_module
from partitioner.errors import PassError
from partitioner.pass_manager import Pass, run_passes
from partitioner.program import Program, Recipe, update_info


def program() -> Program:
    return capture_module(nn.Linear(4, 2), (torch.empty(3, 4),), {}, Recipe(loss="mse"), spec="linear")


@dataclass(frozen=True, kw_only=True)
class Idle(Pass):
    name: ClassVar[str] = "idle"

    def run(self, program: Program) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Liar(Pass):
    """Does nothing and says it did."""

    name: ClassVar[str] = "liar"

    def run(self, program: Program) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Secretive(Pass):
    """Renames a module and says nothing."""

    name: ClassVar[str] = "secretive"

    def run(self, program: Program) -> bool:
        node = next(n for n in program.graph.graph.nodes if n.op == "call_function")
        update_info(node, module="elsewhere")
        return False


@dataclass(frozen=True, kw_only=True)
class Vandal(Pass):
    """Points a get_attr at nothing."""

    name: ClassVar[str] = "vandal"

    def run(self, program: Program) -> bool:
        next(n for n in program.graph.graph.nodes if n.op == "get_attr").target = "nowhere"
        return True


@dataclass(frozen=True, kw_only=True)
class Doubler(Pass):
    """Adds one operator."""

    name: ClassVar[str] = "doubler"

    def run(self, program: Program) -> bool:
        graph = program.graph.graph
        output = next(n for n in graph.nodes if n.op == "output")
        with graph.inserting_before(output):
            node = graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0], 2))
        node.meta["val"] = output.args[0].meta["val"]
        output.args = (node,)
        return True


def test_flags_are_checked_in_both_directions() -> None:
    for item in (Liar(), Secretive()):
        with pytest.raises(PassError, match=rf"pass {item.name} says changed="):
            run_passes(program(), [Idle(), item], check_flags=True)


def test_broken_graph_names_pass_node_and_neighbours() -> None:
    with pytest.raises(PassError) as caught:
        run_passes(program(), [Idle(), Vandal()])
    text = str(caught.value)
    assert text.startswith("pass vandal: weight: 'nowhere' is not the name of a parameter or buffer")
    assert "--> %weight : bf16[2,4] = parameter nowhere" in text
    assert "passes done: idle" in text


def test_records_say_what_changed_and_observers_see_every_pass() -> None:
    seen = []
    records = run_passes(program(), [Idle(), Doubler()], observer=lambda name, _: seen.append(name))
    assert seen == ["idle", "doubler"]
    assert [(r.changed, r.op_changes) for r in records] == [(False, ()), (True, (("aten.mul", 1),))]
