"""Give every operator its costs, and the program its table of activation storages."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from partitioner.cost.measure import OperatorCost, Slot, StorageRef, TensorSpec, measure, storage_bytes
from partitioner.errors import PassError
from partitioner.pass_manager import Pass
from partitioner.program import INFO, Program, StorageInfo, dtype_name, node_info, update_info

Clock = Callable[[str, str, int, int, int], float]
"""(op_class, dtype, flop, bytes, kernels) -> seconds."""


@dataclass(frozen=True)
class _Value:
    """One tensor: the activation storage it lives in (None: a parameter's or a buffer's), and whether gradients reach it."""

    storage: str | None
    needs_grad: bool


@dataclass
class _Walk:
    """What is known after some prefix of the graph."""

    values: dict[fx.Node, tuple[_Value | None, ...]] = field(default_factory=dict)
    storages: dict[str, StorageInfo] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()  # every name of every trainable parameter
    measured: dict[object, OperatorCost] = field(default_factory=dict)
    readers: set[tuple[fx.Node, int]] = field(default_factory=set)  # tensors that some operator sends a gradient to


def _leaves(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves(node.meta.get("val"), is_leaf=lambda x: x is None)


def _enter(node: fx.Node, walk: _Walk) -> None:
    """A model input, parameter or buffer."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        walk.values[node] = (None,)
    elif node.op == "placeholder":
        walk.storages[node.name] = StorageInfo(name=node.name, nbytes=storage_bytes(value), producer="")
        walk.values[node] = (_Value(node.name, False),)
    else:
        trainable = str(node.target) in walk.trainable and value.is_floating_point()
        walk.values[node] = (_Value(None, trainable),)


@dataclass
class _Call:
    """One operator's arguments, tensors replaced by slots, and the tensors by slot."""

    args: Any = ()
    kwargs: Any = None
    sources: list[tuple[fx.Node, int]] = field(default_factory=list)  # (node, which of its outputs)
    specs: list[TensorSpec] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)


def _describe(node: fx.Node, walk: _Walk) -> _Call:
    call = _Call()
    slots: dict[tuple[fx.Node, int], Slot] = {}

    def place(argument: fx.Node) -> Any:
        leaves, known = _leaves(argument), walk.values[argument]
        filled = []
        for i, (leaf, value) in enumerate(zip(leaves, known, strict=True)):
            if value is None:
                filled.append(leaf)
                continue
            if (argument, i) not in slots:
                slots[argument, i] = Slot(len(call.specs))
                call.sources.append((argument, i))
                call.specs.append(TensorSpec.of(leaf, requires_grad=value.needs_grad))
                call.values.append(value)
            filled.append(slots[argument, i])
        spec = pytree.tree_structure(argument.meta.get("val"), is_leaf=lambda x: x is None)
        return pytree.tree_unflatten(filled, spec)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), place)
    call.args, call.kwargs = args, dict(kwargs)
    return call


def _measure(node: fx.Node, call: _Call, walk: _Walk) -> OperatorCost:
    grad_enabled = not node.meta.get("no_grad", False)
    autocast = node.meta.get("autocast")
    key = (node.target, repr((call.args, call.kwargs)), tuple(call.specs), grad_enabled, autocast)
    if key not in walk.measured:
        try:
            walk.measured[key] = measure(
                node.target,  # type: ignore[arg-type]  # the target of a call_function is callable
                call.args,
                call.kwargs,
                call.specs,
                grad_enabled=grad_enabled,
                autocast=autocast,
            )
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise PassError(
                f"cannot run {node.target} ({node.name}, in module {node_info(node).module or 'root'}) on fake tensors: {first}",
                hint="an operator needs a fake (meta) kernel, and a derivative if gradients flow through it",
            ) from error
    return walk.measured[key]


def _storage_names(node: fx.Node, cost: OperatorCost) -> list[str]:
    """Names of the storages that an operator makes: its own name, numbered if several; then what only its backward reads."""
    count = cost.num_output_storages
    outputs = [node.name] if count == 1 else [f"{node.name}.{i}" for i in range(count)]
    return outputs + [f"{node.name}.saved{i}" for i in range(len(cost.new_bytes) - count)]


