"""A Program: what capture hands to the passes and the planner.

One ``torch.fx`` graph of the forward (loss included), a table of *unique storages* for parameters and buffers, the
tree of modules the graph came from, and the training recipe. Every node of the graph carries one typed ``NodeInfo``
under ``node.meta[INFO]`` beside the fake-tensor value in ``node.meta["val"]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx

INFO = "partitioner"
"""The one key under which a node's NodeInfo is kept in ``node.meta``."""

LossKind = Literal["auto", "output", "mean", "cross_entropy", "mse"]
Optimizer = Literal["adamw", "sgd"]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One unique storage among parameters or buffers."""

    name: str
    """Canonical fully qualified name: the first alias in registration order."""
    aliases: tuple[str, ...]
    """Every name that reaches this storage, canonical first; more than one means tied."""
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def padded_shard_numel(self, num_shards: int) -> int:
        """Elements every rank allocates under FSDP2's ``Shard(0)``: ceil(dim0 / n) rows, padding included."""
        if not self.shape or self.shape[0] == 0:
            return self.numel
        return -(-self.shape[0] // num_shards) * (self.numel // self.shape[0])

    def padded_shard_bytes(self, num_shards: int) -> int:
        return self.padded_shard_numel(num_shards) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class ModuleInfo:
    """One module of the tree (for ONNX: one scope recovered from the export)."""

    name: str
    """FQN; the root is ``""``."""
    class_name: str
    has_forward: bool
    """Whether FSDP2 may hook it: a ModuleList that does not define ``forward`` may not be a unit."""


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """What the planner knows of one forward operator. Filled in steps: capture, then annotate-costs, then find-units."""

    module: str = ""
    """FQN of the innermost module whose forward runs this node."""
    call: int = 0
    """Which call of that module this is (0 for the first), so that a module called twice is seen twice."""
    reads: tuple[str, ...] = ()
    """Canonical names of the parameters that this node reads directly."""
    needs_grad: bool = False
    """Whether the backward pass runs through this node."""
    op_class: str = "elementwise"
    """Roofline class: ``matmul``, ``attention``, ``conv``, ``elementwise``, ``view``, ``opaque``."""
    forward_flop: int = 0
    forward_bytes: int = 0  # read and written by the forward operator
    backward_flop: int = 0
    backward_bytes: int = 0
    forward_kernels: int = 0  # aten operators launched, views excluded
    backward_kernels: int = 0
    forward_temp_bytes: int = 0  # largest live bytes inside the operator beyond its inputs and outputs
    backward_temp_bytes: int = 0  # same in its backward, beyond saved tensors and incoming and outgoing gradients
    outputs: tuple[str, ...] = ()
    """Activation storages that this node's output values live in (shared with an input for views), one name each."""
    saves: tuple[str, ...] = ()
    """Storages that autograd keeps for this node's backward: names of keys in ``Program.storages``."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    atom: int = -1
    """Index of the planning window that this node runs in (find-units)."""


@dataclass(frozen=True, kw_only=True)
class StorageInfo:
    """One activation storage (views share it)."""

    name: str
    nbytes: int
    producer: str
    """Name of the node that allocates it; ``""`` for model inputs."""


@dataclass(frozen=True, kw_only=True)
class UnitGroup:
    """Modules that could be one gather unit (find-units proposes only what FSDP2 accepts)."""

    name: str
    modules: tuple[str, ...]
    """FQNs in execution order; ``("",)`` is the root with the parameters that no other unit may have."""
    parameters: tuple[str, ...]
    calls: tuple[tuple[int, int], ...]
    """Window ranges (first, last), inclusive, one per forward call."""
    level: Literal["atom", "block", "merge", "pinned", "bare"]
    """``atom``: finest; ``block``: one repeated module; ``merge``: several blocks in a row; ``pinned``: must be a unit of
    its own; ``bare``: a window with no parameters of its own."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the model is trained; everything that changes bytes or seconds but is not the model or the cluster."""

    batch: int = 1  # sequences (or samples) per GPU and micro-batch
    seq: int | None = None  # tokens per sequence where the model has such a dimension
    compute_dtype: str = "bfloat16"  # dtype of gathered parameters and of activations
    reduce_dtype: str = "float32"  # dtype of gradient reduction
    optimizer: Optimizer = "adamw"
    loss: LossKind = "auto"
    dims: Mapping[str, int] = field(default_factory=dict)  # symbolic dimensions bound by the user


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the model came from."""

    kind: Literal["module", "onnx", "pt2"]
    spec: str
    """What the user typed (``path/to/file.py:factory``, ``model.onnx``, ...)."""


@dataclass
class Program:
    """Graph, tables and recipe. Passes rewrite ``graph`` in place and replace the tables."""

    graph: fx.GraphModule
    parameters: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    modules: tuple[ModuleInfo, ...]
    """In pre-order, root first."""
    recipe: Recipe
    source: Source
    storages: dict[str, StorageInfo] = field(default_factory=dict)
    windows: tuple[str, ...] = ()
    """Names of the planning windows, in execution order (find-units)."""
    groups: tuple[UnitGroup, ...] = ()
    """Every unit that could be chosen (find-units)."""
    defaults: dict[str, str] = field(default_factory=dict)
    """What capture assumed because nobody said it: flag or idea -> what was used, in words."""
    warnings: list[str] = field(default_factory=list)

    def parameter(self, alias: str) -> TensorInfo:
        """The storage behind any of its names. Raises KeyError for an unknown one."""
        for info in (*self.parameters, *self.buffers):
            if alias in info.aliases:
                return info
        raise KeyError(alias)

    def module(self, name: str) -> ModuleInfo:
        for module in self.modules:
            if module.name == name:
                return module
        raise KeyError(name)


def node_info(node: fx.Node) -> NodeInfo:
    """The record of ``node``; an empty one if no pass has filled it yet."""
    info = node.meta.get(INFO)
    return info if isinstance(info, NodeInfo) else NodeInfo()


def update_info(node: fx.Node, **changes: object) -> NodeInfo:
    """Replace fields of the node's record and return the new record."""
    info = replace(node_info(node), **changes)  # type: ignore[arg-type]  # field names are checked by replace at run time
    node.meta[INFO] = info
    return info
