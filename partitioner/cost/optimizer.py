"""Bytes of optimizer state, seconds of an optimizer step, seconds to bring state to the device and take it back."""

from __future__ import annotations

from partitioner.cost.compute import MEMORY_EFFICIENCY
from partitioner.errors import UsageError
from partitioner.hardware.catalogue import Gpu, nearest

_STATES = {"adamw": 2, "sgd": 0}
"""Tensors per parameter, of its dtype and shape: torch.optim.AdamW keeps exp_avg and exp_avg_sq, SGD without momentum none."""

_ACCESSES = {"adamw": 20, "sgd": 3}
"""Elements read or written per parameter element by the foreach implementation, which torch.optim takes by default on
accelerators, DTensor included; a tensor given twice to one kernel is read once. AdamW: decay of the parameter 2, first
moment 3, second moment 2 + 3, its root 2, bias correction 2, epsilon 2, update 4. SGD: one update 3. ``fused=True`` would
move 7 for AdamW; nothing in an emitted module asks for it."""

HOST_LINK_EFFICIENCY = 0.80
"""Share of the host link's raw rate that pinned copies reach: assumed, to be calibrated."""


def _known(table: dict[str, int], name: str) -> int:
    if name not in table:
        raise UsageError(f"--optimizer {name}: not known", hint=nearest(name, table))
    return table[name]


def state_bytes_per_element(name: str, itemsize: int) -> int:
    """Bytes of state that an optimizer keeps for one element of a parameter of ``itemsize`` bytes.

    Raises:
        UsageError: the optimizer is not known.
    """
    return _known(_STATES, name) * itemsize


def step_seconds(gpu: Gpu, name: str, numel: int, itemsize: int) -> float:
    """Seconds of the step for ``numel`` elements of ``itemsize`` bytes: memory traffic alone, launches being shared by all
    parameters.

    Raises:
        UsageError: the optimizer is not known.
    """
    return _known(_ACCESSES, name) * numel * itemsize / (gpu.memory_bytes_per_s * MEMORY_EFFICIENCY)


def host_transfer_s(gpu: Gpu, nbytes: int) -> float:
    """Seconds to copy ``nbytes`` to the device and back, one after the other.

    The link could carry both ways at once, but an update needs its state before it can return it.
    """
    return 2 * nbytes / (gpu.host_link.bytes_per_s * HOST_LINK_EFFICIENCY)
