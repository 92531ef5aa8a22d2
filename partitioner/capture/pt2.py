"""``.pt2`` (``torch.export.save``) -> Program.

The file holds a graph for fixed or symbolic sizes, in the dtype of the exported model. Here symbolic sizes get numbers,
the model's own floating dtype becomes the compute dtype (what FSDP2's mixed precision does to a module), and every value
is computed anew on fake cpu tensors. torch reads the weights along with the graph, so they need to fit in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from partitioner.capture.graph import finish
from partitioner.capture.loss import OutputNames
from partitioner.capture.regions import AUTOCAST, flatten_regions
from partitioner.capture.table import storage_key, tensor_table
from partitioner.capture.twin import compute_dtype_of
from partitioner.errors import CaptureError, UnsupportedError, UsageError
from partitioner.program import ModuleInfo, Program, Recipe, Source, dtype_name, dtype_of


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export.load logs what it raises anyway."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _load(path: Path) -> tuple[fx.GraphModule, dict[str, tuple[float, float]]]:
    """(graph with parameters as attributes, symbol -> smallest and largest size).

    Raises:
        CaptureError: the file is not an exported program, or one of a torch that this one cannot read.
    """
    try:
        with _quiet():
            program = torch.export.load(path)
        module = program.module(check_guards=False)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CaptureError(
            f"{path} is not a program that torch {torch.__version__} can load: {lines[0] if lines else type(error).__name__}",
            hint="write it with torch.export.save(torch.export.export(model, args), path)",
        ) from error
    assert isinstance(module, fx.GraphModule)
    flatten_regions(module)
    limits = {str(s): (float(r.lower), float(r.upper)) for s, r in program.range_constraints.items()}
    return module, limits


@dataclass
class _Sizes:
    """Symbolic dims bound so far, and what was assumed."""

    path: Path
    recipe: Recipe
    limits: dict[str, tuple[float, float]]
    bound: dict[str, int] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)

    def bind(self, node: fx.Node) -> None:
        """Give every plain symbol in an input's shape a number."""
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and str(size) not in self.bound and size.node.expr.is_symbol:
                self.bound[str(size)] = self._choose(str(size), node.name, axis, size.node.hint)

    def _choose(self, symbol: str, name: str, axis: int, example: int | None) -> int:
        recipe, key, place = self.recipe, f"dim {symbol}", f"dim {axis} of input {name}"
        if symbol in recipe.dims:
            size = recipe.dims[symbol]
        elif axis == 0:
            size = recipe.batch
            self.defaults[key] = f"{size} (the batch of the recipe; {place})"
        elif axis == 1 and recipe.seq is not None:
            size = recipe.seq
            self.defaults[key] = f"{size} (the sequence length of the recipe; {place})"
        elif example is not None:
            size = int(example)
            self.defaults[key] = f"{size} (the exporter's example; {place}; set it with --dim {symbol}=VALUE)"
        else:
            raise UsageError(f"{self.path}: {place} has no size", hint=f"say --dim {symbol}=VALUE")
        low, high = self.limits.get(symbol, (0, float("inf")))
        if not low <= size <= high:
            raise UsageError(f"{self.path}: dim {symbol} ({place}) is {size}; the program takes {low:g} to {high:g}")
        return size

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of an input in numbers; derived sizes (``2*s0``) follow from the symbols."""
        sizes = []
        for size in node.meta["val"].shape:
            if isinstance(size, torch.SymInt):
                expression = size.node.expr
                size = int(expression.subs({s: self.bound[str(s)] for s in expression.free_symbols}))
            sizes.append(int(size))
        return tuple(sizes)

    def refuse_unknown(self) -> None:
        """Raise UsageError for a ``--dim`` that no input has."""
        for symbol in self.recipe.dims:
            if symbol not in self.bound:
                has = ", ".join(sorted(self.bound)) or "none"
                raise UsageError(f"{self.path} has no symbolic dim {symbol!r}", hint=f"it has: {has}")


def _main_dtype(module: nn.Module) -> torch.dtype:
    """The floating dtype that most parameter bytes have."""
    held: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            held[parameter.dtype] = held.get(parameter.dtype, 0) + parameter.nbytes
    return max(held, key=lambda d: held[d], default=torch.float32)


class _Evaluation:
    """Runs a graph on fake tensors, writes each node's value, and folds sizes into the arguments that use them."""

    def __init__(self, module: fx.GraphModule, sizes: _Sizes, compute_dtype: torch.dtype) -> None:
        self.module, self.sizes, self.compute_dtype = module, sizes, compute_dtype
        self.model_dtype = _main_dtype(module)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.constants: dict[fx.Node, Any] = {}
        self._attributes: dict[tuple[object, ...], torch.Tensor] = {}

    def _empty(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")

    def _attribute(self, node: fx.Node) -> torch.Tensor:
        value = pytree.tree_leaves(_get(self.module, str(node.target)))[0]
        key = (isinstance(value, nn.Parameter), *storage_key(value))
        if key not in self._attributes:
            dtype = value.dtype
            if isinstance(value, nn.Parameter):
                dtype = compute_dtype_of(value, self.compute_dtype)
            self._attributes[key] = self._empty(value, dtype)
        return self._attributes[key]

    def _input(self, node: fx.Node) -> None:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnsupportedError(f"input {node.name} is a number that may change", hint="export it as a fixed value")
        if isinstance(value, torch.Tensor):
            with self.mode:
                dtype = compute_dtype_of(value, self.compute_dtype)
                node.meta["val"] = torch.empty(self.sizes.shape(node), dtype=dtype, device="cpu")
        else:
            self.constants[node] = value

    def _retyped(self, value: Any) -> Any:
        """The model's own dtype where an operator names it becomes the compute dtype."""
        return self.compute_dtype if value == self.model_dtype else value

    def _operator(self, node: fx.Node) -> None:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: self.constants.get(n, n))
        node.args, node.kwargs = pytree.tree_map_only(torch.dtype, self._retyped, arguments)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if AUTOCAST in node.meta:
                device, dtype, enabled = node.meta[AUTOCAST]
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            stack.enter_context(self.mode)
            try:
                value = node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node's target
            except Exception as error:
                where = list((node.meta.get("nn_module_stack") or {}).values())
                raise CaptureError(
                    f"{node.target} in module {where[-1][0] if where else ''} does not run with these sizes and dtypes: "
                    f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
                    hint="other sizes with --batch, --seq or --dim, or the dtype of the export with --dtype",
                ) from error
        if value is None or isinstance(value, bool | int | float | str):
            self.constants[node] = value
        else:
            node.meta["val"] = value

    def run(self) -> None:
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self._input(node)
            elif node.op == "get_attr":
                node.meta["val"] = self._attribute(node)
            elif node.op == "call_function":
                self._operator(node)
            elif node.op == "output":
                node.args = fx.node.map_arg(node.args, lambda n: self.constants.get(n, n))
                node.meta["val"] = fx.node.map_arg(node.args[0], lambda n: n.meta["val"])
        for node in reversed(list(self.constants)):
            self.module.graph.erase_node(node)


