"""What one operator costs: counts by hand for a matrix product, norms, dropout, attention and views."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from partitioner.cost.measure import OperatorCost, Slot, StorageRef, TensorSpec, measure

aten = torch.ops.aten
BF16 = torch.bfloat16


def spec(*shape: int, dtype: torch.dtype = BF16, requires_grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, requires_grad)


def cost(target: Callable[..., Any], args: tuple[Any, ...], *inputs: TensorSpec) -> OperatorCost:
    return measure(target, args, {}, inputs)


def saved_bytes(measured: OperatorCost, *inputs: TensorSpec) -> list[int]:
    sizes = [torch.Size(s.shape).numel() * s.dtype.itemsize for s in inputs]
    return sorted((measured.new_bytes if ref.kind == "new" else sizes)[ref.index] for ref in measured.saved)


def test_a_matrix_product():
    a, b = spec(64, 128), spec(128, 32)
    found = cost(aten.mm.default, (Slot(0), Slot(1)), a, b)
    assert found.op_class == "matmul"
    assert found.forward.flop == 2 * 64 * 128 * 32
    assert found.forward.nbytes == 2 * (64 * 128 + 128 * 32 + 64 * 32)
    assert found.backward.flop == 2 * found.forward.flop
    assert saved_bytes(found, a, b) == [2 * 128 * 32, 2 * 64 * 128]
    assert found.new_bytes == (2 * 64 * 32,)


def test_a_product_with_a_frozen_weight_has_one_product_backward_and_keeps_the_weight_only():
    a, b = spec(64, 128), spec(128, 32, requires_grad=False)
    found = cost(aten.mm.default, (Slot(0), Slot(1)), a, b)
    assert found.backward.flop == found.forward.flop
    assert found.saved == (StorageRef("input", 1),)


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_one_kernel_that_keeps_its_input_and_a_few_numbers_a_row(weighted: bool):
    rows, width = 256, 512
    x, w = spec(rows, width), spec(width)
    args = (Slot(0), [width], Slot(1), 1e-6) if weighted else (Slot(0), [width])
    found = cost(aten.rms_norm.default, args, x, w)
    assert found.forward.kernels == 1
    assert found.forward.temp_bytes == 0
    assert found.new_bytes[0] == 2 * rows * width
    large = [n for n in saved_bytes(found, x, w) if n > 4 * rows]
    assert large == [2 * rows * width]


def test_dropout_keeps_a_mask_of_one_byte_an_element():
    x = spec(100, 10)
    assert saved_bytes(cost(aten.dropout.default, (Slot(0), 0.1, True), x), x) == [1000]


def test_attention_does_not_keep_its_scores():
    heads = [spec(1, 4, 128, 16) for _ in range(3)]
    found = cost(aten.scaled_dot_product_attention.default, (Slot(0), Slot(1), Slot(2), None, 0.1, True), *heads)
    assert found.op_class == "attention"
    assert max(saved_bytes(found, *heads)) == 2 * 4 * 128 * 16
    assert found.forward.flop == 2 * 2 * 4 * 128 * 128 * 16 // 2  # causal: half of the scores


def test_a_view_costs_nothing_and_lives_in_its_input():
    found = cost(aten.view.default, (Slot(0), [20, 50]), spec(100, 10))
    assert found.op_class == "view"
    assert (found.forward.nbytes, found.forward.kernels, found.saved) == (0, 0, ())
    assert found.outputs == (StorageRef("input", 0),)


def test_without_gradients_nothing_is_kept():
    found = measure(aten.mm.default, (Slot(0), Slot(1)), {}, [spec(4, 4), spec(4, 4)], grad_enabled=False)
    assert found.saved == ()
    assert not found.needs_grad
