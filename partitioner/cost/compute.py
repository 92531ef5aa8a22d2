"""Seconds of an operator on a GPU, by roofline: the larger of its arithmetic and its memory traffic, plus launches."""

from __future__ import annotations

from collections.abc import Callable

from partitioner.errors import UsageError
from partitioner.hardware.catalogue import Gpu

Clock = Callable[[str, str, int, int, int], float]
"""(op_class, dtype, flop, bytes, kernels) -> seconds."""

MEMORY_EFFICIENCY = 0.85
"""Share of the memory's peak rate that streaming kernels reach: assumed, to be calibrated."""

FILL_S = 2e-6
"""A kernel of ``peak * FILL_S`` FLOPs reaches half of its class's efficiency: the time to fill and drain the machine with
tiles. Assumed, to be calibrated: at the H100's 16-bit peak it is the product of two 1000 x 1000 matrices."""

_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_COMPLEX_FACTOR = 4  # FLOP formulas count a complex multiply-add as one real one; it takes four


def peak_flop_per_s(gpu: Gpu, dtype: str) -> float:
    """Dense peak rate of a GPU for products of ``dtype``, in FLOP/s; what MFU is measured against.

    ``float32`` is the rate without tf32, which torch leaves off for matrix products unless asked
    (``torch.get_float32_matmul_precision() == "highest"``); ``tf32`` names the other.

    Raises:
        UsageError: the catalogue has no rate of that dtype for that GPU.
    """
    name = "float8" if dtype.startswith("float8") else dtype
    if name not in gpu.flop_per_s:
        raise UsageError(
            f"{gpu.name} has no rate for {dtype} arithmetic",
            hint=f"its catalogue entry knows {', '.join(gpu.flop_per_s)}; choose one of them or another GPU",
        )
    return gpu.flop_per_s[name]


def _class_peak_flop_per_s(gpu: Gpu, op_class: str, dtype: str) -> float:
    """The peak for an operator of a class, as torch runs it when its precision settings are left alone."""
    if dtype in _COMPLEX:
        return peak_flop_per_s(gpu, _COMPLEX[dtype]) / _COMPLEX_FACTOR
    if op_class == "conv" and dtype == "float32" and "tf32" in gpu.flop_per_s:
        return gpu.flop_per_s["tf32"]  # torch.backends.cudnn.allow_tf32 is on by default, unlike that of matmul
    return peak_flop_per_s(gpu, dtype)


def _efficiency(gpu: Gpu, op_class: str, peak: float, flop_per_kernel: float) -> float:
    """Share of ``peak`` (FLOP/s) that kernels of a class and size reach; grows with size towards the class's share.

    Classes that have no share of their own count FLOPs only through matrix products and take theirs.
    """
    large = gpu.efficiency.get(op_class, gpu.efficiency["matmul"])
    return large * flop_per_kernel / (flop_per_kernel + peak * FILL_S)


def make_clock(gpu: Gpu) -> Clock:
    """A clock for one GPU; its seconds never fall when flop, bytes or kernels grow.

    ``max(flop / (peak * efficiency), bytes / (memory rate * MEMORY_EFFICIENCY)) + kernels * launch``, with the peak of the
    dtype (dense), efficiency by class and by FLOPs per kernel, and bytes that are read and written.
    The roofline is that of Williams, Waterman and Patterson (2009), doi:10.1145/1498765.1498785.

    The clock raises UsageError for FLOPs of a dtype that the catalogue has no rate for.
    """
    memory_bytes_per_s = gpu.memory_bytes_per_s * MEMORY_EFFICIENCY

    def clock(op_class: str, dtype: str, flop: int, nbytes: int, kernels: int) -> float:
        arithmetic_s = 0.0
        if flop:
            peak = _class_peak_flop_per_s(gpu, op_class, dtype)
            arithmetic_s = flop / (peak * _efficiency(gpu, op_class, peak, flop / max(kernels, 1)))
        return max(arithmetic_s, nbytes / memory_bytes_per_s) + kernels * gpu.kernel_launch_s

    return clock
