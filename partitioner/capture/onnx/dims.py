"""Sizes of the model's inputs: every symbolic dim gets a number, from the user, the recipe, or a default that is told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from onnx import TensorProto, ValueInfoProto

from partitioner.errors import UnsupportedError, UsageError
from partitioner.program import Recipe

DEFAULT_SEQ = 4096
"""Tokens in a sequence when neither the file nor the user says: what large models are trained with."""

_BATCH = re.compile(r"(^|[^a-z])(n|b|bs|bsz|batch|batch_?size)([^a-z]|$)|batch", re.IGNORECASE)
_SEQ = re.compile(r"(^|[^a-z])(s|t|seq|len|tokens?)([^a-z]|$)|seq|length", re.IGNORECASE)
_PAST = re.compile(r"past|cache|present", re.IGNORECASE)


@dataclass
class Dims:
    """Symbols bound so far."""

    recipe: Recipe
    where: str
    bound: dict[str, int] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    longest: int | None = None
    """Positions that the model has, when its table has shown to be shorter than DEFAULT_SEQ."""
    assumed_seq: bool = False
    """Whether a size came from DEFAULT_SEQ."""

    def shape(self, value: ValueInfoProto) -> tuple[int, ...]:
        """The shape of an input, in numbers.

        Raises:
            UsageError: a dim that nobody has given a size.
            UnsupportedError: a key-value cache, or an input that is not a tensor.
        """
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            raise UnsupportedError(f"{self.where}: input {value.name!r} is a {kind}, not a tensor")
        if _PAST.search(value.name):
            raise UnsupportedError(
                f"{self.where}: input {value.name!r} is a cache of earlier steps, which training does not have",
                hint="export the model without a cache (use_cache=False)",
            )
        if not value.type.tensor_type.HasField("shape"):
            raise UsageError(
                f"{self.where}: input {value.name!r} has no shape in the file",
                hint="export it with a shape; symbolic dims are fine",
            )
        dims = value.type.tensor_type.shape.dim
        tokens = len(dims) == 2 and value.type.tensor_type.elem_type in (TensorProto.INT64, TensorProto.INT32)
        return tuple(
            dim.dim_value
            if dim.WhichOneof("value") == "dim_value"
            else self._bind(dim.dim_param, value.name, axis, tokens=tokens)
            for axis, dim in enumerate(dims)
        )

    def _bind(self, symbol: str, name: str, axis: int, *, tokens: bool) -> int:
        symbol = symbol or f"{name}.{axis}"
        if symbol not in self.bound:
            self.bound[symbol] = self._choose(symbol, name, axis, tokens=tokens)
        return self.bound[symbol]

    def _choose(self, symbol: str, name: str, axis: int, *, tokens: bool) -> int:
        recipe = self.recipe
        if symbol in recipe.dims:
            return recipe.dims[symbol]
        key = f"dim {symbol}"
        if _PAST.search(symbol):
            raise UsageError(
                f"{self.where}: dim {symbol!r} of input {name!r} counts cached tokens, which training does not have",
                hint=f"export without a cache, or say --dim {symbol}=VALUE",
            )
        if _BATCH.search(symbol) or (axis == 0 and not _SEQ.search(symbol)):
            self.defaults[key] = f"{recipe.batch} (the batch of the recipe; dim {axis} of input {name})"
            return recipe.batch
        if _SEQ.search(symbol) or (axis == 1 and tokens):
            if recipe.seq is not None:
                self.defaults[key] = f"{recipe.seq} (the sequence length of the recipe; dim {axis} of input {name})"
                return recipe.seq
            self.assumed_seq = True
            why = "not given" if self.longest is None else "not given; the model has no more positions"
            self.defaults[key] = f"{self.longest or DEFAULT_SEQ} ({why}; dim {axis} of input {name})"
            return self.longest or DEFAULT_SEQ
        raise UsageError(
            f"{self.where}: dim {symbol!r} (dim {axis} of input {name!r}) has no size",
            hint=f"say --dim {symbol}=VALUE",
        )

    def refuse_unknown(self) -> None:
        """Raise UsageError for a ``--dim`` that no input has."""
        for symbol, size in self.recipe.dims.items():
            if symbol not in self.bound:
                has = ", ".join(sorted(self.bound)) or "none"
                raise UsageError(f"{self.where} has no symbolic dim {symbol!r}", hint=f"it has: {has}")
            if size <= 0:
                raise UsageError(f"--dim {symbol}={size}: a size is a positive number")
