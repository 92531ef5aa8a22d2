"""Names for the variables and classes of emitted code."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from partitioner.emit.graph_code import Value
from partitioner.emit.graph_tree import fake_of

_TAKEN = frozenset(
    {"self", "torch", "nn", "F", "Tensor", "Path", "json", "mmap", "Iterator", *keyword.kwlist, *keyword.softkwlist}
) | frozenset(dir(builtins))
_SAME_IDEA = frozenset(
    {
        "alias", "clone", "contiguous", "detach", "expand", "flatten", "permute", "reshape", "slice", "squeeze", "to",
        "_to_copy", "transpose", "unsqueeze", "view", "dropout", "mul",
    }
)  # fmt: skip
"""Operators with one tensor operand after which it is still called what it was."""
_TELLING = frozenset({"cos", "sin"})
"""Operators whose result keeps its name across modules."""


_SHORT = {
    "scaled_dot_product_attention": "attention",
    "cross_entropy_loss": "loss",
    "nll_loss": "loss",
    "native_layer_norm": "norm",
    "native_group_norm": "norm",
    "convolution": "conv",
    "max_pool2d_with_indices": "pool",
}
"""Shorter words for what some operators make."""
ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


def identifier(name: str) -> str:
    """A Python name made of any text; never a keyword, a builtin, or a name that emitted files import."""
    made = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "x"
    if made[0].isdigit():
        made = f"x{made}"
    return f"{made}_" if made in _TAKEN else made


def is_plain(name: str) -> bool:
    """Whether an attribute can be written after a dot."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def variable_case(name: str) -> str:
    """``SelfAttention`` -> ``self_attention``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def singular(name: str) -> str:
    """``layers`` -> ``layer``; the loop variable over such modules."""
    made = identifier(variable_case(name))
    return made[:-1] if made.endswith("s") and len(made) > 2 and not made.endswith("ss") else "layer"


def class_case(name: str) -> str:
    """``encoder_layer`` -> ``EncoderLayer``."""
    made = "".join(part[:1].upper() + part[1:] for part in re.split(r"\W+|_", name, flags=re.ASCII) if part)
    return made if made and not made[0].isdigit() else f"Module{made}"


def packet(value: Value) -> str:
    """``view`` for a value made by ``aten.view.default``; ``""`` if no operator of torch made it."""
    target = None if value.node is None else value.node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _origin(value: Value) -> Value:
    """Back through operators that only change the form."""
    while packet(value) in _SAME_IDEA:
        assert value.node is not None
        sources = value.node.all_input_nodes
        if len(sources) != 1:
            break
        value = Value(sources[0])
    return value


def argument_hint(value: Value) -> str:
    """What a forward calls an argument. Depends on as little as possible, so that equal modules look equal."""
    if value.node is None:
        return value.attribute.rpartition(".")[2]
    fake = fake_of(value)
    origin = _origin(value)
    if packet(origin) in _TELLING:
        return packet(origin)
    if isinstance(fake, torch.Tensor) and fake.dtype == torch.bool:
        return "mask"
    if origin.node is not None and origin.node.op == "placeholder" and not _floating(origin):
        return str(origin.node.target)
    return "x"


def result_hint(value: Value, called: Callable[[fx.Node], str | None]) -> str:
    """What a forward calls a result: the module or operator that it comes from, changes of form apart.

    Args:
        value: made in this forward.
        called: for a node, the name of the module called by this forward that makes it; ``""`` for the forward's own
            operators, None for what is made outside it.
    """
    origin = _origin(value)
    assert value.node is not None
    maker = None if origin.node is None else called(origin.node)
    if maker is None:
        outside = argument_hint(value)
        return outside if outside != "x" else _operator_word(value)
    return maker or called(value.node) or _operator_word(origin)


def _operator_word(value: Value) -> str:
    made = packet(value)
    return _SHORT.get(made, made.strip("_")) or "x"


def _floating(value: Value) -> bool:
    fake = fake_of(value)
    return isinstance(fake, torch.Tensor) and fake.is_floating_point()


def alike(first: Value, second: Value) -> bool:
    """Whether two values are floating tensors of one shape, so that one may take the other's name."""
    if not (_floating(first) and _floating(second)):
        return False
    return bool(fake_of(first).shape == fake_of(second).shape)


@dataclass
class Names:
    """Variables of one forward. A name is free again once its value is dead, which also frees the tensor."""

    holders: dict[str, Value] = field(default_factory=dict)
    names: dict[Value, str] = field(default_factory=dict)

    def free(self, hint: str) -> str:
        """``hint`` as a name that no live value has, numbered if need be."""
        base = identifier(hint)
        name, number = base, 1
        while name in self.holders:
            name, number = f"{base}_{number}", number + 1
        return name

    def new(self, value: Value, hint: str) -> str:
        """Name a value after ``hint``."""
        return self.take(value, self.free(hint))

    def take(self, value: Value, name: str) -> str:
        """Give a value a name that is free."""
        self.holders[name] = value
        self.names[value] = name
        return name

    def release(self, value: Value) -> None:
        """The value is dead."""
        name = self.names.get(value)
        if name is not None and self.holders.get(name) == value:
            del self.holders[name]
