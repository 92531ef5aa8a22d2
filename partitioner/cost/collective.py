"""Seconds of a collective over the first ``n`` GPUs of a cluster: latency of the ring's steps plus bytes over bus bandwidth.

``nbytes`` is always the whole buffer: what every rank has after an all-gather, before a reduce-scatter, or around an
all-reduce. Each rank sends ``(n - 1) / n`` of it in an all-gather and in a reduce-scatter, twice that in an all-reduce.
"""

from __future__ import annotations

from partitioner.config import Cluster

NODE_EFFICIENCY = 0.80
"""Bus bandwidth over raw link rate inside a node. Measured by nccl-tests' convention on 8 H200, 16 GiB: all-gather 0.803,
reduce-scatter 0.806, ring all-reduce 0.816 of 450 GB/s (stas00/ml-engineering, network/benchmarks); 8 A100: 0.78 of 300."""

WIRE_EFFICIENCY = 0.73
"""The same between nodes: all-reduce over 4 nodes of 8 B200 moves 36.5 of each port's 50 GB/s at 4 GiB (same source)."""

START_S = 25e-6
"""Fixed cost of one collective: launch, copy-in, synchronisation. Chosen on the small messages of the A100 all-reduce tables
of VIA-Research/vTrain (trace/a100): with it and the links' step latency, 8 GPUs at 1 MiB take 80 us, measured 93."""


def _nodes(cluster: Cluster, n: int) -> int:
    """Nodes that ``n`` ranks span, ranks being packed."""
    return -(-n // cluster.gpus_per_node)


def bus_bytes_per_s(cluster: Cluster, n: int) -> float:
    """Bytes a second that every one of ``n`` ranks sends in a large ring collective.

    Inside a node ``NODE_EFFICIENCY`` of the link. Across ``k`` nodes every node must take in ``(k - 1) / k`` of the buffer
    through the ports of its ``n / k`` GPUs, at ``r`` each (NCCL drives all of them at once), while a rank sends
    ``(n - 1) / n`` of it: that is ``r (n - 1) / (k - 1)``, and at most what the link inside carries.
    """
    inside = cluster.intra_bytes_per_s * NODE_EFFICIENCY
    nodes = _nodes(cluster, n)
    if nodes == 1:
        return inside
    across = cluster.inter_bytes_per_s * WIRE_EFFICIENCY * (n - 1) / (nodes - 1)
    return across if cluster.gpus_per_node == 1 else min(inside, across)


def _ring_s(cluster: Cluster, nbytes: int, n: int, rounds: int) -> float:
    """``rounds`` times around the ring, of which ``nodes - 1`` steps a round cross nodes."""
    if n == 1 or not nbytes:
        return 0.0
    crossing = _nodes(cluster, n) - 1
    latency_s = crossing * cluster.inter_latency_s + (n - 1 - crossing) * cluster.intra_latency_s
    transfer_s = nbytes * (n - 1) / n / bus_bytes_per_s(cluster, n)
    return START_S + rounds * (latency_s + transfer_s)


def all_gather_s(cluster: Cluster, nbytes: int, n: int) -> float:
    """Seconds to give ``n`` ranks the whole of ``nbytes``, of which each holds its part."""
    return _ring_s(cluster, nbytes, n, rounds=1)


def reduce_scatter_s(cluster: Cluster, nbytes: int, n: int) -> float:
    """Seconds to sum ``nbytes`` over ``n`` ranks, each keeping its part."""
    return _ring_s(cluster, nbytes, n, rounds=1)


def all_reduce_s(cluster: Cluster, nbytes: int, n: int) -> float:
    """Seconds to sum ``nbytes`` over ``n`` ranks, each keeping all: a reduce-scatter and an all-gather, started once.

    NCCL also has trees and in-switch sums, faster for all-reduce alone (8 H200, 16 GiB: 480 against 367 GB/s); they are not
    modelled, so all-reduce is an upper estimate where they run.
    """
    return _ring_s(cluster, nbytes, n, rounds=2)
