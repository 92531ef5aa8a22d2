"""Modules that are nothing but one of torch's own layers, written as that layer."""

from __future__ import annotations

from torch import fx

from partitioner.emit.graph_code import Code, call, text
from partitioner.emit.graph_tree import Frame, Tree, flags_of
from partitioner.program import TensorInfo


def own_layer(tree: Tree, frame: Frame, tensors: dict[str, TensorInfo]) -> Code | None:
    """``nn.Linear(...)``, ``nn.Embedding(...)`` or ``nn.LayerNorm(...)`` if its forward is exactly what the call holds.

    Args:
        tree: what the call's arguments stand for.
        frame: one call of the module.
        tensors: what is registered in it, by its name there.
    """
    if len(frame.items) != 1 or not isinstance(frame.items[0], fx.Node) or len(frame.inputs) != 1:
        return None
    node = frame.items[0]
    if flags_of(node) != (False, None) or not tensors or len({(t.dtype, t.trainable) for t in tensors.values()}) > 1:
        return None
    if any(t.name in tree.buffers for t in tensors.values()) or len(frame.outputs) != 1 or node.kwargs:
        return None
    values = tree.node_values(node)
    local = {f"{frame.scope}.{name}": name for name in tensors}
    places: list[object] = [local.get(values[a].attribute, "input") if isinstance(a, fx.Node) else a for a in node.args]
    write = _LAYERS.get(str(node.target))
    made = None if write is None else write(places, tensors)
    if made is None:
        return None
    (dtype, trainable) = next((t.dtype, t.trainable) for t in tensors.values())
    arguments = [text(str(m)) for m in made[1:]]
    arguments += [] if dtype == "float32" else [text(f"dtype=torch.{dtype}")]
    code = call(str(made[0]), arguments)
    return code if trainable else Code((*code.parts, ".requires_grad_(False)"))


def _linear(places: list[object], tensors: dict[str, TensorInfo]) -> list[object] | None:
    has_bias = set(tensors) == {"weight", "bias"}
    if places != ["input", "weight", "bias"][: 2 + has_bias] or not (has_bias or set(tensors) == {"weight"}):
        return None
    rows, columns = tensors["weight"].shape
    return ["nn.Linear", columns, rows, *([] if has_bias else ["bias=False"])]


def _embedding(places: list[object], tensors: dict[str, TensorInfo]) -> list[object] | None:
    if places[:2] != ["weight", "input"] or set(tensors) != {"weight"} or len(places) > 3:
        return None
    rows, columns = tensors["weight"].shape
    padding = places[2] if len(places) == 3 else -1
    return ["nn.Embedding", rows, columns, *([f"padding_idx={padding}"] if padding != -1 else [])]


def _layer_norm(places: list[object], tensors: dict[str, TensorInfo]) -> list[object] | None:
    order = ["weight", "bias"] if "bias" in tensors else ["weight"]
    if set(tensors) != set(order) or places[0] != "input" or places[2 : 2 + len(order)] != order:
        return None
    if len(order) == 1 and len(places) > 3 and places[3] is not None:
        return None
    shape = tensors["weight"].shape
    eps = places[4] if len(places) > 4 else 1e-5
    made: list[object] = ["nn.LayerNorm", shape[0] if len(shape) == 1 else list(shape)]
    made += [f"eps={eps}"] if eps != 1e-5 else []
    return made if len(order) == 2 else [*made, "bias=False"]


_LAYERS = {
    "aten.linear.default": _linear,
    "aten.embedding.default": _embedding,
    "aten.layer_norm.default": _layer_norm,
}
