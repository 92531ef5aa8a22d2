"""The cluster that a plan is for: from flags, then a cluster.toml, then the catalogue, each default said in words."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from partitioner.errors import UsageError
from partitioner.hardware.catalogue import Gpu, find_gpu, find_link, nearest
from partitioner.units import GIB, TIB, format_bytes, format_rate, parse_bytes, parse_bytes_per_s

DEFAULT_GPU = "h100-sxm-80gb"
DEFAULT_NODE_SIZE = 8
DEFAULT_HOST_BYTES = TIB
DEFAULT_NETWORK = "infiniband-ndr"  # one 400 Gbit/s port per GPU, as DGX and HGX H100 nodes have
CONTEXT_BYTES = 2 * GIB
"""CUDA context and NCCL buffers of one process: assumed, to be calibrated."""
FRAGMENTATION = 0.04
"""Share of the card that the caching allocator cannot use: assumed, to be calibrated."""

_COUNTS = ("gpus", "gpus-per-node")
_TEXTS = ("gpu", "memory", "host-memory", "intra-bandwidth", "inter-bandwidth")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal GPUs in equal nodes."""

    num_gpus: int
    gpu: Gpu
    gpus_per_node: int
    memory_bytes: int  # that a plan may use, per GPU
    host_memory_bytes: int  # per node
    intra_bytes_per_s: float  # one direction, per GPU, raw
    inter_bytes_per_s: float  # one direction, per GPU (a node's network ports over its GPUs), raw
    intra_latency_s: float  # of one ring step inside a node
    inter_latency_s: float  # of one ring step between nodes

    def to_dict(self) -> dict[str, Any]:
        """JSON form; the GPU by its catalogue name."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"gpu": self.gpu.name}


@dataclass(frozen=True)
class _Given:
    """What the user said, and where, for messages."""

    values: dict[str, int | str]
    names: dict[str, str]

    def count(self, flag: str) -> int | None:
        value = self.values.get(flag)
        if value is None:
            return None
        if int(value) < 1:
            raise UsageError(f"{self.names[flag]} {value}: must be one or more")
        return int(value)

    def text(self, flag: str) -> str | None:
        value = self.values.get(flag)
        return None if value is None else str(value)

    def nbytes(self, flag: str) -> int | None:
        text = self.text(flag)
        return None if text is None else parse_bytes(text, name=self.names[flag])


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--cluster {path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--cluster {path}: is not TOML: {error}") from error


def _from_file(path: Path) -> dict[str, int | str]:
    """The flags that a cluster.toml sets, checked for name and type."""
    known = (*_COUNTS, *_TEXTS)
    found: dict[str, int | str] = {}
    for key, value in _read_file(path).items():
        if key not in known:
            raise UsageError(f"{path}: there is no setting {key!r}", hint=nearest(key, known))
        kind, example = (int, f"{key} = 8") if key in _COUNTS else (str, f'{key} = "..."')
        if type(value) is not kind:
            raise UsageError(
                f"{path}: {key} is {value!r}, expected {'a whole number' if kind is int else 'text'}",
                hint=f"write {example}",
            )
        found[key] = value
    return found


def _merge(flags: dict[str, int | str | None], path: Path | None) -> _Given:
    """Flags over file."""
    values = _from_file(path) if path is not None else {}
    names = {flag: f"{path}: {flag}" for flag in values}
    for flag, value in flags.items():
        if value is not None:
            values[flag] = value
            names[flag] = f"--{flag}"
    return _Given(values, names)


def _nodes(given: _Given, defaults: dict[str, str]) -> tuple[int, int]:
    """(GPUs, GPUs per node); the GPUs fill whole nodes, or are fewer than one."""
    num_gpus = given.count("gpus")
    if num_gpus is None:
        raise UsageError(
            "--gpus was not given: for how many GPUs is the plan?",
            hint="write --gpus 8, or gpus = 8 in the file given to --cluster",
        )
    per_node = given.count("gpus-per-node")
    if per_node is None:
        per_node = min(DEFAULT_NODE_SIZE, num_gpus)
        defaults["gpus-per-node"] = f"{per_node} (not given)"
    if num_gpus > per_node and num_gpus % per_node:
        below = num_gpus - num_gpus % per_node
        divisor = next(d for d in range(per_node, 0, -1) if num_gpus % d == 0)
        raise UsageError(
            f"{given.names['gpus']} {num_gpus}: does not fill nodes of {per_node} GPUs",
            hint=f"use {below} or {below + per_node} GPUs, or --gpus-per-node {divisor}",
        )
    return num_gpus, per_node


def _memory(given: _Given, gpu: Gpu, defaults: dict[str, str]) -> int:
    """What is given is the budget; else the card less a reserve."""
    nbytes = given.nbytes("memory")
    if nbytes is not None:
        return nbytes
    nbytes = int(gpu.memory_bytes * (1 - FRAGMENTATION)) - CONTEXT_BYTES
    defaults["memory"] = (
        f"{format_bytes(nbytes)} of the card's {format_bytes(gpu.memory_bytes)} (not given; kept back: "
        f"{format_bytes(CONTEXT_BYTES)} for the CUDA context and NCCL buffers, {FRAGMENTATION:.0%} for fragmentation)"
    )
    return nbytes


def _rate(given: _Given, flag: str, latency_s: float) -> tuple[float, float] | None:
    """(bytes/s, latency) of a flag that holds a bandwidth, which keeps ``latency_s``, or the name of a link."""
    text = given.text(flag)
    if text is None:
        return None
    if text.strip()[:1].isalpha():
        link = find_link(text)
        return link.bytes_per_s, link.latency_s
    return parse_bytes_per_s(text, name=given.names[flag]), latency_s


def _rates(
    given: _Given, card: Gpu, nodes: tuple[int, int], defaults: dict[str, str]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(bytes/s, latency) inside a node and between nodes."""
    num_gpus, per_node = nodes
    network = find_link(DEFAULT_NETWORK)
    intra = _rate(given, "intra-bandwidth", card.link.latency_s)
    if intra is None:
        intra = card.link.bytes_per_s, card.link.latency_s
        if num_gpus > 1 and per_node > 1:
            defaults["intra-bandwidth"] = f"{format_rate(intra[0])} per GPU, {card.link.name} (not given)"
    inter = _rate(given, "inter-bandwidth", network.latency_s)
    if inter is None:
        inter = network.bytes_per_s, network.latency_s
        if num_gpus > per_node:
            defaults["inter-bandwidth"] = f"{format_rate(inter[0])} per GPU, {network.name} (not given)"
    return intra, inter


