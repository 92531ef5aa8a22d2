"""Optimizer state and step: values by hand, and torch's own optimizers as witnesses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partitioner.cost.optimizer import host_transfer_s, state_bytes_per_element, step_seconds
from partitioner.errors import UsageError
from partitioner.hardware.catalogue import find_gpu

H100, A100 = find_gpu("h100"), find_gpu("a100")
NUMEL = 1000
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class _Accesses(TorchDispatchMode):
    """Counts elements that foreach kernels read and write; a tensor given twice to one kernel is read once."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name.startswith("_foreach"):
            reads = {id(t): t.numel() for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.numel() == NUMEL}
            self.count += len(reads) + (1 if reads else 0)  # every one of them writes one tensor
        return out


def stepped(name, dtype=torch.float32):
    parameter = torch.nn.Parameter(torch.zeros(NUMEL, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = OPTIMIZERS[name]([parameter], lr=1e-3, foreach=True)
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_what_torch_keeps(name, dtype):
    parameter, optimizer = stepped(name, dtype)
    kept = sum(
        t.numel() * t.itemsize
        for t in optimizer.state[parameter].values()
        if isinstance(t, torch.Tensor) and t.numel() == NUMEL
    )
    assert state_bytes_per_element(name, dtype.itemsize) * NUMEL == kept


def test_state_by_hand():
    assert state_bytes_per_element("adamw", 4) == 8
    assert state_bytes_per_element("adamw", 2) == 4
    assert state_bytes_per_element("sgd", 4) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_moves_what_torchs_foreach_kernels_move(name):
    _, optimizer = stepped(name)
    with _Accesses() as accesses:
        optimizer.step()
    bytes_moved = accesses.count * NUMEL * 4
    assert step_seconds(H100, name, NUMEL, 4) == pytest.approx(bytes_moved / (3.35e12 * 0.85))


def test_step_by_hand():
    # 1e9 elements, 20 accesses of 4 bytes = 80 GB at 0.85 * 2039 GB/s = 46.2 ms
    assert step_seconds(A100, "adamw", 10**9, 4) == pytest.approx(80 / (0.85 * 2039))
    assert step_seconds(A100, "sgd", 10**9, 4) == pytest.approx(12 / (0.85 * 2039))


def test_host_transfer_by_hand():
    # 8 GB there and back over 0.8 * 64 GB/s
    assert host_transfer_s(H100, 8 * 10**9) == pytest.approx(16 / 51.2)
    assert host_transfer_s(A100, 8 * 10**9) == pytest.approx(16 / 25.6)
    assert host_transfer_s(H100, 0) == 0


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from(["adamw", "sgd"]), st.sampled_from([2, 4]))
def test_more_elements_never_take_less_time(numel, more, name, itemsize):
    assert step_seconds(H100, name, numel + more, itemsize) >= step_seconds(H100, name, numel, itemsize)
    assert host_transfer_s(H100, numel + more) >= host_transfer_s(H100, numel)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UsageError, match="--optimizer adam: not known") as caught:
        state_bytes_per_element("adam", 4)
    assert "did you mean adamw?" in caught.value.hint
    with pytest.raises(UsageError, match="--optimizer lion"):
        step_seconds(H100, "lion", 1, 4)
