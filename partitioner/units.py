"""Text to numbers and back: bytes, rates, times. Nothing else in the package converts units.

``GB`` is 10**9 bytes and ``GiB`` is 2**30 bytes, always.
"""

from __future__ import annotations

import re

from partitioner.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_BYTES = {
    "b": 1, "": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str, *, name: str = "size") -> int:
    """``"80GiB"`` -> 85899345920. Raises UsageError naming ``name`` on anything else."""
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _BYTES:
        raise UsageError(
            f"{name}: {text!r} is not a size", hint="write a number and a unit, such as 80GiB (2**30) or 80GB (10**9)"
        )
    value = round(float(match.group(1)) * _BYTES[unit])
    if value <= 0:
        raise UsageError(f"{name}: {text!r} must be more than zero bytes")
    return value


def parse_bytes_per_s(text: str, *, name: str = "bandwidth") -> float:
    """``"450GB/s"`` -> 4.5e11; ``"400Gbit/s"`` (and ``Gbps``) -> 5e10."""
    stripped = text.strip()
    bits = re.fullmatch(r"([0-9.]+)\s*([kKmMgGtT])(?:bit/s|bps)", stripped)
    if bits:
        try:
            value = float(bits.group(1)) * 10.0 ** {"k": 3, "m": 6, "g": 9, "t": 12}[bits.group(2).lower()] / 8
        except ValueError:
            value = 0.0
    elif stripped.endswith("/s"):
        value = float(parse_bytes(stripped[:-2], name=name))
    else:
        value = 0.0
    if value <= 0:
        raise UsageError(
            f"{name}: {text!r} is not a bandwidth", hint="write bytes or bits a second, such as 50GB/s or 400Gbit/s"
        )
    return value


def format_bytes(value: float) -> str:
    """``85899345920`` -> ``"80.00 GiB"``."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """``0.0123`` -> ``"12.30 ms"``."""
    if abs(value) >= 1:
        return f"{value:.3f} s"
    if abs(value) >= 1e-3:
        return f"{value * 1e3:.2f} ms"
    return f"{value * 1e6:.1f} us"


def format_rate(bytes_per_s: float) -> str:
    """``5e10`` -> ``"50.0 GB/s"``."""
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.1f} {unit}"
    return f"{bytes_per_s:.0f} B/s"
