"""What one forward operator costs, found by running it as eager autograd would, on fake cpu tensors.

Nothing is computed: the operator and then its own backward run under a mode that sees every aten call below autograd and
counts FLOPs, bytes, kernels and live storages, while saved-tensor hooks tell what autograd keeps. So the numbers hold for
any operator that torch has, and follow torch when it changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.cost.flop import count_flop, dominant_class, kernel_class

aten = torch.ops.aten

_ALLOCATIONS = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.empty_permuted}
)  # reserve memory, write nothing


@dataclass(frozen=True, kw_only=True)
class Work:
    """One direction of one operator."""

    flop: int = 0
    nbytes: int = 0  # read and written, summed over kernels
    kernels: int = 0
    temp_bytes: int = 0  # largest live bytes beyond inputs, outputs and what is saved
    kernel_classes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StorageRef:
    """A storage as one operator sees it: that of its n-th tensor input, or the n-th that it makes."""

    kind: Literal["input", "new"]
    index: int


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """What an operator does to time and memory. Everything is relative, so equal operators share one record."""

    op_class: str
    forward: Work
    backward: Work
    needs_grad: bool
    outputs: tuple[StorageRef | None, ...]  # one per flat output; None where it is not a tensor
    outputs_need_grad: tuple[bool, ...]
    new_bytes: tuple[int, ...]  # sizes of the storages that it makes and that outlive it
    num_output_storages: int  # how many of those hold outputs; the others exist only for the backward
    saved: tuple[StorageRef, ...]  # what autograd keeps


@dataclass(frozen=True)
class TensorSpec:
    """All that matters about a tensor input."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(value: torch.Tensor, *, requires_grad: bool) -> TensorSpec:
        return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, requires_grad)


@dataclass(frozen=True)
class Slot:
    """Stands in the arguments for the n-th tensor input."""

    index: int


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole storage that a tensor lives in."""
    return int(tensor.untyped_storage().nbytes())


def _touched_bytes(tensor: torch.Tensor) -> int:
    """What a kernel moves for a tensor: an expanded one is read once."""
    return min(tensor.numel() * tensor.itemsize, storage_bytes(tensor))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Counts every aten call below autograd, and the storages that are alive."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop = self.nbytes = self.kernels = 0
        self.classes: set[str] = set()
        self._known = {_address(t) for t in known}
        self._alive: dict[int, int] = {}
        self._serial = 0
        self._live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = _tensors((args, kwargs))
        read_from = {_address(t) for t in before}
        out = func(*args, **kwargs)
        made = _tensors(out)
        if made:
            view = not func._schema.is_mutable and all(_address(t) in read_from for t in made)
            if not view and func._overloadpacket not in _ALLOCATIONS:
                self.flop += count_flop(func, args, kwargs, out)
                self.nbytes += sum(_touched_bytes(t) for t in (*before, *made))
                self.kernels += 1
                self.classes.add(kernel_class(func))
            for tensor in made:
                self._track(tensor)
        return out

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = _address(tensor)
        if address in self._known or address in self._alive:
            return
        self._alive[address] = storage.nbytes()
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._freed, address)

    def _freed(self, address: int) -> None:
        self._live_bytes -= self._alive.pop(address, 0)

    def work(self, lasting_bytes: int) -> Work:
        return Work(
            flop=self.flop,
            nbytes=self.nbytes,
            kernels=self.kernels,
            temp_bytes=max(self.peak_bytes - lasting_bytes, 0),
            kernel_classes=frozenset(self.classes),
        )


def _fused_rms_norm(
    value: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    out: torch.Tensor = aten.native_layer_norm.default(value, shape, weight, None, eps or 0.0)[0]
    return out


def as_accelerator_runs(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Replace the few operators that torch runs by another algorithm on cpu than on an accelerator.

    Attention with dropout leaves the fused kernel on cpu only, and would then save the whole score matrix; dropout keeps
    a mask of the activation's dtype on cpu and of bool elsewhere (``native_dropout``). ``rms_norm`` is one kernel
    elsewhere that keeps its input and one factor a row (``_fused_rms_norm``), and a chain of float32 temporaries on cpu;
    layer norm stands in for it, with the same reads and writes and one more number a row.
    """
    if target is aten.scaled_dot_product_attention.default:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return target, args, {k: v for k, v in kwargs.items() if k != "dropout_p"}
    if target is aten.dropout.default and len(args) == 3 and args[2] and args[1] > 0:
        return (lambda *a: aten.native_dropout.default(*a)[0]), args, kwargs
    if target is aten.rms_norm.default:
        return _fused_rms_norm, args, kwargs
    return target, args, kwargs


