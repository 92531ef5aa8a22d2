"""The tables of a module: unique storages with all their names, and the module tree."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from partitioner.program import ModuleInfo, TensorInfo, dtype_name


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names of one storage. A meta or fake tensor has no address, so there the object itself decides."""
    addressed = tensor.device.type != "meta" and type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    if not addressed or tensor.numel() == 0 or tensor.layout != torch.strided:
        return ("object", id(tensor))
    return ("storage", tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)


def tensor_table(named: Iterable[tuple[str, torch.Tensor]], *, parameters: bool) -> tuple[TensorInfo, ...]:
    """Unique storages in registration order, each with all its names."""
    groups: dict[tuple[object, ...], tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        groups.setdefault(storage_key(tensor), (tensor, []))[1].append(name)
    return tuple(
        TensorInfo(
            name=names[0],
            aliases=tuple(names),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            trainable=parameters and tensor.requires_grad,
        )
        for tensor, names in groups.values()
    )


def module_names(module: nn.Module) -> dict[str, str]:
    """Every name of every module -> its canonical one, the first in pre-order: one module may sit in two places."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(child), name) for name, child in module.named_modules(remove_duplicate=False)}


def module_table(module: nn.Module) -> tuple[ModuleInfo, ...]:
    """Every module once, in pre-order. FSDP2 hooks ``forward``, so containers that define none may not be units."""
    return tuple(
        ModuleInfo(
            name=name,
            class_name=type(child).__name__,
            has_forward=type(child).forward is not nn.Module.forward or "forward" in vars(child),
        )
        for name, child in module.named_modules()
    )
