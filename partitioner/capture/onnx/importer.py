"""ONNX file -> Program."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from partitioner.capture.loss import OutputNames, attach_loss
from partitioner.capture.onnx.builder import Builder
from partitioner.capture.onnx.classify import absorb_constants, find_parameters
from partitioner.capture.onnx.dims import Dims
from partitioner.capture.onnx.lowering import Lowering
from partitioner.capture.onnx.names import clean
from partitioner.capture.onnx.ops.normalization import EVAL_BATCH_NORM
from partitioner.capture.onnx.reader import Model, read_model
from partitioner.capture.onnx.recompose import recompose
from partitioner.capture.onnx.settle import settle
from partitioner.capture.onnx.tensors import torch_dtype
from partitioner.errors import CaptureError, TableError
from partitioner.program import Program, Recipe, Source, dtype_of


def _main_dtype(model: Model, parameters: set[str]) -> torch.dtype:
    """The floating dtype that most parameter bytes have."""
    held: dict[torch.dtype, int] = {}
    for name in sorted(parameters):
        stored = model.stored[name]
        held[stored.dtype] = held.get(stored.dtype, 0) + stored.nbytes
    return max(held, key=lambda d: held[d], default=torch.float32)


def _add_inputs(model: Model, lowering: Lowering, dims: Dims) -> None:
    build = lowering.build
    taken: set[str] = set()
    for value in model.inputs:
        shape = dims.shape(value)
        dtype = torch_dtype(value.type.tensor_type.elem_type, f"{model.path}: input {value.name!r}")
        name, count = clean(value.name).replace(".", "_"), 0
        while name in taken:
            count += 1
            name = f"{clean(value.name).replace('.', '_')}_{count}"
        taken.add(name)
        node = build.placeholder(name, shape, build.compute_dtype if dtype.is_floating_point else dtype)
        lowering.values[value.name] = node
    dims.refuse_unknown()


def _lower(model: Model, recipe: Recipe, dims: Dims) -> Lowering:
    absorb_constants(model)
    parameters = find_parameters(model)
    build = Builder(compute_dtype=dtype_of(recipe.compute_dtype), model_dtype=_main_dtype(model, parameters))
    lowering = Lowering(model=model, parameters=parameters, build=build)
    _add_inputs(model, lowering, dims)
    lowering.run()
    outputs = [lowering.value(name) for name in model.outputs]
    nodes = tuple(v if isinstance(v, fx.Node) else None for v in outputs)
    if not any(nodes):
        raise CaptureError(f"{model.path}: no output depends on an input", hint="is this the whole model?")
    build.graph.output(nodes)
    return lowering


def _read(path: Path, recipe: Recipe) -> tuple[Model, Dims, Lowering]:
    """The walk over the file. A sequence that nobody asked for is cut to the positions that the model has."""
    model = read_model(path)
    dims = Dims(recipe, str(path))
    try:
        return model, dims, _lower(model, recipe, dims)
    except TableError as error:
        if not dims.assumed_seq:
            raise
        model = read_model(path)
        dims = Dims(recipe, str(path), longest=error.rows)
        return model, dims, _lower(model, recipe, dims)


def _tell(program: Program, model: Model, lowering: Lowering, dims: Dims) -> None:
    """Assumptions and doubts, in words."""
    program.defaults.update(dims.defaults)
    program.warnings.extend(model.warnings)
    first = next((v for v in model.inputs if v.type.tensor_type.shape.dim), None)
    if first is not None:
        dim = first.type.tensor_type.shape.dim[0]
        if dim.WhichOneof("value") == "dim_value":
            program.defaults["batch"] = f"{dim.dim_value} (fixed in the file: dim 0 of input {first.name})"
    read = {lowering.copies.get(n, n) for n in lowering.parameter_nodes}
    absent = [n for n in sorted(read) if not model.stored[n].available()]
    if absent:
        program.warnings.append(
            f"the data of {len(absent)} of {len(read)} weights is not there (first: {absent[0]!r}); shapes are enough to plan"
        )
    unread = sorted({n for n in lowering.parameters if n not in lowering.copies} - read)
    if unread:
        program.warnings.append(f"{len(unread)} weights are read by nothing and left out (first: {unread[0]!r})")
    if any(n.op_type == "BatchNormalization" for n in lowering.nodes):
        program.warnings.append(EVAL_BATCH_NORM)


def import_onnx(path: Path, recipe: Recipe) -> Program:
    """Read an ONNX model as a training graph, its loss included.

    Weights are not read, except small ones that decide shapes or constants; they may be absent.

    Args:
        path: the ``.onnx`` file; external data lies beside it.
        recipe: ``dims``, ``batch`` and ``seq`` give the symbolic dims their sizes, ``compute_dtype`` is the dtype of
            parameters and activations in the graph.

    Raises:
        UsageError: no such file, or a dim without a size.
        CaptureError: the file is not a model, damaged, hostile, or contradicts the sizes given.
        UnsupportedError: an operator, dtype or control flow that has no meaning in a training graph here.
    """
    model, dims, lowering = _read(path, recipe)
    graph = fx.GraphModule(lowering.build.attributes, lowering.build.graph)
    program = Program(
        graph=graph,
        parameters=(),
        buffers=(),
        modules=(),
        recipe=recipe,
        source=Source(kind="onnx", spec=str(path)),
    )
    attach_loss(program, OutputNames(tuple(model.outputs)))
    graph.graph.eliminate_dead_code()
    recompose(graph.graph, lowering.build.attributes)
    graph.graph.eliminate_dead_code()
    settle(program, lowering)
    if not program.parameters:
        raise CaptureError(f"{path} has no trainable weights", hint="was it exported with its parameters?")
    graph.recompile()
    _tell(program, model, lowering, dims)
    return program
