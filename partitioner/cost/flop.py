"""FLOPs and roofline class of one aten operator, from torch's own formulas plus what those leave out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

CLASSES = ("attention", "conv", "matmul", "elementwise", "view", "opaque")
"""Roofline classes, the dominant first: an operator that runs several kernels has the first class that one of them has."""


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, out_val: Any = None, **__: Any
) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    shapes = grad_out.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_FORMULAS: dict[object, Callable[..., int]] = {
    # torch.utils.flop_counter has no formula for the two fused attention operators that cpu tracing shows.
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _is_causal(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            given = args[position] if position < len(args) else kwargs.get("is_causal", False)
            return bool(given)
    return False


def count_flop(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one call; a multiply-add counts two.

    Matrix products, convolutions and attention by ``torch.utils.flop_counter``; elementwise operators count zero, their
    time is their bytes. Causal attention counts half, because flash kernels skip the blocks above the diagonal (the
    convention of the FlashAttention benchmarks: ``4 * batch * seq**2 * heads * head_dim // 2`` forward).
    """
    formula = _FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    flop = int(formula(*args, **kwargs, out_val=out))
    return flop // 2 if _is_causal(func, args, kwargs) else flop


def kernel_class(func: torch._ops.OpOverload) -> str:
    """The class of an operator that launches a kernel; anything not in this package's namespaces is opaque."""
    name = func._overloadpacket.__name__
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return "attention"
    if "conv" in name and func._overloadpacket in flop_registry:
        return "conv"
    if func._overloadpacket in flop_registry:
        return "matmul"
    return "elementwise" if func.namespace in ("aten", "prims", "prim") else "opaque"


def dominant_class(classes: set[str]) -> str:
    """The class of an operator that ran kernels of ``classes``; ``view`` if it ran none."""
    return next((c for c in CLASSES if c in classes), "view")
