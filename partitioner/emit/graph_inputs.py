"""What random inputs a captured graph accepts: the range of its integer inputs, read off what is done with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_FORM = frozenset(
    {
        "_to_copy", "alias", "clone", "constant_pad_nd", "contiguous", "detach", "expand", "flatten", "pad", "permute",
        "reshape", "select", "slice", "squeeze", "to", "transpose", "unsqueeze", "view", "where", "clamp", "repeat",
    }
)  # fmt: skip
"""Operators after which an integer still means what it meant."""


def _packet(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _shape(argument: Any) -> tuple[int, ...]:
    value = argument.meta["val"] if isinstance(argument, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _limit(reader: fx.Node, value: fx.Node) -> int | None:
    """How many values an operator tells apart in an integer operand; None if it does not index with it."""
    packet, args = _packet(reader), reader.args
    if packet == "embedding" and len(args) > 1 and args[1] is value:
        return _shape(args[0])[0]
    if packet in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward") and args[1] is value:
        shape = _shape(args[0])
        return shape[1] if len(shape) > 1 else shape[0]
    if packet in ("gather", "index_select", "scatter") and len(args) > 2 and args[2] is value:
        return _shape(args[0])[int(args[1])]  # type: ignore[arg-type]  # the dim, by the schema
    if packet == "index" and isinstance(args[1], list | tuple) and value in args[1]:
        return _shape(args[0])[args[1].index(value)]
    if packet == "one_hot" and len(args) > 1:
        return int(args[1])  # type: ignore[arg-type]  # the number of classes, by the schema
    return None


def index_limit(placeholder: fx.Node) -> int | None:
    """The smallest table that an integer input indexes, through changes of form and shifts by a constant.

    Returns:
        Exclusive upper bound of its values; None if nothing is indexed with it.
    """
    limits: list[int] = []
    todo: list[tuple[fx.Node, int]] = [(placeholder, 0)]
    seen = set()
    while todo:
        value, shift = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        for reader in value.users:
            limit = _limit(reader, value)
            if limit is not None:
                limits.append(limit - shift)
            elif _packet(reader) in _FORM:
                todo.append((reader, shift))
            elif _packet(reader) in ("add", "sub") and isinstance(reader.args[1], int):
                offset = reader.args[1] if _packet(reader) == "add" else -reader.args[1]
                todo.append((reader, shift + max(offset, 0)))
    return max(1, min(limits)) if limits else None


def example(node: fx.Node) -> str:
    """Python text of one random input for a placeholder, given ``generator``.

    Floating inputs are normal, integers uniform in the range that they index, all else (masks, flags) ones.
    """
    value = node.meta["val"]
    shape = f"({', '.join(map(str, value.shape))}{',' if value.dim() == 1 else ''})"
    if value.is_floating_point():
        dtype = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
        return f"torch.randn({shape}, generator=generator{dtype})"
    limit = None if value.dtype == torch.bool else index_limit(node)
    if limit is None:
        return f"torch.ones({shape}, dtype={value.dtype})"
    dtype = "" if value.dtype == torch.int64 else f", dtype={value.dtype}"
    return f"torch.randint({limit}, {shape}, generator=generator{dtype})"
