"""Tensors stored in an ONNX file: their shape and dtype at once, their payload only when somebody asks for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import torch
from onnx import TensorProto, numpy_helper

from partitioner.errors import CaptureError, UnsupportedError

MAX_NUMEL = 2**48
"""More elements than any model has; a shape beyond this is a corrupt or hostile file."""

TORCH_DTYPES: Mapping[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.BOOL: torch.bool,
    TensorProto.COMPLEX64: torch.complex64,
    TensorProto.COMPLEX128: torch.complex128,
}
PACKED = frozenset({TensorProto.INT4, TensorProto.UINT4})
"""Two values a byte; torch has no such dtype, so the bytes themselves are the tensor."""


def torch_dtype(data_type: int, where: str) -> torch.dtype:
    """The torch dtype of an ONNX one. Raises UnsupportedError naming it and where it was met."""
    if data_type in PACKED:
        return torch.uint8
    if data_type not in TORCH_DTYPES:
        names = {v: k for k, v in TensorProto.DataType.items()}
        raise UnsupportedError(
            f"{where} has dtype {names.get(data_type, data_type)}, which has no meaning in training",
            hint="export the model with floating weights",
        )
    return TORCH_DTYPES[data_type]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor that the file holds, or promises: an initializer, a Constant node, or a constant fill of a stored shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool = False
    """Four-bit values: ``shape`` counts them, the payload is ``ceil(numel / 2)`` bytes of uint8."""
    data_type: int = 0
    proto: TensorProto | None = None
    fill: float | int | bool | None = None
    folder: Path = Path()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return (self.numel + 1) // 2 if self.packed else self.numel * self.dtype.itemsize

    @property
    def external(self) -> dict[str, str]:
        """``location``, ``offset`` and ``length`` of a payload beside the file; empty if it is inside."""
        if self.proto is None or self.proto.data_location != TensorProto.EXTERNAL:
            return {}
        return {entry.key: entry.value for entry in self.proto.external_data}

    def available(self) -> bool:
        """Whether the payload can be read now."""
        external = self.external
        if not external:
            return self.fill is not None or (self.proto is not None and (self.numel == 0 or self._has_payload()))
        file = self.folder / external["location"]
        return file.is_file() and file.stat().st_size >= _offset(external, self.name) + self.nbytes

    def _has_payload(self) -> bool:
        assert self.proto is not None
        fields = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
        return any(len(getattr(self.proto, field)) for field in fields)

    def load(self) -> torch.Tensor:
        """The payload as a cpu tensor; packed ones as flat uint8.

        Raises:
            CaptureError: it is absent, or has another size than the shape says.
        """
        if self.fill is not None:
            return torch.full(self.shape, self.fill, dtype=self.dtype)
        assert self.proto is not None
        external = self.external
        raw = self._read(external) if external else self.proto.raw_data
        if not raw and self.numel and not self._has_payload():
            raise CaptureError(
                f"the data of {self.name!r} {list(self.shape)} is not in the file",
                hint="this tensor decides shapes or values of the graph; export it into the file",
            )
        if not raw:
            return self._from_fields()
        if len(raw) != self.nbytes:
            raise CaptureError(
                f"tensor {self.name!r} {list(self.shape)} has {len(raw)} bytes of data; its shape needs {self.nbytes}",
                hint="the file is damaged; export it again",
            )
        flat = torch.frombuffer(bytearray(raw), dtype=self.dtype)
        return flat if self.packed else flat.reshape(self.shape)

    def _read(self, external: dict[str, str]) -> bytes:
        file = self.folder / external["location"]
        if not self.available():
            state = "is too short" if file.is_file() else "is missing"
            raise CaptureError(
                f"tensor {self.name!r} {list(self.shape)} lies in {file}, which {state}",
                hint="put the weight file beside the .onnx file",
            )
        with file.open("rb") as stream:
            stream.seek(_offset(external, self.name))
            return stream.read(self.nbytes)

    def _from_fields(self) -> torch.Tensor:
        """Payloads in the typed fields of old files; onnx decodes those."""
        assert self.proto is not None
        try:
            array = numpy_helper.to_array(self.proto)
        except (ValueError, TypeError) as error:
            raise CaptureError(
                f"the data of tensor {self.name!r} {list(self.shape)} cannot be read: {error}",
                hint="the file is damaged; export it again",
            ) from error
        if self.packed:
            flat = np.asarray(array).astype(np.int8).reshape(-1)
            flat = np.pad(flat, (0, flat.size % 2)).astype(np.uint8) & 0xF
            return torch.from_numpy(flat[0::2] | (flat[1::2] << 4))
        if self.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            return torch.from_numpy(np.ascontiguousarray(array).astype(np.float32)).to(self.dtype).reshape(self.shape)
        return torch.from_numpy(np.ascontiguousarray(array).copy()).reshape(self.shape)


def _offset(external: dict[str, str], name: str) -> int:
    text = external.get("offset", "0")
    if not text.isdigit():
        raise CaptureError(f"tensor {name!r} has offset {text!r} in its weight file; expected a number of bytes")
    return int(text)


def _check_location(proto: TensorProto, name: str) -> None:
    """Refuse a payload outside the model's folder before anything is opened."""
    for entry in proto.external_data:
        if entry.key != "location":
            continue
        paths = (PurePosixPath(entry.value), PureWindowsPath(entry.value))
        if any(p.is_absolute() or p.drive or ".." in p.parts for p in paths) or "\0" in entry.value:
            raise CaptureError(
                f"tensor {name!r} wants its data from {entry.value!r}, which is outside the model's folder; not allowed",
                hint="keep weight files beside the .onnx file and refer to them by relative paths",
            )


def stored_tensor(proto: TensorProto, folder: Path, name: str = "") -> Stored:
    """Describe a tensor of the file without reading its payload.

    Raises:
        CaptureError: negative or absurd shape, or a payload outside the model's folder.
        UnsupportedError: a dtype that torch does not have.
    """
    name = name or proto.name
    shape = tuple(proto.dims)
    if any(d < 0 for d in shape) or math.prod(shape) > MAX_NUMEL:
        raise CaptureError(
            f"tensor {name!r} has shape {list(shape)}, which no model has", hint="the file is damaged; export it again"
        )
    _check_location(proto, name)
    stored = Stored(
        name=name,
        shape=shape,
        dtype=torch_dtype(proto.data_type, f"tensor {name!r}"),
        packed=proto.data_type in PACKED,
        data_type=proto.data_type,
        proto=proto,
        folder=folder,
    )
    if proto.data_location == TensorProto.EXTERNAL:
        external = stored.external
        if "location" not in external:
            raise CaptureError(f"tensor {name!r} is said to be in another file, but the file is not named")
        resolved = (folder / external["location"]).resolve()
        if not resolved.is_relative_to(folder.resolve()):
            raise CaptureError(
                f"tensor {name!r}: {external['location']!r} leads outside the model's folder; not allowed",
                hint="replace the link by the file itself",
            )
        length = external.get("length", "")
        if length and length != str(stored.nbytes):
            raise CaptureError(
                f"tensor {name!r} {list(shape)} has {length} bytes in {external['location']}; its shape needs {stored.nbytes}",
                hint="the file is damaged; export it again",
            )
    return stored
