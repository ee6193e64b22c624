"""Safetensors files: a header reader that trusts nothing, and reads of one tensor or some rows.

Layout: 8 bytes, the header's length (unsigned, little endian); the header, JSON; the data. The
header maps each tensor's name to its dtype, shape and [begin, end) bytes of the data.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ml4core.models.errors import CheckpointError, listed, os_reason, shown
from ml4core.models.safetensors_header import HeaderText
from ml4core.models.strict_json import open_regular

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 32
LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F8_E8M0": torch.uint8,  # exponent bytes, as the number formats take them
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)
"""The format's dtype names and the torch dtype that each is read as."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies."""

    name: str
    dtype: str  # the format's name, a key of DTYPES
    shape: tuple[int, ...]
    file: Path
    start: int  # byte of the file
    nbytes: int
    file_size: int | None = None  # bytes, when the header was read; None: not compared

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class Header(dict[str, TensorInfo]):
    """The tensors of one file by name, in the order of their bytes, and the file's metadata."""

    def __init__(self, tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> None:
        super().__init__((tensor.name, tensor) for tensor in tensors)
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata))


def read_header(path: Path | str) -> Header:
    """Read and check a file's header; touches no data.

    The tensors must cover the data exactly: no overlap, no hole, nothing before or behind.
    Memory does not follow the length that the file claims. Raises CheckpointError.
    """
    path = Path(path)
    with open_regular(path) as file:
        try:
            file_size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(LENGTH_BYTES), file_size)
            tensors, metadata = _parse(path, HeaderText(path, file, length), file_size, length)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {os_reason(error)}") from error
    return Header(_covering(path, tensors, LENGTH_BYTES + length, file_size), metadata)


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Read one tensor: shape and dtype of `info`, on the CPU, in memory of its own.

    Reads no other byte of the file. Raises CheckpointError if the file is gone or has changed
    its size since `info` was made.
    """
    return _read(info, info.start, info.nbytes, info.shape)


def read_rows(info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Read rows [start, stop) of dimension 0 and no other byte: shape (stop - start, ...).

    Raises CheckpointError as `read_tensor`, and for rows that the tensor does not have.
    """
    if not info.shape:
        raise CheckpointError(f"{info.file}: tensor {shown(info.name)} is a scalar without rows")
    rows = info.shape[0]
    if not 0 <= start <= stop <= rows:
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} has rows 0 to {rows}, not [{start}, {stop})"
        )
    row_bytes = info.nbytes // rows if rows else 0
    shape = (stop - start, *info.shape[1:])
    return _read(info, info.start + start * row_bytes, (stop - start) * row_bytes, shape)


def read_box(info: TensorInfo, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    """Rows [a, b) and columns [c, d) of a matrix: shape (b - a, d - c).

    Nothing else is read, but what the system reads ahead. Raises CheckpointError as `read_rows`.
    """
    if len(info.shape) != 2:
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} {list(info.shape)} is no matrix"
        )
    height, width = info.shape
    (top, bottom), (left, right) = rows, columns
    if (left, right) == (0, width):
        return read_rows(info, top, bottom)
    if not (0 <= top <= bottom <= height and 0 <= left <= right <= width):
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} has {height} rows and {width} columns, not "
            f"[{top}, {bottom}) and [{left}, {right})"
        )
    size = info.torch_dtype.itemsize
    raw = torch.empty((bottom - top, (right - left) * size), dtype=torch.uint8, device="cpu")
    with open_regular(info.file) as file:
        _check_size(info, file, info.start + info.nbytes)
        if raw.numel():
            for row, into in zip(range(top, bottom), raw.numpy(), strict=True):
                _fill(info, file, info.start + (row * width + left) * size, into.data)
    return _typed(info, raw)


def _read(info: TensorInfo, start: int, nbytes: int, shape: tuple[int, ...]) -> torch.Tensor:
    with open_regular(info.file) as file:
        _check_size(info, file, start + nbytes)
        # The device is named: a caller's default device may be "meta" or an accelerator.
        raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes:
            _fill(info, file, start, raw.numpy().data)
    return _typed(info, raw).reshape(shape)


def _typed(info: TensorInfo, raw: torch.Tensor) -> torch.Tensor:
    if info.dtype == "BOOL" and raw.numel() and int(raw.max()) > 1:
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} of dtype BOOL holds byte {int(raw.max())}; "
            "only 0 and 1 are allowed"
        )
    return raw.view(info.torch_dtype)


def _check_size(info: TensorInfo, file: BufferedReader, end: int) -> None:
    size = os.fstat(file.fileno()).st_size
    if info.file_size is not None and size != info.file_size:
        raise _changed(info, f"is {size} bytes long, was {info.file_size}")
    if size < end:
        raise _changed(info, f"ends at byte {size}")


