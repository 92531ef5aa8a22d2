"""Optimizer state that lives in host memory and visits the device one unit at a time.

Copied next to train.py as it is when a plan offloads optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class HostStateOptimizer:
    """One optimizer a unit. Between steps the state's device memory is released and its values are on the host.

    Args:
        units: parameters of each unit; frozen ones are left out.
        make: builds the optimizer of one unit.
    """

    def __init__(
        self, units: Sequence[Sequence[nn.Parameter]], make: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        trained = [[p for p in unit if p.requires_grad] for unit in units]
        self.optimizers = [make(unit) for unit in trained if unit]
        self.host: dict[tuple[int, Tensor, str], Tensor] = {}

    def _state(self, index: int) -> Iterator[tuple[tuple[int, Tensor, str], Tensor]]:
        """The rank's own part of every state tensor that has a size."""
        for parameter, state in self.optimizers[index].state.items():
            for name, value in state.items():
                local = value.to_local() if isinstance(value, DTensor) else value
                if isinstance(local, Tensor) and local.dim() and local.numel():
                    yield (index, parameter, name), local

    def _to_device(self, index: int) -> None:
        for key, local in self._state(index):
            local.untyped_storage().resize_(local.nbytes)
            local.copy_(self.host[key], non_blocking=True)

    def _to_host(self, index: int) -> None:
        """Copies and releases are ordered by the stream, so nothing waits here."""
        for key, local in self._state(index):
            if key not in self.host:
                self.host[key] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self.host[key].copy_(local, non_blocking=True)
            local.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self) -> None:
        for index, optimizer in enumerate(self.optimizers):
            self._to_device(index)
            optimizer.step()
            self._to_host(index)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
