"""What every door does to a captured graph: canonical attribute names, module stacks, one loss output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx
from torch.utils import _pytree as pytree

from partitioner.capture.loss import OutputNames, attach_loss
from partitioner.capture.regions import flatten_regions
from partitioner.capture.table import tensor_table
from partitioner.errors import UnsupportedError
from partitioner.program import Program, update_info


def _plain_code(graph: fx.GraphModule) -> None:
    """Drop torch.export's pytree wrapping: inputs and outputs are flat from here on."""
    graph.graph.set_codegen(fx.graph.CodeGen())


def merge_attributes(program: Program) -> None:
    """One ``get_attr`` node for each unique storage, under its canonical name; constants that export lifted become buffers."""
    graph = program.graph.graph
    canonical = {alias: info.name for info in (*program.parameters, *program.buffers) for alias in info.aliases}
    first: dict[str, fx.Node] = {}
    constants = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        name = canonical.get(str(node.target))
        if name is None:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            name = str(node.target)
            constants.append((name, value))
            canonical[name] = name
        if name in first:
            node.replace_all_uses_with(first[name])
            graph.erase_node(node)
        else:
            node.target = name
            first[name] = node
    program.buffers = (*program.buffers, *tensor_table(constants, parameters=False))


def refuse_symbolic(program: Program) -> None:
    """Sizes that depend on values (``nonzero``, boolean indexing) have no bytes to plan with."""
    for node in program.graph.graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            sizes = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else (leaf,)
            if any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes):
                stack = list((node.meta.get("nn_module_stack") or {}).values())
                raise UnsupportedError(
                    f"{node.target} in module {(stack[-1][0] if stack else '') or 'root'} makes a size that depends on values",
                    hint="use a formulation with fixed sizes, such as a capacity or a mask",
                )


class _Calls:
    """Numbers the calls of modules that have several names; torch.export counts each name's calls from zero."""

    def __init__(self, canonical: Mapping[str, str]) -> None:
        self.canonical = canonical
        self.shared = {name for name, count in Counter(canonical.values()).items() if count > 1}
        self.seen: dict[str, dict[tuple[str, int], int]] = {}

    def of(self, name: str, call: int) -> tuple[str, int]:
        """(canonical name, number of the call among the calls under all its names)."""
        first = self.canonical.get(name, name)
        if first not in self.shared:
            return first, call
        calls = self.seen.setdefault(first, {})
        return first, calls.setdefault((name, call), len(calls))


def record_modules(program: Program, canonical: Mapping[str, str]) -> None:
    """Write each node's module stack and the parameters it reads.

    torch.export marks the n-th call of a module with ``@n`` in the key of its stack.
    """
    parameters = {p.name for p in program.parameters}
    calls = _Calls(canonical)
    for node in program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        stack: list[tuple[str, int]] = [("", 0)]
        for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
            if name:
                _, marked, call = str(key).rpartition("@")
                stack.append(calls.of(name, int(call) if marked and call.isdigit() else 0))
        node.meta["module_stack"] = tuple(stack)
        reads = tuple(
            dict.fromkeys(str(a.target) for a in node.all_input_nodes if a.op == "get_attr" and a.target in parameters)
        )
        update_info(node, module=stack[-1][0], call=stack[-1][1], reads=reads)


def finish(program: Program, outputs: OutputNames, module_names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Bring a freshly exported graph into the form that passes work on.

    Args:
        program: changed in place.
        outputs: names of the model's outputs, to find the loss by.
        module_names: other names of a module -> the one that ``program.modules`` has it under.
    """
    _plain_code(program.graph)
    flatten_regions(program.graph)
    refuse_symbolic(program)
    merge_attributes(program)
    attach_loss(program, outputs)
    record_modules(program, module_names)
    program.graph.graph.eliminate_dead_code()
    program.graph.recompile()
