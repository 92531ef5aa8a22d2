"""Names for parameters and buffers: dotted, valid, unique and stable; and which of them are one storage."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from partitioner.capture.onnx.scopes import is_fqn
from partitioner.capture.onnx.tensors import Stored

_GENERATED = re.compile(
    r"(onnx::.*|val_\d+|_?v_?\d+|\d+|t_?\d+|[\w/.]*_output_\d+|.*Constant_?\d*|_?to_copy_?\d*|lifted_tensor_\d+|/.*)"
)
_TAKEN = frozenset(dir(nn.Module()))
"""What every nn.Module has already; a parameter may not be called so."""
CONSTANT_CHECK_NUMEL = 2**24


def is_generated(name: str) -> bool:
    """Whether an exporter made the name up, rather than the model's author."""
    return _GENERATED.fullmatch(name) is not None


def clean(name: str) -> str:
    """The nearest valid dotted name: ``a/b:0`` -> ``a_b_0``."""
    if not is_fqn(name):
        name = re.sub(r"\W", "_", name.replace(".", "_"), flags=re.ASCII).strip("_") or "tensor"
        if name[0].isdigit():
            name = f"tensor_{name}"
    parts = [f"{part}_" if part in _TAKEN or keyword.iskeyword(part) else part for part in name.split(".")]
    return ".".join(parts)


@dataclass
class Naming:
    """Names given so far. A tensor may not be called what a module is, nor the other way round."""

    modules: set[str]
    taken: set[str] = field(default_factory=set)

    def give(self, wanted: str) -> str:
        """The wanted name, with a number appended if it is not free."""
        name, count = wanted, 0
        while self._clashes(name):
            count += 1
            name = f"{wanted}_{count}"
        self.taken.add(name)
        parts = name.split(".")
        self.modules.update(".".join(parts[:i]) for i in range(1, len(parts)))
        return name

    def _clashes(self, name: str) -> bool:
        parts = name.split(".")
        prefixes = (".".join(parts[:i]) for i in range(1, len(parts)))
        return name in self.taken or name in self.modules or any(p in self.taken for p in prefixes)


def wanted_name(onnx_name: str, scope: str, role: str) -> str:
    """What a tensor should be called: its own name if that is one, else its scope's and its role."""
    if is_generated(onnx_name):
        return f"{scope}.{role}" if scope else role if role != "weight" else clean(onnx_name)
    name = clean(onnx_name)
    return f"{scope}.{name}" if scope and "." not in name else name


def all_equal(stored: Stored) -> bool:
    """Whether all elements are one number, as far as the payload can be read: zeros or ones of a fresh model."""
    if stored.fill is not None:
        return True
    if stored.numel > CONSTANT_CHECK_NUMEL or not stored.available():
        return False
    values = stored.load().reshape(-1)
    return values.numel() == 0 or bool((values == values[0]).all())


def merged_by_value(stored: Stored) -> bool:
    """Whether several readers of one stored tensor had a tensor each, which the exporter merged because they were equal.

    Vectors (norms, biases) are never shared in models; matrices (embedding and head) may be, unless they are constant.
    """
    return len(stored.shape) < 2 or all_equal(stored)


def outermost(scopes: Iterable[str]) -> list[str]:
    """Scopes that lie in no other, in order."""
    unique: Sequence[str] = list(dict.fromkeys(scopes))
    return [s for s in unique if not any(s != o and (o == "" or s.startswith(o + ".")) for o in unique)]


def as_parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=value.is_floating_point())