def _accumulation(call: _Call, cost: OperatorCost, walk: _Walk) -> tuple[int, int]:
    """(bytes, kernels) of adding this operator's gradients to those that other readers of its inputs send.

    Autograd sums the gradients of a tensor with n readers by n - 1 additions: two reads and one write each.
    """
    nbytes = kernels = 0
    for source, spec in zip(call.sources, call.specs, strict=True):
        if not cost.needs_grad or not spec.requires_grad:
            continue
        if source in walk.readers:
            nbytes += 3 * torch.Size(spec.shape).numel() * spec.dtype.itemsize
            kernels += 1
        walk.readers.add(source)
    return nbytes, kernels


def _clock_dtype(node: fx.Node, specs: list[TensorSpec]) -> str:
    """The dtype whose peak rate applies: that of the first floating input, else of the output."""
    for spec in specs:
        if spec.dtype.is_floating_point:
            return dtype_name(spec.dtype)
    made = [leaf for leaf in _leaves(node) if isinstance(leaf, torch.Tensor)]
    return dtype_name(made[0].dtype) if made else "float32"


def _pick(node: fx.Node, walk: _Walk) -> None:
    """``getitem``: one of the values of an operator that returns several."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    value = walk.values[source][index]  # type: ignore[index]  # an integer
    walk.values[node] = (value,)
    names = (value.storage,) if value is not None and value.storage is not None else ()
    update_info(node, op_class="view", needs_grad=value is not None and value.needs_grad, outputs=names)


@dataclass(frozen=True, kw_only=True)
class AnnotateCosts(Pass):
    """Fill the cost fields of every NodeInfo, and ``Program.storages``.

    Each operator runs once on fake tensors with its own backward; equal operators on equal shapes are measured once.
    ``clock`` turns the counts into seconds.
    """

    name: ClassVar[str] = "annotate-costs"
    clock: Clock

    def requires(self, program: Program) -> None:
        for node in program.graph.graph.nodes:
            if node.op in ("call_module", "call_method"):
                raise PassError(f"{node.name} is a {node.op}; every operator must be a function by now")
            if node.op in ("call_function", "get_attr", "placeholder") and "val" not in node.meta:
                raise PassError(f"{node.name} has no fake value", hint="every door of capture records one")

    def run(self, program: Program) -> bool:
        before = (dict(program.storages), [n.meta.get(INFO) for n in program.graph.graph.nodes])
        walk = _Walk(trainable=frozenset(name for p in program.parameters if p.trainable for name in p.aliases))
        for node in program.graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                _enter(node, walk)
            elif node.op == "call_function" and node.target is operator.getitem:
                _pick(node, walk)
            elif node.op == "call_function":
                self._annotate(node, walk)
        program.storages = walk.storages
        return before != (program.storages, [n.meta.get(INFO) for n in program.graph.graph.nodes])

    def _annotate(self, node: fx.Node, walk: _Walk) -> None:
        call = _describe(node, walk)
        cost = _measure(node, call, walk)
        names = _storage_names(node, cost)
        for name, nbytes in zip(names, cost.new_bytes, strict=True):
            walk.storages[name] = StorageInfo(name=name, nbytes=nbytes, producer=node.name)

        def name_of(ref: StorageRef) -> str | None:
            return names[ref.index] if ref.kind == "new" else call.values[ref.index].storage

        walk.values[node] = tuple(
            None if ref is None else _Value(name_of(ref), need)
            for ref, need in zip(cost.outputs, cost.outputs_need_grad, strict=True)
        )
        outputs = dict.fromkeys(v.storage for v in walk.values[node] if v is not None and v.storage is not None)
        saves = dict.fromkeys(n for ref in cost.saved if (n := name_of(ref)) is not None)
        added_bytes, added_kernels = _accumulation(call, cost, walk)
        forward, backward, dtype = cost.forward, cost.backward, _clock_dtype(node, call.specs)
        backward_bytes, backward_kernels = backward.nbytes + added_bytes, backward.kernels + added_kernels
        update_info(
            node,
            needs_grad=cost.needs_grad,
            op_class=cost.op_class,
            forward_flop=forward.flop,
            forward_bytes=forward.nbytes,
            forward_kernels=forward.kernels,
            forward_temp_bytes=forward.temp_bytes,
            backward_flop=backward.flop,
            backward_bytes=backward_bytes,
            backward_kernels=backward_kernels,
            backward_temp_bytes=backward.temp_bytes,
            outputs=tuple(outputs),
            saves=tuple(saves),
            forward_s=self.clock(cost.op_class, dtype, forward.flop, forward.nbytes, forward.kernels),
            backward_s=self.clock(cost.op_class, dtype, backward.flop, backward_bytes, backward_kernels),
        )
