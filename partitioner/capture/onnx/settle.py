"""From a lowered graph to a Program's tables: modules, and parameters and buffers under their final names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from partitioner.capture.onnx.builder import aten
from partitioner.capture.onnx.lowering import Lowering
from partitioner.capture.onnx.names import (
    Naming,
    as_parameter,
    clean,
    is_generated,
    merged_by_value,
    outermost,
    wanted_name,
)
from partitioner.capture.onnx.scopes import ROOT_PATH, ScopePath, common_path, find_scopes, module_tree, settle_calls
from partitioner.capture.onnx.stages import find_stages
from partitioner.program import Program, TensorInfo, dtype_name, update_info

INITIALIZERS = "initializer_of"
"""``GraphModule.meta`` key: final name of a parameter or buffer -> name of the tensor in the ONNX file."""


@dataclass
class _Record:
    """One storage on its way to the table."""

    name: str
    aliases: list[str]
    source: str
    node: fx.Node


@dataclass
class _Settling:
    program: Program
    lowering: Lowering
    operators: list[fx.Node]
    paths: dict[fx.Node, ScopePath] = field(default_factory=dict)
    scope: dict[fx.Node, str] = field(default_factory=dict)
    """Innermost module of each operator."""
    naming: Naming = field(default_factory=lambda: Naming(set()))
    records: list[_Record] = field(default_factory=list)
    buffers: list[tuple[str, str, fx.Node]] = field(default_factory=list)
    """(final name, ONNX name or nothing, node)"""
    merged: int = 0


def _operators(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.graph.nodes if n.op == "call_function"]


def _parameter_names(lowering: Lowering) -> dict[str, str]:
    """Temporary attribute -> ONNX name."""
    return {str(node.target): name for name, node in lowering.parameter_nodes.items()}


def _raw_reads(operators: Sequence[fx.Node], names: Mapping[str, str]) -> dict[fx.Node, list[str]]:
    found = {}
    for node in operators:
        read = [names[str(a.target)] for a in node.all_input_nodes if a.op == "get_attr" and str(a.target) in names]
        if read:
            found[node] = read
    return found


def _find_paths(settling: _Settling) -> tuple[dict[fx.Node, tuple[str, ...]], dict[str, str]]:
    """Module paths and class names; stages where the file names no modules at all."""
    lowering, operators = settling.lowering, settling.operators
    names = _parameter_names(lowering)
    reads = _raw_reads(operators, names)
    origin = {n: lowering.nodes[n.meta["onnx"]] for n in operators if "onnx" in n.meta}
    scopes = find_scopes(operators, origin, reads)
    if all(path == ROOT_PATH for path in scopes.paths.values()):
        sizes = {n: lowering.stored_of(n).nbytes for ns in reads.values() for n in ns}
        stages = find_stages([n for n in operators if n in origin], reads, sizes)
        for node, stage in stages.items():
            scopes.paths[node] = ("", stage)
        if stages:
            settling.program.defaults["modules"] = (
                f"{len(set(stages.values()))} consecutive stages, cut where a single value passes (the file names no modules)"
            )
    return scopes.paths, scopes.classes


def _role(node: fx.Node) -> str:
    """``bias`` for a vector that is added, else ``weight``."""
    value = node.meta["val"]
    user = next(iter(node.users), None)
    if user is None or value.dim() != 1:
        return "weight"
    added = user.target is aten.add.Tensor or (user.target is aten.addmm.default and user.args[0] is node)
    third = user.target in (aten.linear.default, aten.conv2d.default, aten.layer_norm.default) and node in user.args[2:]
    last = user.target is aten.layer_norm.default and len(user.args) > 3 and user.args[3] is node
    if user.target is aten.layer_norm.default:
        return "bias" if last else "weight"
    return "bias" if added or third else "weight"


def _readers_by_scope(settling: _Settling, node: fx.Node, name: str) -> dict[str, list[fx.Node]]:
    """Readers grouped by the modules that would each hold a copy of their own; one group if it is truly shared."""
    readers = [u for u in node.users if u in settling.scope]
    scopes = outermost(settling.scope[u] for u in readers)
    holder = name.rpartition(".")[0]
    passed_down = not is_generated(name) and all(holder == "" or s.startswith(holder + ".") for s in scopes)
    if len(scopes) < 2 or passed_down:
        return {scopes[0] if scopes else "": readers}
    return {
        scope: [u for u in readers if settling.scope[u] == scope or settling.scope[u].startswith(scope + ".")]
        for scope in scopes
    }


def _split(settling: _Settling, name: str, node: fx.Node) -> list[tuple[str, str, fx.Node]]:
    """(ONNX name, wanted name, node) for every tensor that the exporter merged into this one because they were equal."""
    groups = _readers_by_scope(settling, node, name)
    holder = name.rpartition(".")[0]
    keeper = holder if holder in groups else next(iter(groups))
    found = [(name, wanted_name(name, keeper, _role(node)), node)]
    last = node
    for scope, readers in groups.items():
        if scope == keeper:
            continue
        with settling.program.graph.graph.inserting_after(last):
            copy = settling.program.graph.graph.create_node("get_attr", f"{node.target}_{len(found)}")
        copy.meta["val"] = node.meta["val"]
        for reader in readers:
            reader.replace_input_with(node, copy)
        role = _role(copy) if is_generated(name) else clean(name).rpartition(".")[2]
        found.append((name, f"{scope}.{role}", copy))
        settling.merged += 1
        last = copy
    return found


def _name_parameters(settling: _Settling) -> None:
    """Decide which stored tensors are one storage, and name each."""
    lowering, graph = settling.lowering, settling.program.graph.graph
    names = _parameter_names(lowering)
    attributes = [n for n in graph.nodes if n.op == "get_attr" and str(n.target) in names and n.users]
    position = {n: i for i, n in enumerate(graph.nodes)}
    attributes.sort(key=lambda n: min(position[u] for u in n.users))
    wanted: list[tuple[str, str, fx.Node]] = []
    first: dict[str, int] = {}
    ties: dict[int, list[str]] = {}
    for node in attributes:
        name = names[str(node.target)]
        stored = lowering.stored_of(name)
        if merged_by_value(stored):
            settling.merged += name in lowering.copies
            wanted.extend(_split(settling, name, node))
        elif stored.name in first:
            ties.setdefault(first[stored.name], []).append(name)
            node.replace_all_uses_with(wanted[first[stored.name]][2])
            graph.erase_node(node)
        else:
            scope = next((settling.scope[u] for u in node.users if u in settling.scope), "")
            first[stored.name] = len(wanted)
            wanted.append((name, wanted_name(name, scope, _role(node)), node))
    order = sorted(
        range(len(wanted)), key=lambda i: (is_generated(wanted[i][0]), clean(wanted[i][0]) != wanted[i][0], i)
    )
    final = {i: settling.naming.give(wanted[i][1]) for i in order}
    for i, (name, _, node) in enumerate(wanted):
        aliases = [final[i], *(settling.naming.give(clean(alias)) for alias in ties.get(i, ()))]
        settling.records.append(_Record(final[i], aliases, lowering.copies.get(name, name), node))
    settling.records.sort(key=lambda r: min(position[u] for u in r.node.users))


def _common_scope(paths: Sequence[ScopePath]) -> str:
    """The innermost module that all are in."""
    return functools.reduce(common_path, paths)[-1] if paths else ""


def _name_buffers(settling: _Settling) -> None:
    lowering = settling.lowering
    parameters = {r.node for r in settling.records}
    for node in settling.program.graph.graph.nodes:
        if node.op != "get_attr" or node in parameters:
            continue
        lifted = lowering.build.lifted.get(str(node.target))
        origin = lowering.frozen[str(node.target)] if lifted is None else lifted.origin
        in_file = lifted is None or lifted.stored
        if in_file and not is_generated(origin):
            wanted = clean(origin)
        else:
            wanted = clean(re.sub(r"_output_\d+$", "", origin.rpartition("/")[2]).lower() or "constant")
            wanted = "constant" if is_generated(origin) and "/" not in origin else wanted
        if "." not in wanted:
            scope = _common_scope([settling.paths[u] for u in node.users if u in settling.paths])
            wanted = f"{scope}.{wanted}" if scope else wanted
        settling.buffers.append((settling.naming.give(wanted), origin if in_file else "", node))


def _assign(root: nn.Module, name: str, value: torch.Tensor, *, parameter: bool) -> None:
    *prefix, last = name.split(".")
    module = root
    for part in prefix:
        if not isinstance(getattr(module, part, None), nn.Module):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    if parameter:
        module.register_parameter(last, as_parameter(value))
    else:
        module.register_buffer(last, value)


def _write_tables(settling: _Settling) -> None:
    program, lowering = settling.program, settling.lowering
    temporary = {str(n.target): n for n in program.graph.graph.nodes if n.op == "get_attr"}
    held = {**lowering.build.attributes}
    for name in list(dict(program.graph.named_buffers(recurse=False))):
        delattr(program.graph, name)
    parameters, initializers = [], {}
    for record in settling.records:
        stored = lowering.model.stored[record.source]
        parameters.append(
            TensorInfo(
                name=record.name, aliases=tuple(record.aliases), shape=stored.shape,
                dtype=dtype_name(stored.dtype), trainable=True,
            )
        )  # fmt: skip
        initializers[record.name] = record.source
        _assign(program.graph, record.name, record.node.meta["val"], parameter=True)
        record.node.target = record.name
    buffers = []
    for name, origin, node in settling.buffers:
        value = held[str(node.target)]
        buffers.append(TensorInfo(name=name, aliases=(name,), shape=tuple(value.shape), dtype=dtype_name(value.dtype)))
        if origin:
            initializers[name] = origin
        _assign(program.graph, name, value, parameter=False)
        node.target = name
    assert len(temporary) == len(parameters) + len(buffers)
    program.parameters, program.buffers = tuple(parameters), tuple(buffers)
    program.graph.meta[INITIALIZERS] = initializers


def settle(program: Program, lowering: Lowering) -> None:
    """Name and number everything; afterwards the program is complete."""
    settling = _Settling(program, lowering, _operators(program))
    paths, classes = _find_paths(settling)
    settling.paths = dict(paths)
    settling.scope = {node: path[-1] for node, path in paths.items()}
    settling.naming.modules.update(name for path in paths.values() for name in path)
    _name_parameters(settling)
    _name_buffers(settling)
    names = {str(r.node.target): r.name for r in settling.records}
    reads = {n: tuple(r) for n, r in _raw_reads(settling.operators, names).items()}
    _write_tables(settling)
    sizes = {p.name: p.nbytes for p in program.parameters}
    stacks = settle_calls(settling.operators, paths, reads, sizes)
    entered = dict.fromkeys(name for node in settling.operators for name, _ in stacks[node])
    tensors = [i.name for i in (*program.parameters, *program.buffers)]
    program.modules = module_tree(list(entered), tensors, classes)
    for node in settling.operators:
        node.meta["module_stack"] = stacks[node]
        update_info(node, module=stacks[node][-1][0], call=stacks[node][-1][1], reads=reads.get(node, ()))
    if settling.merged:
        program.defaults["equal weights"] = (
            f"{settling.merged} tensors that the exporter stored once because their values were equal have a copy of their own"
        )
