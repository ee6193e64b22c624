"""Writes one safetensors file, tensor by tensor, in bounded memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch

from ml4core.models.errors import CheckpointError, shown
from ml4core.models.safetensors_file import (
    DTYPES,
    LENGTH_BYTES,
    MAX_DIMS,
    METADATA_KEY,
    TensorInfo,
)
from ml4core.models.safetensors_header import MAX_ENTRY_BYTES, MAX_METADATA_BYTES

COPY_BYTES = 16 << 20
ALIGNMENT = 8  # bytes, of the data's start: the widest element


def _names_by_dtype() -> dict[torch.dtype, str]:
    names = {dtype: name for name, dtype in DTYPES.items() if name != "F8_E8M0"}
    if hasattr(torch, "float8_e8m0fnu"):  # newer than the oldest torch that is supported
        names[torch.float8_e8m0fnu] = "F8_E8M0"
    return names


_NAMES = MappingProxyType(_names_by_dtype())


class ShardWriter:
    """One file in the making.

    The header stands before the data and is known last, so tensors are spooled to a second file
    and copied behind the header by `finish`: widest dtype first, so that each tensor lies on a
    multiple of its element size. The data is thus written twice.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write to `path` and, until `finish`, to `path` + "-spool". Raises OSError."""
        self.path = path
        self.nbytes = 0  # of all tensors
        self.header_bytes = len(json.dumps({METADATA_KEY: dict(metadata)})) + ALIGNMENT  # at most
        self.names: list[str] = []
        self._metadata = metadata
        self._spooled: list[TensorInfo] = []
        self._spool_path = path.with_name(path.name + "-spool")
        self._spool = open(self._spool_path, "wb")  # noqa: SIM115 - closed by finish or drop

    def add(self, name: str, tensor: torch.Tensor, dtype: str) -> None:
        """Spool a tensor that `check_tensor` has passed. Raises OSError."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            self._spool.write(raw_bytes(tensor))
        self._spooled.append(
            TensorInfo(name, dtype, tuple(tensor.shape), self._spool_path, self.nbytes, nbytes)
        )
        self.names.append(name)
        self.nbytes += nbytes
        self.header_bytes += entry_bytes(name, dtype, tensor.shape)

    def finish(self) -> None:
        """Write the file and make it last; drop the spool. Raises OSError, CheckpointError."""
        self._spool.close()
        tensors = aligned(self._spooled)
        with open(self._spool_path, "rb") as spool, open(self.path, "wb") as target:
            target.write(header_bytes(tensors, self._metadata))
            for info in tensors:
                spool.seek(info.start)
                left = info.nbytes
                while left:
                    chunk = spool.read(min(left, COPY_BYTES))
                    if not chunk:
                        raise CheckpointError(
                            f"{self._spool_path}: became shorter while it was copied"
                        )
                    target.write(chunk)
                    left -= len(chunk)
            target.flush()
            os.fsync(target.fileno())
        self._spool_path.unlink()

    def drop(self) -> None:
        """Remove whatever is written."""
        with suppress(OSError):
            self._spool.close()
        for path in (self._spool_path, self.path):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor that isn't empty, in the format's order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises CheckpointError for metadata that a reader would refuse."""
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise CheckpointError(f"metadata {shown(key)}: {shown(value)}: both must be text")
    if len(json.dumps({METADATA_KEY: dict(metadata)})) > MAX_METADATA_BYTES:
        raise CheckpointError(f"metadata takes more than {MAX_METADATA_BYTES} bytes")


def check_tensor(name: str, tensor: torch.Tensor, dtype: str | None) -> str:
    """The format's dtype name for a tensor; raises CheckpointError if it can't be written.

    `dtype` asks for a name that the torch dtype does not tell: "F8_E8M0" for uint8.
    """
    if not name or name == METADATA_KEY:
        raise CheckpointError(f"tensor name {shown(name)} can't be used")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"tensor name {shown(name)} has no UTF-8 form") from error
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise CheckpointError(
            f"tensor {shown(name)}: {tensor.layout}, {tensor.dtype} on {tensor.device} can't be "
            "written; a dense tensor with data can"
        )
    own = _NAMES.get(tensor.dtype)
    if own is None:
        raise CheckpointError(
            f"tensor {shown(name)}: {tensor.dtype} can't be written; known are "
            f"{', '.join(str(known) for known in _NAMES)}"
        )
    if dtype is not None and dtype != own and DTYPES.get(dtype) != tensor.dtype:
        raise CheckpointError(
            f"tensor {shown(name)}: {tensor.dtype} can't be stored as {shown(dtype)}"
        )
    if tensor.dim() > MAX_DIMS:
        raise CheckpointError(
            f"tensor {shown(name)}: {tensor.dim()} dimensions; at most {MAX_DIMS} are read"
        )
    if entry_bytes(name, own, tensor.shape) > MAX_ENTRY_BYTES:
        raise CheckpointError(f"tensor name {shown(name)} is too long for a header")
    return dtype or own


def aligned(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """In an order that puts each tensor on a multiple of its element size: the widest first."""
    return sorted(tensors, key=lambda info: -info.torch_dtype.itemsize)


def entry_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The most bytes that a tensor takes of a header."""
    return len(json.dumps({name: _entry(dtype, tuple(shape), 2**63, 2**63)}))


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def header_bytes(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """A file's bytes before the data, which holds the tensors in this order."""
    header: dict[str, object] = {METADATA_KEY: dict(metadata)}
    begin = 0
    for info in tensors:
        end = begin + info.nbytes
        header[info.name] = _entry(info.dtype, info.shape, begin, end)
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
