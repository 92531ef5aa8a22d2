"""The roofline clock: one case by hand, laws, and which peak applies."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partitioner.cost.compute import make_clock, peak_flop_per_s
from partitioner.errors import UsageError
from partitioner.hardware.catalogue import find_gpu, gpus

H100 = find_gpu("h100")
SIMPLE = replace(
    H100,
    name="simple",
    flop_per_s={"float64": 25e12, "float32": 50e12, "tf32": 400e12, "float16": 800e12, "bfloat16": 800e12},
    efficiency={"matmul": 0.8, "conv": 0.5, "attention": 0.4},
    memory_bytes_per_s=2e12,
    kernel_launch_s=4e-6,
)
CLASSES = st.sampled_from(["matmul", "conv", "attention", "elementwise", "opaque", "view"])
DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])
SIZES = st.integers(0, 10**15)
KERNELS = st.integers(0, 1000)


def test_a_matrix_product_by_hand():
    flop, nbytes = 2 * 4096**3, 3 * 4096**2 * 2
    # 137.4 GFLOP at 0.8 of 800 TFLOP/s = 214.7 us; half efficiency at 800e12 * 2e-6 = 1.6 GFLOP adds 1.6e9 / 640e12 = 2.5 us
    assert make_clock(SIMPLE)("matmul", "bfloat16", flop, nbytes, 1) == pytest.approx(
        214.748e-6 + 2.5e-6 + 4e-6, rel=1e-4
    )


def test_an_elementwise_operator_by_hand():
    # 3.4 GB at 0.85 of 2 TB/s = 2 ms
    assert make_clock(SIMPLE)("elementwise", "float32", 0, 3_400_000_000, 2) == pytest.approx(2e-3 + 8e-6)


def test_a_thin_product_is_bound_by_memory():
    # one row against a 8192 x 8192 matrix: 134 MB at 1.7 TB/s = 79 us; its 134 MFLOP need far less
    assert make_clock(SIMPLE)("matmul", "bfloat16", 2 * 8192**2, 2 * 8192**2, 1) == pytest.approx(
        78.95e-6 + 4e-6, rel=1e-3
    )


def test_a_view_is_free():
    assert make_clock(SIMPLE)("view", "bfloat16", 0, 0, 0) == 0


def test_classes_differ():
    clock = make_clock(SIMPLE)
    matmul, conv, attention = (clock(c, "bfloat16", 10**13, 0, 0) for c in ("matmul", "conv", "attention"))
    assert conv / matmul == pytest.approx(0.8 / 0.5)
    assert attention / matmul == pytest.approx(0.8 / 0.4)


def test_small_kernels_reach_less():
    clock = make_clock(SIMPLE)
    one = clock("matmul", "bfloat16", 10**12, 0, 1) - 4e-6
    many = clock("matmul", "bfloat16", 10**12, 0, 1000) - 1000 * 4e-6
    # a kernel of 1 GFLOP reaches 1 / (1 + 1.6) of the class's efficiency; one of 1 TFLOP nearly all
    assert one == pytest.approx(10**12 / 640e12, rel=0.002)
    assert many == pytest.approx(2.6 * 10**12 / 640e12)


def test_float32_follows_torch_defaults():
    clock = make_clock(SIMPLE)
    assert torch.get_float32_matmul_precision() == "highest"  # no tf32 in matrix products
    assert torch.backends.cudnn.allow_tf32  # but in convolutions
    flop = 10**15
    assert clock("matmul", "float32", flop, 0, 1) == pytest.approx(flop / (50e12 * 0.8), rel=1e-3)
    assert clock("conv", "float32", flop, 0, 1) == pytest.approx(flop / (400e12 * 0.5), rel=1e-3)
    assert make_clock(find_gpu("v100"))("conv", "float32", flop, 0, 1) == pytest.approx(
        flop / (15.7e12 * 0.6), rel=1e-3
    )


def test_complex_products_take_four_real_ones():
    clock = make_clock(SIMPLE)
    real, imaginary = clock("matmul", "float32", 10**15, 0, 1), clock("matmul", "complex64", 10**15, 0, 1)
    assert imaginary / real == pytest.approx(4, rel=1e-3)


def test_peak_is_dense():
    assert peak_flop_per_s(H100, "bfloat16") == 989.4e12
    assert peak_flop_per_s(H100, "float32") == 67e12
    assert peak_flop_per_s(H100, "tf32") == 494.7e12
    assert peak_flop_per_s(H100, "float8_e4m3fn") == peak_flop_per_s(H100, "float8_e5m2") == 1978.9e12


def test_a_dtype_without_a_rate_is_refused():
    with pytest.raises(UsageError, match="a100-sxm-80gb has no rate for float8_e4m3fn arithmetic") as caught:
        peak_flop_per_s(find_gpu("a100"), "float8_e4m3fn")
    assert "bfloat16" in caught.value.hint
    clock = make_clock(find_gpu("a100"))
    with pytest.raises(UsageError):
        clock("matmul", "int64", 10, 10, 1)
    assert clock("elementwise", "int64", 0, 10, 1) > 0  # moving integers needs no rate


@given(CLASSES, DTYPES, SIZES, SIZES, KERNELS, SIZES, SIZES, KERNELS)
def test_more_work_never_takes_less_time(op_class, dtype, flop, nbytes, kernels, more_flop, more_bytes, more_kernels):
    clock = make_clock(H100)
    small = clock(op_class, dtype, flop, nbytes, kernels)
    slack = 1 + 1e-12
    assert clock(op_class, dtype, flop + more_flop, nbytes, kernels) * slack >= small
    assert clock(op_class, dtype, flop, nbytes + more_bytes, kernels) * slack >= small
    assert clock(op_class, dtype, flop, nbytes, kernels + more_kernels) * slack >= small


@given(CLASSES, DTYPES, SIZES, SIZES, st.integers(1, 1000))
def test_never_faster_than_the_hardware(op_class, dtype, flop, nbytes, kernels):
    for gpu in gpus():
        best = gpu.flop_per_s.get("tf32", 0) if dtype == "float32" else 0
        floor = max(flop / max(best, gpu.flop_per_s[dtype]), nbytes / gpu.memory_bytes_per_s)
        assert make_clock(gpu)(op_class, dtype, flop, nbytes, kernels) > floor
