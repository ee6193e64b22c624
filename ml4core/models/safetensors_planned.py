"""Writes one safetensors file whose tensors are known beforehand, a part of a tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import BufferedWriter
from pathlib import Path
from types import MappingProxyType

import torch

from ml4core.models.safetensors_file import DTYPES, TensorInfo
from ml4core.models.safetensors_writer import aligned, header_bytes, raw_bytes


def planned(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """A tensor that is to be written; its place is not known yet."""
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    return TensorInfo(name, dtype, shape, Path(), 0, nbytes)


class PlannedShard:
    """The layout of one file: what `ShardWriter` would write, without its spool.

    Attributes:
        header: the bytes before the data.
        tensors: name -> its place.
        size: bytes of the whole file.
    """

    def __init__(self, tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> None:
        ordered = aligned(tensors)
        self.header = header_bytes(ordered, metadata)
        self.size = len(self.header)
        places = {}
        for info in ordered:
            places[info.name] = replace(info, start=self.size)
            self.size += info.nbytes
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(places)

    def begin(self, file: BufferedWriter) -> None:
        """Write the header. Raises OSError."""
        file.write(self.header)

    def write(self, file: BufferedWriter, name: str, offset: int, values: torch.Tensor) -> int:
        """Write `values` from byte `offset` of the tensor on; returns where they end.

        Only the dtype's size is looked at: e4m3 may come as uint8. Raises OSError.
        """
        info = self.tensors[name]
        end = offset + values.nbytes
        if values.element_size() != info.torch_dtype.itemsize or end > info.nbytes:
            raise ValueError(
                f"tensor {name!r}: {values.dtype} at bytes {offset} to {end}; it is {info.dtype} "
                f"of {info.nbytes} bytes"
            )
        if values.numel():
            file.seek(info.start + offset)
            file.write(raw_bytes(values))
        return end

    def is_written(self, path: Path) -> bool:
        """Whether a finished file has this layout."""
        try:
            with open(path, "rb") as file:
                header = file.read(len(self.header))
                return header == self.header and file.seek(0, 2) == self.size
        except FileNotFoundError:
            return False
