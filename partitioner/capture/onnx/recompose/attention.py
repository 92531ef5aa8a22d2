"""Scaled dot-product attention out of its products and softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partitioner.capture.onnx.builder import aten
from partitioner.capture.onnx.recompose.match import (
    calls,
    dtype,
    is_call,
    is_number,
    replace,
    scaled,
    shape,
    uncast,
    write,
)

MASKED = -1e4
"""A number added to a score that is this low hides it: exp of it is zero in every floating dtype."""


@dataclass
class _Scores:
    """What stands under the softmax."""

    query: fx.Node
    turned_key: fx.Node
    scale: float
    mask: fx.Node | None
    """Added to the scores, or a boolean that is true where a score counts."""


def _probabilities(value: Any) -> tuple[fx.Node, float] | None:
    """The softmax under casts, dropout, and the guard against rows of NaN; and the probability of dropout."""
    dropout_p = 0.0
    while isinstance(value, fx.Node):
        value = uncast(value)
        if is_call(value, aten.dropout.default):
            dropout_p = float(value.args[1]) if value.args[2] else 0.0
            value = value.args[0]
        elif (
            is_call(value, aten.where.ScalarSelf) and value.args[1] == 0 and is_call(value.args[0], aten.isnan.default)
        ):
            if value.args[0].args[0] is not value.args[2]:
                return None
            value = value.args[2]
        else:
            break
    return (value, dropout_p) if is_call(value, aten.softmax.int) else None


def _masked(value: Any, constants: Mapping[str, torch.Tensor]) -> tuple[Any, fx.Node | None] | None:
    """(scores, mask) of ``scores + mask`` or of ``where(keep, scores, -inf)``."""
    if is_call(value, aten.where.ScalarOther) and is_number(value.args[2]) and value.args[2] <= MASKED:
        return value.args[1], value.args[0]
    if not is_call(value, aten.add.Tensor):
        return value, None
    for scores, mask in (value.args[:2], value.args[1::-1]):
        if isinstance(mask, fx.Node) and is_call(scaled(uncast(scores))[0], aten.matmul.default):
            return scores, _as_boolean(mask, constants)
    return None


def _as_boolean(mask: fx.Node, constants: Mapping[str, torch.Tensor]) -> fx.Node:
    """``where(keep, 0, -inf)`` says no more than ``keep``."""
    inner = uncast(mask)
    if not is_call(inner, aten.where.self, aten.where.Scalar):
        return mask
    numbers = [_number(v, constants) for v in inner.args[1:3]]
    if numbers[0] == 0 and numbers[1] is not None and numbers[1] == float("-inf"):
        keep = inner.args[0]
        assert isinstance(keep, fx.Node)
        return keep
    return mask


def _number(value: Any, constants: Mapping[str, torch.Tensor]) -> float | None:
    if is_number(value):
        return float(value)
    if isinstance(value, fx.Node) and value.op == "get_attr" and value.meta["val"].numel() == 1:
        stored = constants[str(value.target)]
        return float(stored.reshape(-1)[0]) if type(stored) is torch.Tensor else None
    return None


def _scores(value: Any, constants: Mapping[str, torch.Tensor]) -> _Scores | None:
    value = uncast(value)
    split = _masked(value, constants)
    if split is None:
        return None
    inner, scale = scaled(uncast(split[0]))
    product = calls(uncast(inner), aten.matmul.default)
    if product is None:
        return None
    query, query_scale = scaled(product.args[0])
    key, key_scale = scaled(product.args[1])
    if not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
        return None
    return _Scores(query, key, scale * query_scale * key_scale, split[1])


def _untransposed(graph: fx.Graph, root: fx.Node, turned: fx.Node) -> fx.Node:
    """The key whose last two dims were swapped; swapped back if the swap is not found."""
    rank = len(shape(turned))
    if is_call(turned, aten.transpose.int):
        source, *dims = turned.args
        if sorted(d % rank for d in dims) == [rank - 2, rank - 1]:  # type: ignore[operator]  # integers
            assert isinstance(source, fx.Node)
            return source
    if is_call(turned, aten.reshape.default):  # batch and heads joined, swapped, and parted again
        inner = calls(turned.args[0], aten.transpose.int)
        flat = calls(inner.args[0], aten.reshape.default) if inner is not None else None
        source = flat.args[0] if flat is not None else None
        if inner is not None and isinstance(source, fx.Node) and sorted(d % 3 for d in inner.args[1:]) == [1, 2]:  # type: ignore[operator]  # integers
            *outer, first, last = shape(source)
            if shape(inner)[1:] == (last, first) and shape(turned) == (*outer, last, first):
                return source
    return write(graph, root, aten.transpose.int, turned, rank - 2, rank - 1)


def _ungrouped(value: fx.Node) -> fx.Node | None:
    """The heads before each was repeated for a group of query heads: ``reshape(expand(unsqueeze(x, 2)))``."""
    expanded = calls(value.args[0], aten.expand.default) if is_call(value, aten.reshape.default) else None
    raised = calls(expanded.args[0], aten.unsqueeze.default) if expanded is not None else None
    source = raised.args[0] if raised is not None and raised.args[1] in (2, -3) else None
    if not isinstance(source, fx.Node) or expanded is None or len(shape(source)) != 4:
        return None
    batch, heads, seq, width = shape(source)
    fits = shape(expanded) == (batch, heads, shape(value)[1] // heads, seq, width)
    return source if fits and shape(value) == (batch, shape(expanded)[1] * shape(expanded)[2], seq, width) else None


def _is_causal(mask: fx.Node, constants: Mapping[str, torch.Tensor], queries: int, keys: int) -> bool | None:
    """Whether a constant mask is the causal one; None if it hides nothing; False if it is anything else."""
    stored = constants.get(str(mask.target)) if mask.op == "get_attr" else None
    if stored is None or type(stored) is not torch.Tensor or stored.shape[-2:] != (queries, keys):
        return False
    if stored.dtype == torch.bool:
        keep, plain = stored, True
    else:
        keep, plain = stored > MASKED, bool(((stored == 0) | (stored <= MASKED)).all())
    if not plain:
        return False
    if bool(keep.all()):
        return None
    return bool((keep == torch.ones(queries, keys, dtype=torch.bool).tril()).all())


def fuse_attention(graph: fx.Graph, root: fx.Node, constants: Mapping[str, torch.Tensor]) -> bool:
    """``softmax(scale * q @ k.T + mask) @ v``."""
    if not is_call(root, aten.matmul.default):
        return False
    found = _probabilities(root.args[0])
    value = root.args[1]
    if found is None or not isinstance(value, fx.Node) or len(shape(value)) != 4:
        return False
    softmax, dropout_p = found
    if softmax.args[1] not in (-1, 3) or len(shape(softmax)) != 4:
        return False
    scores = _scores(softmax.args[0], constants)
    if scores is None or len({dtype(n) for n in (scores.query, scores.turned_key, value)}) != 1:
        return False
    if shape(scores.query)[:2] != shape(value)[:2] or shape(scores.turned_key)[:2] != shape(value)[:2]:
        return False
    key = _untransposed(graph, root, scores.turned_key)
    mask, causal = scores.mask, False
    if mask is not None:
        kind = _is_causal(
            mask, constants, shape(key)[2] if shape(key)[2] == shape(scores.query)[2] else -1, shape(key)[2]
        )
        causal = kind is True
        mask = mask if kind is False else None
    if mask is not None and dtype(mask) not in (torch.bool, dtype(scores.query)):
        return False
    grouped_key, grouped_value = _ungrouped(key), _ungrouped(value)
    grouped = grouped_key is not None and grouped_value is not None
    width = shape(scores.query)[-1]
    options: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    if abs(scores.scale * math.sqrt(width) - 1) > 1e-3:
        options["scale"] = scores.scale
    replace(
        graph, root, aten.scaled_dot_product_attention.default, scores.query,
        grouped_key if grouped else key, grouped_value if grouped else value, mask, dropout_p, causal, **options,
    )  # fmt: skip
    return True
