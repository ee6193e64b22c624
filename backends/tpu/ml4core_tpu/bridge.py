"""Torch tensors of the host as JAX arrays and back, without a copy where the memory is aligned."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ml4core_tpu.compiler_stacks import larger_stacks

if TYPE_CHECKING:
    import jax

HOST_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",  # the metadata server of Google's cloud, which never answers
        "JAX_PLATFORMS": "cpu",
        "TPU_ACCELERATOR_TYPE": "tpu7x-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process that loads it aborts
        "TPU_LOG_DIR": "disabled",
    }
)
"""What JAX and libtpu need to be told before they start on a host without a TPU: the CPU runs, and
libtpu compiles for a machine of 8 devices without looking for one.
"""


_LEAST_PAGES = 4


def host_environment() -> None:
    """Sets what isn't set. Before JAX is imported."""
    for name, value in HOST_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    larger_stacks()


def to_jax(tensor: Tensor) -> jax.Array:
    """An array of the tensor's memory, or of a copy where it is strided. int64 becomes int32.

    What the tensor's memory becomes later shows in the array, so it is not to outlive the call, and
    never to be donated.
    """
    import jax

    if tensor.dtype == torch.int64:
        tensor = tensor.to(torch.int32)
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def to_torch(array: jax.Array, rows: int | None = None) -> Tensor:
    """A tensor of its own, of the first ``rows`` if given: JAX's arrays are not to be written, and
    a slice of one would be a program for each length.
    """
    return torch.from_dlpack(array)[:rows].clone()


def bucket(count: int, least: int = 1) -> int:
    """The power of two that holds ``count``: programs are made for few sizes."""
    return max(least, 1 << max(0, count - 1).bit_length())


def padded(tensor: Tensor, rows: int, fill: float = 0) -> Tensor:
    """The tensor with more rows behind, ``rows`` in all."""
    short = rows - tensor.shape[0]
    if not short:
        return tensor
    return torch.cat((tensor, tensor.new_full((short, *tensor.shape[1:]), fill)))


def written(
    parts: Sequence[Tensor],
    slots: Tensor,
    page: int,
    write: Callable[[tuple[Any, ...], Any], Sequence[jax.Array]],
) -> None:
    """Writes into pages of ``parts``, in place: of the whole cache only those that ``slots`` int64
    [T] lie in are handed to ``write(parts, slots int32)``, which gives them back written.
    """
    total = parts[0].shape[0] * page
    valid = (slots >= 0) & (slots < total)
    touched = torch.unique(slots[valid] // page)
    count = len(touched)
    if not count:
        return
    # Pages that fill up to a power of two repeat the last one, and are dropped again.
    taken = torch.cat((touched, touched[-1:].expand(bucket(count, _LEAST_PAGES) - count)))
    place = torch.searchsorted(touched, slots.clamp(min=0) // page)
    local = torch.where(valid, place * page + slots % page, -1)
    found = write(tuple(to_jax(part[taken]) for part in parts), to_jax(local))
    for part, new in zip(parts, found, strict=True):
        part[touched] = torch.from_dlpack(new)[:count]
