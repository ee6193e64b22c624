"""Index keys of a cache as kernels read and write them, in each layout that is served."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ml4core.api import KVCache
from ml4core_triton.kernels.fp8 import fp8_code
from ml4core_triton.kernels.numeric import finite_size, power_of_two, scale_exponent
from ml4core_triton.kernels.tiles import code_offset, scale_offset

LAYOUTS = ("tiled16_f32", "planar_f32", "planar_ue8m0x4", "fp32")
"""By number. Those that a backend's scores are made for are fewer."""

TILED = tl.constexpr(0)
PLANAR = tl.constexpr(1)
PLANAR_UE8M0 = tl.constexpr(2)
FP32 = tl.constexpr(3)

AMAX_FLOOR = tl.constexpr(1e-4)
"""The least magnitude that a scale of index keys and queries is made for."""


@dataclass(frozen=True)
class IndexKeys:
    """What a kernel needs to know of a cache of index keys.

    Attributes:
        pages: [blocks, block_size * (D + 4)] uint8, or [blocks, block_size, D] fp32.
        kind: ``TILED``, ``PLANAR``, ``PLANAR_UE8M0`` or ``FP32``.
        width: D.
    """

    pages: torch.Tensor
    kind: int
    width: int

    @property
    def page_stride(self) -> int:
        """In elements of ``pages``."""
        return int(self.pages.stride(0))


def index_keys(cache: KVCache) -> IndexKeys:
    """The keys of a cache. Raises ``ValueError`` for a layout that the kernels don't read, and for
    pages that are not dense inside.
    """
    cache.require(*LAYOUTS)
    pages = cache.parts[0]
    if not pages[:1].is_contiguous():
        raise ValueError(
            f"pages of index keys must be dense inside; these have strides {pages.stride()} for "
            f"{list(pages.shape)}"
        )
    return IndexKeys(pages, LAYOUTS.index(cache.layout.id), cache.layout.width)


@triton.jit
def quantised(x):
    """Codes uint8 and exponents int32 of fp32 rows [ROWS, D]: the rule of keys and of queries."""
    exponent = scale_exponent(tl.maximum(tl.max(finite_size(x), 1), AMAX_FLOOR))
    return fp8_code(x * power_of_two(-exponent)[:, None], False), exponent


@triton.jit
def key_tile(
    pages,
    page_offsets,
    inside,
    valid,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """What is stored, [keys, BD] uint8 or fp32, of tokens ``inside`` their pages at
    ``page_offsets``; 0 where not ``valid``, and behind D.
    """
    column = tl.arange(0, BD)
    mask = valid[:, None] if BD == D else valid[:, None] & (column < D)[None, :]
    if KIND == TILED:
        place = page_offsets[:, None] + code_offset(inside[:, None], column[None, :], D, True)
    else:
        place = (page_offsets + code_offset(inside, 0, D, False))[:, None] + column[None, :]
    return tl.load(pages + place, mask=mask, other=0)


@triton.jit
def key_scales(
    pages,
    page_offsets,
    inside,
    valid,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Scales fp32 [keys] of the same tokens; 1 if not ``valid``."""
    place = pages + page_offsets + scale_offset(inside, D, BLOCK_SIZE)
    if KIND == PLANAR_UE8M0:
        exponent = tl.load(place, mask=valid, other=127).to(tl.int32)
        scale = power_of_two(exponent - 127)
    else:
        scale = tl.load(place.to(tl.pointer_type(tl.float32)), mask=valid, other=1.0)
    return scale


@triton.jit
def store_scale(place, exponent, mask, KIND: tl.constexpr):
    """Writes 2**exponent where a key's scale lies: as fp32, or as four equal bytes."""
    if KIND == PLANAR_UE8M0:
        tl.store(place.to(tl.pointer_type(tl.int32)), (exponent + 127) * 0x01010101, mask)
    else:
        tl.store(place.to(tl.pointer_type(tl.float32)), power_of_two(exponent), mask)


@triton.jit
def store_keys(
    pages,
    slots,
    valid,
    x,
    page_stride,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Writes fp32 keys [ROWS, BD], zeros behind D, to int64 ``slots`` [ROWS] where ``valid``."""
    start = (slots // BLOCK_SIZE).to(tl.int64) * page_stride
    inside = slots % BLOCK_SIZE
    column = tl.arange(0, BD)
    place = pages + start[:, None] + code_offset(inside[:, None], column[None, :], D, KIND == TILED)
    fits = valid[:, None] & (column < D)[None, :]
    if KIND == FP32:
        tl.store(place, x, fits)
    else:
        codes, exponent = quantised(x)
        tl.store(place, codes, fits)
        scales = pages + start + scale_offset(inside, D, BLOCK_SIZE)
        store_scale(scales, exponent, valid, KIND)


@triton.jit
def write_key(
    start, inside, x, column, KIND: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Stores one key ``x`` fp32 [BD] as token ``inside`` of the page at ``start``."""
    place = start + code_offset(inside, column, D, KIND == TILED)
    if KIND == FP32:
        tl.store(place, x, column < D)
    else:
        exponent = scale_exponent(tl.maximum(tl.max(finite_size(x), 0), AMAX_FLOOR))
        tl.store(place, fp8_code(x * power_of_two(-exponent), False), column < D)
        store_scale(start + scale_offset(inside, D, BLOCK_SIZE), exponent, None, KIND)