def resolve_cluster(
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    memory: str | None = None,
    host_memory: str | None = None,
    intra_bandwidth: str | None = None,
    inter_bandwidth: str | None = None,
    file: Path | None = None,
) -> tuple[Cluster, dict[str, str]]:
    """The cluster that flags and a cluster.toml describe; flags win over the file, the file over defaults.

    Args:
        gpus: GPUs in all.
        gpu: catalogue name.
        gpus_per_node: GPUs that share the in-node link and the host memory.
        memory: what a plan may use of one GPU, such as ``"70GiB"``.
        host_memory: of one node.
        intra_bandwidth: one direction per GPU inside a node, ``"450GB/s"``, or a link's name.
        inter_bandwidth: one direction per GPU between nodes, ``"400Gbit/s"``, or a link's name.
        file: TOML with the flags' names as keys.

    Returns:
        The cluster, and the defaults that were used in words, by flag name. Links that the cluster does not use (between
        nodes of a single one, between GPUs of a single one) are not mentioned.

    Raises:
        UsageError: something is missing, unknown, or cannot be; the message says what would be right.
    """
    flags: dict[str, int | str | None] = {
        "gpus": gpus, "gpu": gpu, "gpus-per-node": gpus_per_node, "memory": memory, "host-memory": host_memory,
        "intra-bandwidth": intra_bandwidth, "inter-bandwidth": inter_bandwidth,
    }  # fmt: skip
    given = _merge(flags, file)
    defaults: dict[str, str] = {}
    num_gpus, per_node = _nodes(given, defaults)
    name = given.text("gpu")
    if name is None:
        defaults["gpu"] = f"{DEFAULT_GPU} (not given)"
    card = find_gpu(DEFAULT_GPU if name is None else name)
    memory_bytes = _memory(given, card, defaults)
    host_bytes = given.nbytes("host-memory")
    if host_bytes is None:
        host_bytes = DEFAULT_HOST_BYTES
        defaults["host-memory"] = f"{format_bytes(host_bytes)} per node (not given)"
    intra, inter = _rates(given, card, (num_gpus, per_node), defaults)
    cluster = Cluster(
        num_gpus=num_gpus,
        gpu=card,
        gpus_per_node=per_node,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_bytes,
        intra_bytes_per_s=intra[0],
        inter_bytes_per_s=inter[0],
        intra_latency_s=intra[1],
        inter_latency_s=inter[1],
    )
    return cluster, defaults
