"""``weights.safetensors`` for an emitted model, written one tensor at a time.

Format (safetensors): eight bytes little-endian header length, a JSON header padded with spaces to a multiple of eight, then
the tensors, without gaps. The header follows from the program's tables alone, so tensors may come in any order and only
one of them need be in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from partitioner.emit.graph_tree import constant_names
from partitioner.errors import EmitError
from partitioner.program import Program, TensorInfo, dtype_of

SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def _header(infos: list[TensorInfo], names: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """(everything before the tensors, where each begins in the file, size of the file in bytes)."""
    entries, offsets, end_bytes = {}, {}, 0
    for info in infos:
        if info.dtype not in SAFETENSORS_DTYPES:
            raise EmitError(f"{info.name} is {info.dtype}, which safetensors cannot hold")
        offsets[info.name] = end_bytes
        end_bytes += info.nbytes
        entries[names[info.name]] = {
            "dtype": SAFETENSORS_DTYPES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offsets[info.name], end_bytes],
        }
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {n: start + o for n, o in offsets.items()}, start + end_bytes


def _put(path: Path, offset_bytes: int, file_bytes: int, info: TensorInfo, tensor: torch.Tensor) -> None:
    """Copy one tensor into its place, through a shared mapping of the file."""
    if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
        raise EmitError(f"{info.name} has no values to write", hint="load the weights, or emit without a weights file")
    if tuple(tensor.shape) != info.shape:
        raise EmitError(f"{info.name} has shape {list(tensor.shape)}, the model's table says {list(info.shape)}")
    if not info.nbytes:
        return
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=file_bytes)
    place = torch.empty(0, dtype=dtype_of(info.dtype))
    strides = torch.empty(info.shape, device="meta").stride()
    place.set_(storage, offset_bytes // info.itemsize, info.shape, strides)  # type: ignore[arg-type]  # torch types from_file too widely
    place.copy_(tensor.detach())


def write_weights(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], program: Program) -> None:
    """Write the parameters and buffers of a program, whole or not at all.

    Args:
        path: the file to write; replaced only once everything is in place.
        tensors: (name, tensor) in any order, each storage under any of its names; cast to the table's dtype, a second
            name of a storage is skipped.
        program: its tables say what there is to write. Names in the file are those of the emitted model.

    Raises:
        EmitError: a tensor is missing, has the wrong shape or no values, or the file cannot be written.
    """
    infos = [*program.parameters, *program.buffers]
    infos.sort(key=lambda info: -info.itemsize)  # keeps every tensor aligned; stable, so table order within a size
    head, offsets, file_bytes = _header(infos, constant_names(program))
    by_alias = {alias: info for info in infos for alias in info.aliases}
    missing = dict.fromkeys(info.name for info in infos)
    scratch = path.with_name(path.name + ".part")
    try:
        with scratch.open("wb") as file:
            file.write(head)
            file.truncate(file_bytes)
        for name, tensor in tensors:
            info = by_alias.get(name)
            if info is None:
                raise EmitError(f"{name} is neither a parameter nor a buffer of the model")
            if info.name in missing:
                _put(scratch, offsets[info.name], file_bytes, info, tensor)
                del missing[info.name]
        if missing:
            raise EmitError(f"no values for {', '.join(list(missing)[:5])}", hint=f"{len(missing)} tensors are missing")
        os.replace(scratch, path)
    except OSError as error:
        raise EmitError(f"{path}: cannot be written: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