def _get(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _modules(graph: fx.Graph, parameters: Iterator[str]) -> tuple[ModuleInfo, ...]:
    """The module tree as far as operators and parameters show it, in pre-order."""
    classes: dict[str, str] = {"": "Model"}
    for node in graph.nodes:
        for name, kind in (node.meta.get("nn_module_stack") or {}).values():
            classes[name] = str(kind).rpartition(".")[2]
    children: dict[str, dict[str, None]] = {"": {}}
    for name in (*(f"{p}.".rpartition(".")[0].rpartition(".")[0] for p in parameters), *classes):
        parts = name.split(".") if name else []
        for depth in range(len(parts)):
            inner = ".".join(parts[: depth + 1])
            children.setdefault(".".join(parts[:depth]), {})[inner] = None
            children.setdefault(inner, {})
    found: list[ModuleInfo] = []

    def visit(name: str) -> None:
        running = name in classes
        found.append(ModuleInfo(name=name, class_name=classes.get(name, "ModuleList"), has_forward=running))
        for child in sorted(children[name], key=_by_number):
            visit(child)

    visit("")
    return tuple(found)


def _by_number(name: str) -> int:
    """Numbered children in the order of their numbers, before no other; the sort is stable."""
    last = name.rpartition(".")[2]
    return int(last) if last.isdigit() else -1


def load_pt2(path: Path, recipe: Recipe) -> Program:
    """Read an exported program as a training graph, its loss included.

    Args:
        path: the ``.pt2`` file.
        recipe: ``dims``, ``batch`` and ``seq`` give symbolic dims their sizes; ``compute_dtype`` takes the place of the
            dtype that the model was exported in.

    Raises:
        CaptureError: the file cannot be loaded, or its graph does not run with these sizes.
        UsageError: a dim without a size, or out of its range.
        UnsupportedError: sizes that depend on values, or an operator with a graph inside.
    """
    module, limits = _load(path)
    outputs = OutputNames.of(module)
    sizes = _Sizes(path, recipe, limits)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]
    for node in inputs:
        sizes.bind(node)
    sizes.refuse_unknown()
    evaluation = _Evaluation(module, sizes, dtype_of(recipe.compute_dtype))
    evaluation.run()
    program = Program(
        graph=module,
        parameters=tensor_table(module.named_parameters(remove_duplicate=False), parameters=True),
        buffers=tensor_table(module.named_buffers(remove_duplicate=False), parameters=False),
        modules=_modules(module.graph, (name for name, _ in module.named_parameters(remove_duplicate=False))),
        recipe=recipe,
        source=Source(kind="pt2", spec=str(path)),
    )
    program.defaults.update(sizes.defaults)
    finish(program, outputs)
    first = inputs[0] if inputs else None
    if first is not None and first.meta["val"].dim() and not sizes.bound:
        shape = list(first.meta["val"].shape)
        program.defaults["sizes"] = f"fixed in the file: input {first.name} {shape}; --batch and --seq change nothing"
    if evaluation.model_dtype != evaluation.compute_dtype:
        program.defaults["dtype"] = (
            f"{dtype_name(evaluation.compute_dtype)} wherever the file says {dtype_name(evaluation.model_dtype)}, "
            "the dtype it was exported in"
        )
    return program


def pt2_weights(path: Path) -> dict[str, torch.Tensor]:
    """The values of parameters, buffers and constants, under the names that ``load_pt2`` gives them.

    Raises:
        CaptureError: the file cannot be loaded.
    """
    module, _ = _load(path)
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(value := _get(module, str(node.target)), torch.Tensor):
            named.setdefault(str(node.target), value)
    return {name: tensor.detach() for name, tensor in named.items()}
