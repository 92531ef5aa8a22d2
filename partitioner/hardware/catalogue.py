"""Reads gpus.toml and links.toml: one record per GPU and per link, found by name."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from partitioner.errors import UsageError
from partitioner.units import GIB

_VENDOR_WORDS = frozenset({"nvidia", "amd", "instinct", "tesla", "geforce", "gpu"})


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of connection, per GPU."""

    name: str
    bytes_per_s: float  # one direction, raw
    latency_s: float  # of one ring step
    sources: Mapping[str, str] = field(hash=False, repr=False)  # field -> where its number comes from


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One model of GPU. Rates are peaks; what kernels reach of them is ``efficiency``, by operator class."""

    name: str
    memory_bytes: int  # what torch reports as the card's total
    memory_bytes_per_s: float
    flop_per_s: Mapping[str, float] = field(hash=False)  # by dtype, dense; "float32" is without tf32
    efficiency: Mapping[str, float] = field(hash=False)  # matmul, conv, attention: share of the peak of large kernels
    kernel_launch_s: float
    link: Link  # to the other GPUs of the node
    host_link: Link
    aliases: tuple[str, ...] = ()
    note: str = ""
    sources: Mapping[str, str] = field(hash=False, repr=False)  # field or operator class -> where its number comes from


def _table(file_name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath(file_name).read_text(encoding="utf-8"))


def _cited(entry: dict[str, Any], sources: dict[str, str]) -> dict[str, str]:
    return {key: sources[reference] for key, reference in entry["source"].items()}


@cache
def links() -> tuple[Link, ...]:
    """Every link, in the order of the data file."""
    data = _table("links.toml")
    return tuple(
        Link(
            name=name,
            bytes_per_s=float(entry["bytes_per_s"]),
            latency_s=float(entry["latency_s"]),
            sources=_cited(entry, data["sources"]),
        )
        for name, entry in data["links"].items()
    )


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every GPU, in the order of the data file."""
    data = _table("gpus.toml")
    by_name = {link.name: link for link in links()}
    return tuple(
        Gpu(
            name=name,
            memory_bytes=round(entry["memory_gib"] * GIB),
            memory_bytes_per_s=float(entry["memory_bytes_per_s"]),
            flop_per_s={dtype: float(rate) for dtype, rate in entry["flop_per_s"].items()},
            efficiency={op_class: float(share) for op_class, share in entry["efficiency"].items()},
            kernel_launch_s=float(entry["kernel_launch_s"]),
            link=by_name[entry["link"]],
            host_link=by_name[entry["host_link"]],
            aliases=tuple(entry["aliases"]),
            note=entry.get("note", ""),
            sources=_cited(entry, data["sources"]),
        )
        for name, entry in data["gpus"].items()
    )


def nearest(word: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """A hint naming the closest known word, or all of them when none is close; other spellings are not listed then."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, [*choices, *sorted(also)], n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(choices)}"


def _words(name: str) -> list[str]:
    """``"NVIDIA A100-SXM4-80GB"`` -> ``["a100", "sxm", "80gb"]``."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return [re.sub(r"^sxm\d$", "sxm", word) for word in words if word not in _VENDOR_WORDS]


def find_gpu(name: str) -> Gpu:
    """The GPU of that name or alias; case, spaces and vendor words do not matter.

    A name that leaves something out ("h200 sxm") is completed if one GPU only has all of its words.

    Raises:
        UsageError: no GPU, or several, are called that.
    """
    asked = _words(name)
    for gpu in gpus():
        if any("".join(_words(known)) == "".join(asked) for known in (gpu.name, *gpu.aliases)):
            return gpu
    fitting = [gpu for gpu in gpus() if asked and set(asked) <= set(_words(gpu.name))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(
            f"GPU {name!r} could be {' or '.join(gpu.name for gpu in fitting)}", hint="write one of these names"
        )
    names, aliases = [gpu.name for gpu in gpus()], [alias for gpu in gpus() for alias in gpu.aliases]
    raise UsageError(
        f"no GPU is called {name!r}",
        hint=f"{nearest('-'.join(asked), names, aliases)}\n  "
        "for a card that is not listed, take the most similar one and set --memory and --intra-bandwidth",
    )


def find_link(name: str) -> Link:
    """The link of that name; case does not matter.

    Raises:
        UsageError: there is none.
    """
    for link in links():
        if link.name == name.strip().lower():
            return link
    raise UsageError(f"no link is called {name!r}", hint=nearest(name.strip().lower(), [link.name for link in links()]))
