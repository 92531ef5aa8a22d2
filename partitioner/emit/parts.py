"""Parts of train.py that are the same for every plan: torch alone, copied into it by their source text.

``partition verify`` runs the same functions, so what is verified is what is trained with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F  # noqa: N812  # the usual name
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode


class MetaToCpu(TorchFunctionMode):
    """Whatever asks for the meta device gets the cpu, except parameters that are there already."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not (args and isinstance(args[0], nn.Parameter)):
            args = tuple("cpu" if isinstance(a, str | torch.device) and str(a) == "meta" else a for a in args)
            if str(kwargs.get("device")) == "meta":
                kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def real_buffers() -> Iterator[None]:
    """While this is active, modules built on the meta device get real buffers; parameters go to meta at once."""

    def to_meta(module: nn.Module, name: str, param: nn.Parameter) -> Any:
        return param if param.is_meta else nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        with MetaToCpu():
            yield
    finally:
        hook.remove()


def build(factory: Callable[[], Any], seed: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Run a factory: the module, and the example arguments of its forward.

    A module left on the meta device is built again with real buffers, which no initialisation could bring back;
    ``materialize`` and ``initialize`` then do the parameters.
    """

    def run() -> tuple[nn.Module, Any, dict[str, Any]]:
        torch.manual_seed(seed)
        made = factory()
        module, *rest = made if isinstance(made, tuple) else (made,)
        args = rest[0] if rest else ()
        return module, args if isinstance(args, tuple) else (args,), rest[1] if len(rest) > 1 else {}

    module, args, kwargs = run()
    if any(parameter.is_meta for parameter in module.parameters()):
        with real_buffers():
            module = run()[0]
    return module, args, kwargs


def materialize(model: nn.Module, device: torch.device) -> None:
    """Real, uninitialised parameters in place of those on meta; buffers keep their values."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta != (kind == "parameter"):
                raise RuntimeError(
                    f"{kind} {name} is on {tensor.device}: build all of the model on meta, or none of it"
                )
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            holders.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, first_name), *others in holders.values():
        for module, name in others:  # to_empty unties
            module._parameters[name] = first._parameters[first_name]
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Give parameters values that depend on the seed and the model only, not on the number of ranks.

    Each module's own parameters are made whole, initialised by its ``reset_parameters`` (where it has none: matrices
    normal with deviation 0.02, biases zero, other vectors one), and then cut to the rank's shard.
    """
    done: set[int] = set()
    for index, module in enumerate(model.modules()):
        own = {k: p for k, p in module._parameters.items() if p is not None and id(p) not in done}
        done.update(id(p) for p in own.values())
        whole = {k: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device)) for k, p in own.items()}
        torch.manual_seed(seed + index)
        reset = getattr(module, "reset_parameters", None)
        if own and callable(reset):
            module._parameters.update(whole)
            reset()
            module._parameters.update(own)
        else:
            for name, value in whole.items():
                if value.dim() > 1:
                    value.normal_(0.0, 0.02)
                else:
                    value.fill_(0.0 if name.endswith("bias") else 1.0)
        for name, value in whole.items():
            target: Tensor = own[name]
            if isinstance(target, DTensor):
                cut = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(cut.to_local())
            else:
                target.copy_(value)


def smallest_table(model: nn.Module) -> int:
    """Rows of the smallest embedding: every integer below it is a legal token. 2 where there is none."""
    return min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)


def random_like(example: Any, generator: torch.Generator, high: int) -> Any:
    """A random batch in the form of the example batch.

    Floats are normal; integers are drawn from the values that the example holds, or from 0..high-1 where it is on meta
    or all alike; booleans (masks) and what is no tensor stay.
    """
    if isinstance(example, tuple | list):
        return tuple(random_like(item, generator, high) for item in example)
    if isinstance(example, dict):
        return {key: random_like(item, generator, high) for key, item in example.items()}
    if not isinstance(example, Tensor):
        return example
    if example.is_floating_point():
        return torch.randn(example.shape, generator=generator).to(example.dtype)
    if example.dtype == torch.bool or example.is_complex():
        return torch.ones(example.shape, dtype=example.dtype) if example.is_meta else example
    if example.is_meta or bool((example == example.flatten()[:1]).all()):
        return torch.randint(high, example.shape, generator=generator).to(example.dtype)
    picked = torch.randint(example.numel(), (example.numel(),), generator=generator)
    return example.flatten()[picked].reshape(example.shape)


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple | list):
        return tuple(to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """The tensors of a model's return value, in order, with the names of dict keys and dataclass fields."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple | list):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return []
    return [found for key, item in items for found in named_tensors(item, f"{name}.{key}" if name else key)]


def loss_of(output: Any, kind: str, generator: torch.Generator) -> Tensor:
    """The loss of a model's return value.

    ``output``: the model's own loss, a floating scalar that is its only tensor or is called ``loss``. ``mean``, ``mse`` and
    ``cross_entropy`` are of the first floating tensor, in float32: its mean, the mean of its square, and against random
    labels with the classes in the last dim.
    """
    found = named_tensors(output)
    floating = [(name, tensor) for name, tensor in found if tensor.is_floating_point()]
    if kind == "output":
        for name, tensor in floating:
            if tensor.dim() == 0 and (len(found) == 1 or name == "loss"):
                return tensor
        raise RuntimeError("the model returns no floating scalar called loss")
    first = floating[0][1].float()
    if kind == "mse":
        return first.square().mean()
    if kind == "cross_entropy":
        classes = first.shape[-1]
        labels = torch.randint(classes, first.shape[:-1], generator=generator).to(first.device)
        return F.cross_entropy(first.reshape(-1, classes), labels.reshape(-1))
    return first.mean()
