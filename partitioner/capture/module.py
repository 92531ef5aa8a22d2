"""``nn.Module`` -> Program, by torch.export on fake cpu tensors."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from partitioner.capture.graph import finish
from partitioner.capture.loss import OutputNames
from partitioner.capture.table import module_names, module_table, tensor_table
from partitioner.capture.twin import (
    fake_inputs,
    fake_twin,
    leave_export_mode,
    one_sequence_per_row,
    quiet_export,
    see_through_checkpoints,
)
from partitioner.errors import CaptureError, UsageError
from partitioner.program import Program, Recipe, Source, dtype_of, node_info


def refuse_untrainable(module: nn.Module) -> None:
    """What FSDP2 cannot train is refused now, by name, rather than in the first backward."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise UsageError(
                f"{name or 'the model'} is an embedding with sparse=True; FSDP2 cannot reduce sparse gradients",
                hint="build it with sparse=False",
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UsageError(f"parameter {name} has no shape yet", hint="run the lazy module once in the factory")
        if not parameter.is_contiguous() and parameter.layout == torch.strided:
            raise UsageError(
                f"parameter {name} is not contiguous (shape {tuple(parameter.shape)}, stride {parameter.stride()}); FSDP2 refuses it",
                hint="make it contiguous in the factory",
            )


_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def _user_line(error: BaseException) -> str:
    """File and line of the user's code that the trace was in."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _export(twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: str) -> fx.GraphModule:
    exporting = torch.compiler._is_exporting_flag
    try:
        with quiet_export():
            program = torch.export.export(twin, args, kwargs, strict=False)
        module = program.module(check_guards=False)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CaptureError(
            f"{spec}: torch.export cannot capture the model: {type(error).__name__}: "
            f"{lines[0] if lines else 'no message'}{_user_line(error)}",
            hint="a branch on a tensor's value or an .item() is the usual cause; TORCH_LOGS=+export shows more",
        ) from error
    finally:
        torch.compiler._is_exporting_flag = exporting
    assert isinstance(module, fx.GraphModule)
    return module


SHOWN = 3
"""How many names a warning lists."""


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _assumptions(program: Program, module: nn.Module) -> None:
    """Say what shapes were used, what looks unlike training, and what will fail or be wasted there."""
    first = next((n for n in program.graph.graph.nodes if n.op == "placeholder"), None)
    value = None if first is None else first.meta.get("val")
    if first is not None and isinstance(value, torch.Tensor) and value.dim():
        program.defaults["batch"] = f"{value.shape[0]} (dim 0 of input {first.name} {list(value.shape)})"
    if not module.training:
        program.warnings.append(
            "the model is in eval mode: dropout is off and batch statistics are frozen, as captured"
        )
    trainable = [p for p in program.parameters if p.trainable]
    unusual = [p.name for p in trainable if dtype_of(p.dtype).is_complex]
    if unusual:
        program.warnings.append(
            f"complex parameters ({_some(unusual)}): NCCL cannot reduce their gradients; store them as real with view_as_real"
        )
    read = {parameter for node in program.graph.graph.nodes for parameter in node_info(node).reads}
    unread = [p.name for p in trainable if p.name not in read]
    if unread:
        program.warnings.append(
            f"forward does not use {_some(unread)}: no gradient, but memory for shard and optimizer state all the same"
        )


def capture_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recipe: Recipe,
    *,
    spec: str,
    kind: Literal["module", "pt2"] = "module",
) -> Program:
    """Capture one forward, with its loss.

    Args:
        module: real or on the meta device; not changed, nothing is materialised.
        args: example inputs; only shapes, strides and dtypes matter.
        kwargs: likewise.
        recipe: its compute dtype is the dtype of parameters and activations in the graph.
        spec: how the user named the model.
        kind: what ``spec`` names.

    Raises:
        CaptureError: torch.export cannot follow the forward.
        UsageError: the model holds something that FSDP2 cannot train.
        UnsupportedError: the graph has sizes that depend on values, or an operator with a graph inside.
    """
    refuse_untrainable(module)
    compute_dtype = dtype_of(recipe.compute_dtype)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_twin(module, mode, compute_dtype)
    leave_export_mode(twin)
    fake_args = fake_inputs(args, mode, compute_dtype)
    fake_kwargs = fake_inputs(kwargs, mode, compute_dtype)
    with one_sequence_per_row() as assumed, see_through_checkpoints() as checkpoints:
        graph = _export(twin, fake_args, fake_kwargs, spec)
    program = Program(
        graph=graph,
        parameters=tensor_table(module.named_parameters(remove_duplicate=False), parameters=True),
        buffers=tensor_table(module.named_buffers(remove_duplicate=False), parameters=False),
        modules=module_table(module),
        recipe=recipe,
        source=Source(kind=kind, spec=spec),
    )
    finish(program, OutputNames.of(graph), module_names(module))
    _assumptions(program, module)
    if checkpoints:
        program.warnings.append(
            f"forward calls torch.utils.checkpoint itself ({len(checkpoints)}x); the plan is made without that and decides anew "
            "what to recompute: take the calls out, or less memory and more time are used than predicted"
        )
    if assumed:
        program.defaults["packing"] = assumed[0]
    return program
