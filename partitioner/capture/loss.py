"""The loss: found among the outputs, or added to the graph as the recipe says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.utils import _pytree as pytree

from partitioner.errors import UsageError
from partitioner.program import LossKind, Program

aten = torch.ops.aten


@dataclass(frozen=True)
class OutputNames:
    """Names of the flat outputs, where the model's return value has names."""

    names: tuple[str, ...] = ()

    @staticmethod
    def of(graph: fx.GraphModule) -> OutputNames:
        """Read them off torch.export's output spec."""
        spec = getattr(graph, "_out_spec", None)
        if not isinstance(spec, pytree.TreeSpec):
            return OutputNames(())
        leaves = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        paths, _ = pytree.tree_flatten_with_path(leaves)
        return OutputNames(tuple(pytree.keystr(path) for path, _ in paths))


def _tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _append(graph: fx.Graph, target: object, args: tuple[object, ...]) -> fx.Node:
    """Add an operator before the output and compute its fake value."""
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        node = graph.call_function(target, args)  # type: ignore[arg-type]  # an OpOverload is callable
    mode = next(
        (v.fake_mode for n in graph.nodes if hasattr(v := n.meta.get("val"), "fake_mode")),
        None,
    )
    assert mode is not None
    values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in args]
    with mode, torch.enable_grad():
        node.meta["val"] = target(*values)  # type: ignore[operator]
    return node


def _mean(graph: fx.Graph, prediction: fx.Node) -> fx.Node:
    wide = _append(graph, aten.to.dtype, (prediction, torch.float32))
    return _append(graph, aten.mean.default, (wide,))


def _mse(graph: fx.Graph, prediction: fx.Node) -> fx.Node:
    wide = _append(graph, aten.to.dtype, (prediction, torch.float32))
    return _append(graph, aten.mean.default, (_append(graph, aten.mul.Tensor, (wide, wide)),))


def _cross_entropy(graph: fx.Graph, prediction: fx.Node) -> fx.Node:
    value = prediction.meta["val"]
    last = next(n for n in reversed(graph.nodes) if n.op in ("placeholder", "get_attr"))
    with graph.inserting_after(last):
        labels = graph.placeholder("labels")
    with value.fake_mode:
        labels.meta["val"] = torch.empty(value.shape[:-1], dtype=torch.int64, device=value.device)
    wide = _append(graph, aten.to.dtype, (prediction, torch.float32))
    flat = _append(graph, aten.reshape.default, (wide, [-1, value.shape[-1]]))
    return _append(graph, aten.cross_entropy_loss.default, (flat, _append(graph, aten.reshape.default, (labels, [-1]))))


def _own_loss(outputs: list[fx.Node | None], names: OutputNames) -> fx.Node | None:
    """The model's own loss: its only output, or the one called loss, if it is a floating scalar."""
    only = sum(node is not None for node in outputs) == 1
    for i, node in enumerate(outputs):
        value = None if node is None else _tensor(node)
        if node is None or value is None or value.dim() or not value.is_floating_point():
            continue
        named = i < len(names.names) and names.names[i].strip("[]'.\"") == "loss"
        if only or named or node.name == "loss":
            return node
    return None


def _scores_tokens(graph: fx.Graph, prediction: fx.Node) -> bool:
    """Whether the output has one vector for each integer of an input: a language model's logits."""
    shape = prediction.meta["val"].shape
    ids = [v for n in graph.nodes if n.op == "placeholder" and (v := _tensor(n)) is not None and v.dtype == torch.int64]
    return len(shape) > 1 and any(v.shape == shape[:-1] for v in ids)


def _assumed(program: Program, prediction: fx.Node) -> LossKind:
    """The loss when neither the model nor the user has one.

    Not the mean: that of a softmax is constant, and its gradient nothing.
    """
    if _scores_tokens(program.graph.graph, prediction):
        kind: LossKind = "cross_entropy"
        why = "cross_entropy of the first output against labels, as a model of tokens is trained"
    else:
        kind, why = "mse", "mean square of the first output"
    program.defaults["loss"] = f"{why} (the model returns no loss; name one with --loss)"
    return kind


def _add_loss(program: Program, floating: list[fx.Node]) -> fx.Node:
    """Append the loss that the recipe names; the recipe then says which it is."""
    graph, kind = program.graph.graph, program.recipe.loss
    if not floating:
        raise UsageError("the model returns no floating tensor, so there is nothing to differentiate")
    if kind == "auto":
        kind = _assumed(program, floating[0])
        program.recipe = replace(program.recipe, loss=kind)
    if kind == "cross_entropy":
        if floating[0].meta["val"].dim() < 2:
            raise UsageError("--loss cross_entropy needs an output of at least two dims, classes last")
        return _cross_entropy(graph, floating[0])
    if kind == "mse":
        return _mse(graph, floating[0])
    return _mean(graph, floating[0])


def attach_loss(program: Program, names: OutputNames = OutputNames()) -> None:
    """Leave exactly one output: the loss. The recipe then names it; what had to be assumed goes to ``program.defaults``.

    Raises:
        UsageError: the recipe names a loss that the outputs cannot have.
    """
    output = next(n for n in program.graph.graph.nodes if n.op == "output")
    leaves = pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    found = [n if isinstance(n, fx.Node) else None for n in leaves]
    own = _own_loss(found, names)
    if program.recipe.loss in ("auto", "output") and own is not None:
        loss = own
        program.recipe = replace(program.recipe, loss="output")
    elif program.recipe.loss == "output":
        raise UsageError(
            "--loss output: the model returns no floating scalar named loss",
            hint="compute the loss inside forward, or name one: --loss cross_entropy, mse or mean",
        )
    else:
        values = [(n, _tensor(n)) for n in found if n is not None]
        loss = _add_loss(program, [n for n, v in values if v is not None and v.is_floating_point()])
    output.args = (loss,)
