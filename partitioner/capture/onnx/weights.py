"""The values of an imported model's parameters and buffers, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from partitioner.capture.onnx.classify import absorb_constants
from partitioner.capture.onnx.reader import Model, read_model
from partitioner.capture.onnx.settle import INITIALIZERS
from partitioner.capture.onnx.tensors import Stored
from partitioner.errors import CaptureError
from partitioner.program import Program, TensorInfo, dtype_of


def initializer_of(program: Program) -> Mapping[str, str]:
    """Parameter or buffer name -> name of the tensor in the ONNX file. Buffers computed at import are not in it."""
    found: Mapping[str, str] = program.graph.meta.get(INITIALIZERS, {})
    return found


def _open(path: Path) -> Model:
    model = read_model(path)
    absorb_constants(model)
    return model


def has_weights(path: Path) -> bool:
    """Whether the data of every tensor of the file is there: inside it, or in the files beside it."""
    return all(stored.available() for stored in _open(path).stored.values())


def _stored(model: Model, program: Program, name: str) -> Stored:
    source = initializer_of(program).get(name, "")
    if source not in model.stored:
        raise CaptureError(
            f"{model.path} does not hold the tensor {source!r} of {name}", hint="is it the file that was imported?"
        )
    return model.stored[source]


def _value(model: Model, program: Program, info: TensorInfo) -> torch.Tensor:
    if info.name not in initializer_of(program):
        computed = program.graph.get_buffer(info.name)
        return computed.detach().clone()
    stored = _stored(model, program, info.name)
    value = stored.load()
    if tuple(value.shape) != info.shape:
        raise CaptureError(
            f"{stored.name!r} in {model.path} has shape {list(value.shape)}; {info.name} has {list(info.shape)}",
            hint="is it the file that was imported?",
        )
    return value.to(dtype_of(info.dtype))


def read_weights(path: Path, program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of every parameter and buffer of the program, in the order of its tables, read one at a time.

    Values have the dtype of the table: parameters that of the file, constants the one that the graph uses.

    Args:
        path: the file that ``program`` was imported from.
        program: what ``import_onnx`` returned.

    Raises:
        CaptureError: a weight is absent or damaged, or the file is another one.
    """
    model = _open(path)
    for info in (*program.parameters, *program.buffers):
        yield info.name, _value(model, program, info)
