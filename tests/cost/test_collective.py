"""Ring collectives: values by hand, published measurements, and laws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.config import resolve_cluster
from partitioner.cost.collective import START_S, all_gather_s, all_reduce_s, bus_bytes_per_s, reduce_scatter_s

NODE, _ = resolve_cluster(gpus=8, gpu="h100")
NODES, _ = resolve_cluster(gpus=32, gpu="h100")
GB = 10**9
RANKS = st.integers(2, 256)
SIZES = st.integers(1, 10**12)
COLLECTIVES = (all_gather_s, reduce_scatter_s, all_reduce_s)


def test_all_gather_in_a_node_by_hand():
    # 7/8 of 8 GB at 0.8 * 450 GB/s = 19.444 ms; start 25 us, 7 steps of 3.4 us
    assert all_gather_s(NODE, 8 * GB, 8) == pytest.approx(7 / 360 + 25e-6 + 23.8e-6)


def test_reduce_scatter_across_nodes_by_hand():
    # 31/32 of 32 GB; a wire at 0.73 * 50 = 36.5 GB/s, times 31 / 3 = 377.2, so the 360 inside the node bind;
    # 3 of the 31 steps cross nodes at 14 us
    assert reduce_scatter_s(NODES, 32 * GB, 32) == pytest.approx(31 / 360 + 25e-6 + 3 * 14e-6 + 28 * 3.4e-6)


def test_all_reduce_across_slow_nodes_by_hand():
    slow = replace(NODES, inter_bytes_per_s=10e9)
    # 7.3 GB/s * 31 / 3 = 75.43 GB/s on the bus; twice around
    assert bus_bytes_per_s(slow, 32) == pytest.approx(75.433e9, rel=1e-4)
    latency = 25e-6 + 2 * (3 * 14e-6 + 28 * 3.4e-6)
    assert all_reduce_s(slow, 32 * GB, 32) == pytest.approx(62 / 75.4333 + latency, rel=1e-5)


def test_one_gpu_a_node_has_only_the_wire():
    lone = replace(NODES, gpus_per_node=1, intra_bytes_per_s=1e9)
    assert bus_bytes_per_s(lone, 4) == pytest.approx(36.5e9)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_to_do(collective):
    assert collective(NODE, 10**9, 1) == 0
    assert collective(NODE, 0, 8) == 0


@pytest.mark.parametrize(
    ("gpu", "gpus", "nbytes", "measured_bytes_per_s", "tolerance"),
    [
        # busbw of all-reduce by nccl-tests' convention, stas00/ml-engineering network/benchmarks
        ("h200", 8, 2**34, 367.2e9, 0.05),
        ("h200", 32, 2**32, 364.9e9, 0.05),
        ("b200", 32, 2**30, 361.99e9, 0.05),
        ("b200", 32, 2**26, 156.74e9, 0.30),
        ("b200", 8, 2**24, 254.96e9, 0.10),
        # VIA-Research/vTrain trace/a100
        ("a100", 8, 2**30, 229.35e9, 0.05),
        ("a100", 8, 2**23, 109.30e9, 0.05),
        ("a100", 8, 2**20, 19.78e9, 0.20),
    ],
)
def test_close_to_measured_all_reduce(gpu, gpus, nbytes, measured_bytes_per_s, tolerance):
    cluster, _ = resolve_cluster(gpus=gpus, gpu=gpu)
    measured_s = 2 * (gpus - 1) / gpus * nbytes / measured_bytes_per_s
    assert all_reduce_s(cluster, nbytes, gpus) == pytest.approx(measured_s, rel=tolerance)


def test_small_messages_reach_far_less():
    def bus(nbytes):
        return 7 / 8 * nbytes / all_gather_s(NODE, nbytes, 8)

    assert bus(2**20) < 0.06 * bus(2**34)
    assert bus(2**28) > 0.9 * bus(2**34)


@given(SIZES, SIZES, RANKS)
def test_more_bytes_never_take_less_time(nbytes, more, n):
    for collective in COLLECTIVES:
        assert collective(NODES, nbytes + more, n) >= collective(NODES, nbytes, n)


@given(SIZES, RANKS, st.floats(1e9, 1e12), st.floats(1, 100))
def test_more_bandwidth_never_takes_more_time(nbytes, n, rate, factor):
    slow = replace(NODES, intra_bytes_per_s=rate, inter_bytes_per_s=rate / 4)
    for faster in (
        replace(slow, intra_bytes_per_s=rate * factor),
        replace(slow, inter_bytes_per_s=rate * factor / 4),
    ):
        for collective in COLLECTIVES:
            assert collective(faster, nbytes, n) <= collective(slow, nbytes, n) * (1 + 1e-12)


@given(SIZES, RANKS, st.sampled_from([1, 2, 4, 8]))
def test_all_reduce_is_reduce_scatter_and_all_gather_started_once(nbytes, n, per_node):
    cluster = replace(NODES, gpus_per_node=per_node)
    both = reduce_scatter_s(cluster, nbytes, n) + all_gather_s(cluster, nbytes, n)
    assert all_reduce_s(cluster, nbytes, n) == pytest.approx(both - START_S)