def _fill(info: TensorInfo, file: BufferedReader, start: int, into: memoryview) -> None:
    try:
        file.seek(start)
        done = 0
        while done < len(into):
            count = file.readinto(into[done:])
            if not count:
                raise _changed(info, f"ends at byte {start + done}")
            done += count
    except OSError as error:
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} can't be read: {os_reason(error)}"
        ) from error


def _changed(info: TensorInfo, how: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: changed since its header was read: it {how}; tensor {shown(info.name)} "
        f"lies at bytes {info.start} to {info.start + info.nbytes}. Load again once the file "
        "is complete"
    )


def _header_length(path: Path, prefix: bytes, file_size: int) -> int:
    if not prefix:
        raise CheckpointError(f"{path}: empty file; a safetensors file has at least 10 bytes")
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: {len(prefix)} bytes long; a safetensors file begins with 8 bytes of length"
        )
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header length {length} is above the format's limit of {MAX_HEADER_BYTES} "
            "bytes; is this a safetensors file?"
        )
    if length > file_size - LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: header length {length}, but only {file_size - LENGTH_BYTES} bytes follow; "
            "the file is cut off or not a safetensors file"
        )
    if length < len("{}"):
        raise CheckpointError(f"{path}: header length {length}; the smallest header has 2 bytes")
    return length


def _parse(
    path: Path, text: HeaderText, file_size: int, length: int
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    for name, value in text.entries():
        if name in tensors or (name == METADATA_KEY and metadata is not None):
            raise CheckpointError(f"{path}: header has the key {shown(name)} twice")
        if name == METADATA_KEY:
            metadata = _metadata(path, value)
        else:
            tensors[name] = _tensor(path, name, value, LENGTH_BYTES + length, file_size)
    return tensors, metadata or {}


def _metadata(path: Path, value: dict[str, Any]) -> dict[str, str]:
    for key, entry in value.items():
        if not isinstance(entry, str):
            raise CheckpointError(
                f"{path}: {METADATA_KEY} key {shown(key)} holds {shown(entry)}; only text is valid"
            )
    return value


def _tensor(
    path: Path, name: str, value: dict[str, Any], data_start: int, file_size: int
) -> TensorInfo:
    def wrong(text: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown(name)}: {text}")

    if value.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong(f"has the keys {listed(sorted(value))}; needs dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(f"dtype {shown(dtype)} is unknown; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list):
        raise wrong(f"shape {shown(shape)} is not a list")
    if len(shape) > MAX_DIMS:
        raise wrong(f"shape has {len(shape)} dimensions; at most {MAX_DIMS} are read")
    if not all(_is_count(size) for size in shape):
        raise wrong(f"shape {shown(shape)} must hold whole numbers from 0")
    itemsize = DTYPES[dtype].itemsize
    # Zeros are passed over: torch's strides overflow on [0, 2^62, 2^62] too.
    if math.prod(size for size in shape if size) * itemsize >= 2**63:
        raise wrong(f"shape {shown(shape)} has more than 2^63 bytes")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))):
        raise wrong(f"data_offsets {shown(offsets)} must be two whole numbers from 0")
    begin, end = offsets
    if begin > end:
        raise wrong(f"data_offsets [{begin}, {end}] are reversed")
    if end > file_size - data_start:
        raise wrong(
            f"data_offsets end at {end}, past the end of the {file_size - data_start} bytes of "
            "data; the file is cut off or its header wrong"
        )
    nbytes = math.prod(shape) * itemsize
    if end - begin != nbytes:
        raise wrong(
            f"data_offsets [{begin}, {end}] span {end - begin} bytes; dtype {dtype} and shape "
            f"{shown(shape)} need {nbytes}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, nbytes, file_size)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63  # not isinstance: True is an int


def _covering(
    path: Path, tensors: Mapping[str, TensorInfo], data_start: int, file_size: int
) -> Iterator[TensorInfo]:
    """The tensors in the order of their bytes, once it is sure that they fill the data."""
    expected = data_start
    before = None
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.nbytes)):
        if info.start < expected:
            raise CheckpointError(
                f"{path}: tensors {shown(before)} and {shown(info.name)} overlap at byte "
                f"{info.start - data_start} of the data"
            )
        if info.start > expected:
            raise CheckpointError(
                f"{path}: hole of {info.start - expected} bytes that belong to no tensor before "
                f"{shown(info.name)}, at byte {expected - data_start} of the data"
            )
        expected, before = info.start + info.nbytes, info.name
        yield info
    if expected != file_size:
        raise CheckpointError(
            f"{path}: {file_size - expected} trailing bytes behind the last tensor's end; the "
            "header must account for every byte"
        )
