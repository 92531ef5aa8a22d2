"""The hardware catalogue as a table, as one GPU's sheet with its sources, and as JSON."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from partitioner.hardware.catalogue import Gpu, Link, find_gpu, gpus, links
from partitioner.units import format_bytes, format_rate


def _gpu_dict(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "aliases": list(gpu.aliases),
        "memory_bytes": gpu.memory_bytes,
        "memory_bytes_per_s": gpu.memory_bytes_per_s,
        "flop_per_s": dict(gpu.flop_per_s),
        "link": gpu.link.name,
        "host_link": gpu.host_link.name,
        "note": gpu.note,
        "sources": dict(gpu.sources),
    }


def _link_dict(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "bytes_per_s": link.bytes_per_s,
        "latency_s": link.latency_s,
        "sources": dict(link.sources),
    }


def hardware_dict(name: str | None) -> dict[str, Any]:
    """One GPU, or everything. Raises UsageError for an unknown name."""
    if name is not None:
        return _gpu_dict(find_gpu(name))
    return {"gpus": [_gpu_dict(g) for g in gpus()], "links": [_link_dict(link) for link in links()]}


def _tflops(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:,.1f}"


def _grid(*columns: str, title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _sheet(gpu: Gpu) -> RenderableType:
    table = Table(title=gpu.name, box=None, show_header=False, title_justify="left", title_style="bold", pad_edge=False)
    for key, value in _gpu_dict(gpu).items():
        if key not in ("name", "sources") and value:
            shown = ", ".join(f"{k} {v:.4g}" for k, v in value.items()) if isinstance(value, dict) else value
            shown = (
                ", ".join(shown) if isinstance(shown, list) else f"{shown:.6g}" if isinstance(shown, float) else shown
            )
            table.add_row(key, escape(str(shown)))
    sources = [f"  {key}: {escape(text)}" for key, text in gpu.sources.items()]
    return Group(table, "sources", *sources)


def render_hardware(name: str | None) -> RenderableType:
    """What ``partition hardware`` shows. Raises UsageError for an unknown name."""
    if name is not None:
        return _sheet(find_gpu(name))
    cards = _grid("GPU", "memory", "HBM", "bf16 TFLOP/s", "node link", title="GPUs")
    for gpu in gpus():
        cards.add_row(
            gpu.name,
            format_bytes(gpu.memory_bytes),
            format_rate(gpu.memory_bytes_per_s),
            _tflops(gpu.flop_per_s.get("bfloat16")),
            gpu.link.name,
        )
    wires = _grid("link", "one way, per GPU", "latency of a step", title="Links")
    for link in links():
        wires.add_row(link.name, format_rate(link.bytes_per_s), f"{link.latency_s * 1e6:.1f} us")
    return Group(cards, wires, "partition hardware NAME shows the sources; rates are dense peaks, one direction.")
