"""Program -> StepTable: the annotated graph as plain tables, which is all that planning sees of it."""

from __future__ import annotations

import torch
from torch import fx

from partitioner.planner.step import Group, Op, Parameter, StepTable, Storage
from partitioner.printer import target_name
from partitioner.program import Program, TensorInfo, dtype_of, node_info

NS = 1_000_000_000


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NS)


def tokens_per_micro_batch(program: Program) -> int:
    """Sequence positions of one micro-batch, where the model reads integers of at least two dims; else samples.

    A language model's token ids are such integers (batch, seq); an image model's input is floating (batch, ...).
    """
    values = [n.meta["val"] for n in program.graph.graph.nodes if n.op == "placeholder" and "val" in n.meta]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim()]
    ids = [v for v in tensors if not v.is_floating_point() and v.dtype is not torch.bool and v.dim() > 1]
    if ids:
        return int(ids[0].shape[0] * ids[0].shape[1])
    return int(tensors[0].shape[0]) if tensors else 1


def _parameter(info: TensorInfo, compute_itemsize: int) -> Parameter:
    floating = dtype_of(info.dtype).is_floating_point
    return Parameter(
        name=info.name,
        shape=info.shape,
        itemsize=info.itemsize,
        compute_itemsize=compute_itemsize if floating else info.itemsize,
        trainable=info.trainable,
    )


def _storages(program: Program, position: dict[str, int]) -> tuple[tuple[Storage, ...], dict[str, int]]:
    needs_grad = {n.name: node_info(n).needs_grad for n in program.graph.graph.nodes}
    made = []
    for info in program.storages.values():
        only_saved = info.name.rpartition(".")[2].startswith("saved") and info.name != info.producer
        made.append(
            Storage(
                nbytes=info.nbytes,
                producer=position.get(info.producer, -1),
                carries_grad=bool(info.producer) and needs_grad[info.producer] and not only_saved,
            )
        )
    return tuple(made), {name: i for i, name in enumerate(program.storages)}


def make_step(program: Program) -> StepTable:
    """Tables of one training step, after annotate-costs and find-units."""
    nodes: list[fx.Node] = [n for n in program.graph.graph.nodes if n.op == "call_function"]
    position = {n.name: i for i, n in enumerate(nodes)}
    storages, number = _storages(program, position)
    table = {p.name: i for i, p in enumerate(program.parameters)}
    compute_itemsize = dtype_of(program.recipe.compute_dtype).itemsize
    ops = []
    for node in nodes:
        info = node_info(node)
        read = [s for a in node.all_input_nodes for s in _outputs_of(a)]
        ops.append(
            Op(
                name=node.name,
                target=target_name(node),
                window=info.atom,
                modules=tuple(name for name, _ in node.meta.get("module_stack", ())),
                needs_grad=info.needs_grad,
                forward_ns=_nanoseconds(info.forward_s),
                backward_ns=_nanoseconds(info.backward_s) if info.needs_grad else 0,
                forward_temp_bytes=info.forward_temp_bytes,
                backward_temp_bytes=info.backward_temp_bytes,
                reads=tuple(table[name] for name in info.reads if name in table),
                inputs=tuple(dict.fromkeys(number[s] for s in read)),
                outputs=tuple(number[s] for s in info.outputs),
                saves=tuple(number[s] for s in info.saves),
            )
        )
    return StepTable(
        windows=program.windows,
        ops=tuple(ops),
        storages=storages,
        parameters=tuple(_parameter(p, compute_itemsize) for p in program.parameters),
        groups=tuple(
            Group(
                name=g.name,
                modules=g.modules,
                parameters=tuple(table[p] for p in g.parameters),
                calls=g.calls,
                level=g.level,
            )
            for g in program.groups
        ),
        buffer_bytes=sum(b.nbytes for b in program.buffers),
        input_bytes=sum(s.nbytes for s in program.storages.values() if not s.producer),
        reduce_itemsize=dtype_of(program.recipe.reduce_dtype).itemsize,
        forward_flop=sum(node_info(n).forward_flop for n in nodes),
        backward_flop=sum(node_info(n).backward_flop for n in nodes if node_info(n).needs_grad),
        tokens=tokens_per_micro_batch(program),
    )


def _outputs_of(node: fx.Node) -> tuple[str, ...]:
    """Activation storages of an argument: a model input's own, or what its operator returned."""
    return (node.name,) if node.op == "placeholder" else node_info(node).outputs
