"""A copy of the user's model on fake cpu tensors, and copies of its inputs: what is traced instead of the model itself."""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import _trace
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partitioner.capture.table import storage_key
from partitioner.errors import CaptureError


def compute_dtype_of(tensor: torch.Tensor, compute_dtype: torch.dtype) -> torch.dtype:
    """FSDP2's mixed precision casts floating parameters and inputs; everything else keeps its dtype."""
    return compute_dtype if tensor.is_floating_point() else tensor.dtype


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        if tensor.layout != torch.strided:
            return torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")


class _FakeCopies(TorchFunctionMode):
    """Makes ``copy.deepcopy`` of a tensor fake: tensors that a module holds as plain attributes are not materialised."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = _empty_like(tensor, tensor.dtype, self.mode)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def fake_twin(module: nn.Module, mode: FakeTensorMode, compute_dtype: torch.dtype) -> nn.Module:
    """A deep copy of the module on fake cpu tensors; the original is neither changed nor materialised.

    Fake *cpu* tensors, because on ``meta`` torch picks another attention, which saves five times the memory. Parameters
    take the compute dtype (that is what a gathered parameter has); buffers keep theirs. Names of one storage share one
    fake tensor.

    Raises:
        CaptureError: the module holds something that cannot be copied.
    """
    fakes: dict[tuple[object, ...], torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        key = ("parameter", *storage_key(parameter))
        if key not in fakes:
            made = _empty_like(parameter, compute_dtype_of(parameter, compute_dtype), mode)
            fakes[key] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        memo[id(parameter)] = fakes[key]
    for buffer in module.buffers():
        key = ("buffer", *storage_key(buffer))
        if key not in fakes:
            fakes[key] = _empty_like(buffer, buffer.dtype, mode)
        memo[id(buffer)] = fakes[key]
    try:
        with _FakeCopies(mode):
            twin: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}",
            hint="the copy is what gets traced; keep locks, files and process groups out of the module's attributes",
        ) from error
    return twin


def fake_inputs(values: Any, mode: FakeTensorMode, compute_dtype: torch.dtype) -> Any:
    """Example inputs as fake cpu tensors of the same strides, floating ones in the compute dtype (FSDP2 casts them so)."""

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _empty_like(value, compute_dtype_of(value, compute_dtype), mode)

    return pytree.tree_map(fake, values)


def plain_output(value: Any) -> Any:
    """A model's return value in tuples and dicts only; what is neither a tensor nor a container of some becomes None.

    torch.export knows no other containers, and what a model returns beside tensors does not matter to training.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain_output(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_output(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return tuple(plain_output(v) for v in value)
    return None


def leave_export_mode(twin: nn.Module) -> None:
    """Hooks for the twin's root: plain outputs, and the code path of an eager run.

    Some libraries ask ``torch.compiler.is_exporting()`` and then build explicit attention masks, repeat key and value
    heads, or keep caches, none of which a training step does. FSDP2 runs the module eagerly, so that is what to measure.
    """
    before: list[bool] = []

    def enter(*_: Any) -> None:
        before.append(torch.compiler._is_exporting_flag)
        torch.compiler._is_exporting_flag = False

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        torch.compiler._is_exporting_flag = before.pop()
        return plain_output(output)

    twin.register_forward_pre_hook(enter)
    twin.register_forward_hook(leave)


@contextmanager
def quiet_export() -> Iterator[None]:
    """While this is active, torch.export does not print the graph it got to when it fails; the error says what matters."""
    trace = vars(_trace)
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    trace["print"] = lambda *_, **__: None  # found before the builtin
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        del trace["print"]
        logger.setLevel(level)


@contextmanager
def see_through_checkpoints() -> Iterator[list[str]]:
    """While this is active, ``torch.utils.checkpoint`` just calls its function; yields what it was called with.

    torch.export would trace through the newer variant without a trace of it, and through the older one as if its
    operators had no gradient.
    """
    noted: list[str] = []
    names = vars(torch.utils.checkpoint)
    originals = {name: names[name] for name in ("_checkpoint_without_reentrant_generator", "CheckpointFunction")}

    def around(function: Callable[..., Any], *_: Any, **__: Any) -> Iterator[None]:
        noted.append(type(function).__name__)
        yield  # the function runs here

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        noted.append(type(function).__name__)
        return function(*args)

    names["_checkpoint_without_reentrant_generator"] = around
    names["CheckpointFunction"] = SimpleNamespace(apply=apply)
    try:
        yield noted
    finally:
        names.update(originals)


@contextmanager
def one_sequence_per_row() -> Iterator[list[str]]:
    """While this is active, transformers takes each row of a batch for one sequence; yields the assumptions made.

    transformers looks for packed sequences by the *values* of the position ids, finds none in an eager run, and then
    lets attention be causal without a mask. Fake tensors have no values, so there it would build the mask.
    """
    assumed: list[str] = []
    module = sys.modules.get("transformers.masking_utils")
    original = getattr(module, "find_packed_sequence_indices", None)
    if module is None or original is None:
        yield assumed
        return

    def none_packed(*_: Any, **__: Any) -> None:
        assumed.append("each row of the batch is one sequence (no packing)")

    vars(module)["find_packed_sequence_indices"] = none_packed
    try:
        yield assumed
    finally:
        vars(module)["find_packed_sequence_indices"] = original