def _make_inputs(specs: Sequence[TensorSpec], *, leaves: bool) -> list[torch.Tensor]:
    """Fake tensors; ones that autograd lets operators write to if ``leaves`` is false."""
    made = []
    for spec in specs:
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
        if spec.requires_grad:
            tensor.requires_grad_(True)
            if not leaves:
                base = tensor
                tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu").copy_(base)
        made.append(tensor)
    return made


def _writes_inputs(target: Callable[..., Any]) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


class _Storages:
    """Turns tensors into StorageRefs, and numbers the new ones."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._refs: dict[int, StorageRef] = {}
        for i, tensor in enumerate(inputs):
            self._refs.setdefault(_address(tensor), StorageRef("input", i))
        self.new_bytes: list[int] = []

    def ref(self, tensor: torch.Tensor) -> StorageRef:
        address = _address(tensor)
        if address not in self._refs:
            self._refs[address] = StorageRef("new", len(self.new_bytes))
            self.new_bytes.append(storage_bytes(tensor))
        return self._refs[address]


def _run_backward(differentiable: list[torch.Tensor], edges: list[Any], alive: list[torch.Tensor]) -> Work:
    cotangents = [torch.empty_like(t) for t in differentiable]
    counter = _Counter([*alive, *cotangents])
    known = {_address(t) for t in (*alive, *cotangents)}
    with counter:
        gradients = torch.autograd.grad(differentiable, edges, cotangents, allow_unused=True)
    outgoing = {_address(g): storage_bytes(g) for g in gradients if g is not None}
    return counter.work(sum(n for address, n in outgoing.items() if address not in known))


def measure(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[TensorSpec],
    *,
    grad_enabled: bool = True,
    autocast: tuple[str, torch.dtype, bool] | None = None,
) -> OperatorCost:
    """Run one operator and its backward.

    Args:
        target: an aten operator, or anything callable that dispatches to some.
        args: positional arguments with a ``Slot`` wherever a tensor goes.
        kwargs: keyword arguments likewise.
        inputs: the tensors, by slot.
        grad_enabled: False inside ``torch.no_grad``.
        autocast: (device type, dtype, enabled) inside ``torch.autocast``.

    Raises:
        RuntimeError: torch cannot run the operator on fake tensors, or has no derivative for it.
    """
    target, args, kwargs = as_accelerator_runs(target, args, kwargs)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.set_grad_enabled(True))
        tensors = _make_inputs(inputs, leaves=not _writes_inputs(target))
        wanted = [t for t in tensors if t.requires_grad]
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in wanted]
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        filled_args, filled_kwargs = pytree.tree_map_only(Slot, lambda s: tensors[s.index], (args, kwargs))
        counter = _Counter(tensors)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        if autocast is not None:
            stack.enter_context(torch.autocast(autocast[0], dtype=autocast[1], enabled=autocast[2]))
        with torch.set_grad_enabled(grad_enabled), hooks, counter:
            out = target(*filled_args, **filled_kwargs)
        storages = _Storages(tensors)
        flat = pytree.tree_leaves(out, is_leaf=lambda x: x is None)
        outputs = tuple(storages.ref(t) if isinstance(t, torch.Tensor) else None for t in flat)
        num_output_storages = len(storages.new_bytes)
        saved = tuple(dict.fromkeys(storages.ref(t) for t in kept))
        needs = tuple(isinstance(t, torch.Tensor) and t.requires_grad for t in flat)
        forward = counter.work(sum(storages.new_bytes))
        # An output without a grad_fn is the input itself (``to`` of the dtype it has): nothing runs backward.
        differentiable = [t for t, need in zip(flat, needs, strict=True) if need and t.grad_fn is not None]
        backward = Work()
        if differentiable:
            backward = _run_backward(differentiable, edges, [*tensors, *_tensors(out), *kept])
        return OperatorCost(
            op_class=dominant_class(set(forward.kernel_classes)),
            forward=forward,
            backward=backward,
            needs_grad=any(needs),
            outputs=outputs,
            outputs_need_grad=needs,
            new_bytes=tuple(storages.new_bytes),
            num_output_storages=num_output_storages,
            saved=saved,
        )
